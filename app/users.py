"""What the service remembers of one user, for people to read."""

from datetime import UTC, datetime, timedelta

from app.catalogue import Catalogue
from app.errors import UserNotFound
from app.schemas import Erasure, LoggedEvent, UserEvents, UserState
from storage.state import Event, Generation, recent_items
from storage.store import UserStore

FILES_WITHIN = timedelta(hours=24)  # an archiver that takes its turns needs minutes


class Users:
    """Reads and erases what is kept of one tenant's users."""

    def __init__(self, name: str, generation: Generation, catalogue: Catalogue, store: UserStore, tenant: str) -> None:
        self._name = name
        self._generation = generation
        self._catalogue = catalogue
        self._store = store
        self._tenant = tenant

    async def state(self, user_id: str) -> UserState:
        """The user's state as of the newest acknowledged event.

        raises  UserNotFound  when the user has no event
                StorageError  when the store cannot be read
        """
        (value,) = await self._store.states(self._tenant, [user_id], self._generation)
        if value is None:
            raise UserNotFound("no event of this user is known")
        states = self._generation.decode_many([value])
        state = states[0]
        item_ids = self._catalogue.item_ids
        return UserState(
            user_id=user_id,
            generation=self._name,
            event_count=int(state["event_count"]),
            last_item_id=item_ids[state["last_item"]] if state["last_item"] >= 0 else None,
            recent_items=[item_ids[row] for row in recent_items(state)],
            histogram=self._generation.histograms(states)[0].tolist(),
        )

    async def events(self, user_id: str, after: int, limit: int) -> UserEvents:
        """A page of the user's log, also of the part that is in the archive.

        raises  UserNotFound  when the user has no event
                StorageError  when the store, or the archive that is needed, cannot be read
        """
        entries = await self._store.events(self._tenant, user_id, after=after, limit=limit + 1)
        if not entries and not after:
            raise UserNotFound("no event of this user is known")
        page = entries[:limit]
        return UserEvents(
            user_id=user_id,
            events=[_logged_event(entry.event) for entry in page],
            next=page[-1].seq if len(entries) > limit else None,
        )

    async def erase(self, user_id: str) -> Erasure:
        """Forget the user, known or not. StorageError when that cannot be made durable; then erase again."""
        await self._store.erase(self._tenant, user_id)
        return Erasure(user_id=user_id, files_by=datetime.now(UTC).replace(microsecond=0) + FILES_WITHIN)


def _logged_event(event: Event) -> LoggedEvent:
    logged: LoggedEvent = {
        "event_id": event.event_id,
        "user_id": event.user_id,
        "item_id": event.item_id,
        "type": event.type,
        "timestamp": event.timestamp_us / 1e6,
    }
    if event.value is not None:
        logged["value"] = event.value
    if event.recommendation_id is not None:
        logged["recommendation_id"] = event.recommendation_id
    return logged
