"""The data that the service stores about a user: reading, correcting and erasing it."""

import asyncio
import time
from datetime import UTC, datetime, timedelta

from app.catalogue.model_inputs import MAX_MISSING_EVENTS
from app.catalogue.trained_catalogue import TrainedCatalogue
from app.errors import InvalidRequest, StateNotReady, UserNotFound, validate
from app.schemas.users import (
    Erasure,
    LoggedEvent,
    LoggedUndo,
    Merged,
    MergeRequest,
    ShownItem,
    Undone,
    UserEvents,
    UserState,
)
from storage.protocol import HistoryStore
from storage.state.corrections import posted_as
from storage.state.event import Event, Merge, Undo, logged_id
from storage.state.generation import Generation
from storage.state.layout import State, recent_items, shown_items

FOLDED_WITHIN_S = 1.0  # waiting time for a long log to be folded; after that the request is rejected
ASK_AGAIN_AFTER_S = 0.05
ERASED_FROM_FILES_WITHIN = timedelta(hours=24)  # an archiver normally takes minutes


class UserData:
    """Reads, corrects and erases the data of one tenant's users."""

    def __init__(
        self, name: str, generation: Generation, catalogue: TrainedCatalogue, store: HistoryStore, tenant: str
    ) -> None:
        self._name = name
        self._generation = generation
        self._catalogue = catalogue
        self._store = store
        self._tenant = tenant

    async def state(self, user_id: str) -> UserState:
        """Return the user's state after the newest acknowledged event.

        raises  UserNotFound   when the user has no event
                StateNotReady  when a long log is still being folded
                StorageError   when the store cannot be read
        """
        value = await self._folded_state(user_id)
        states = self._generation.decode_many([value])
        state = states[0]
        item_ids = self._catalogue.item_ids
        last = int(self._catalogue.rows_of_state_items(states["last_item"])[0])
        return UserState(
            user_id=user_id,
            generation=self._name,
            event_count=int(state["event_count"]),
            last_item_id=item_ids[last] if last >= 0 else None,
            recent_items=[item_ids[row] for row in self._catalogue.known_rows_of_state_items(recent_items(state))],
            shown_items=self._shown(state),
            histogram=self._generation.histograms(states)[0].tolist(),
        )

    def _shown(self, state: State) -> list[ShownItem]:
        items, times_s, counts = shown_items(state)
        shown = zip(self._catalogue.rows_of_state_items(items), times_s.tolist(), counts.tolist(), strict=True)
        return [
            {"item_id": self._catalogue.item_ids[row], "count": count, "last": datetime.fromtimestamp(time_s, UTC)}
            for row, time_s, count in shown
            if row >= 0
        ]

    async def _folded_state(self, user_id: str) -> bytes:
        give_up_s = time.monotonic() + FOLDED_WITHIN_S
        while True:
            (value,) = await self._store.states(
                self._tenant, [user_id], self._generation, max_missing=MAX_MISSING_EVENTS
            )
            if value is not None:
                return value
            if not await self._store.events(self._tenant, user_id, limit=1):
                raise UserNotFound("this user has no events; check the id, or treat the user as new")
            if time.monotonic() > give_up_s:
                raise StateNotReady
            await asyncio.sleep(ASK_AGAIN_AFTER_S)

    async def events(self, user_id: str, after: int, limit: int) -> UserEvents:
        """Return a page of the user's log, including its archived part.

        raises  UserNotFound  when the user has no event
                StorageError  when the store, or an archive that is needed, cannot be read
        """
        entries = await self._store.events(self._tenant, user_id, after=after, limit=limit + 1)
        if not entries and await self._store.log_lengths(self._tenant, [user_id], limit=1) == [0]:
            raise UserNotFound("this user has no events; check the id, or treat the user as new")
        page = entries[:limit]
        return UserEvents(
            user_id=user_id,
            events=[_logged(entry.record) for entry in page if not isinstance(entry.record, Merge)],
            next=page[-1].seq if len(entries) > limit else None,
        )

    async def undo(self, user_id: str, event_id: str) -> Undone:
        """Undo an event.

        raises  UnknownEvent  when no event was posted with this user and id
                StorageError  when this cannot be made durable, or an archive that is needed cannot be read
        """
        changed = await self._store.undo(self._tenant, user_id, logged_id(event_id))
        return Undone(user_id=user_id, event_id=event_id, changed=changed)

    async def merge(self, user_id: str, visitor: str) -> Merged:
        """Merge the visitor into the user; either may be unknown.

        raises  MergeRefused  when the visitor is too large or merged into another user, or the user into the visitor
                StorageError  as for `undo`; repeating the call completes the merge
        """
        changed = await self._store.merge(self._tenant, user_id, visitor)
        return Merged(user_id=user_id, visitor=visitor, changed=changed)

    async def erase(self, user_id: str) -> Erasure:
        """Erase the user, known or not; raise StorageError if this is not durable and must be repeated."""
        await self._store.erase(self._tenant, user_id)
        return Erasure(user_id=user_id, files_by=datetime.now(UTC).replace(microsecond=0) + ERASED_FROM_FILES_WITHIN)


def visitor_of(body: object, user_id: str) -> str:
    """Return the visitor that the parsed body of a merge into the user names.

    raises  InvalidRequest  when the body is not valid, or names the user itself
    """
    visitor = validate(MergeRequest, body, "the body is not a valid request").visitor
    if visitor == user_id:
        raise InvalidRequest("a user cannot be merged into itself; put the visitor's id into 'from'")
    return visitor


def _logged(event: Event | Undo) -> LoggedEvent | LoggedUndo:
    user_id, event_id = posted_as(event)
    if isinstance(event, Undo):
        return {"undo": event_id, "user_id": user_id, "timestamp": event.timestamp_us / 1e6}
    logged: LoggedEvent = {
        "event_id": event_id,
        "user_id": user_id,
        "type": event.type,
        "timestamp": event.timestamp_us / 1e6,
    }
    if event.items:
        logged["items"] = [*event.items]
    else:
        logged["item_id"] = event.item_id
    if event.value is not None:
        logged["value"] = event.value
    if event.recommendation_id is not None:
        logged["recommendation_id"] = event.recommendation_id
    if event.order_id is not None:
        logged["order_id"] = event.order_id
    return logged
