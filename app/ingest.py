"""The first use case: events are validated, logged and folded, all of a request or nothing of it."""

import time
from collections.abc import Sequence

from pydantic import ValidationError

from app.errors import MAX_DETAILS, ErrorDetail, InvalidEvents, details_of
from app.metrics import Metrics
from app.schemas import MAX_EVENTS, EventCounts, PostedEvent
from app.settings import Settings
from app.uuid7 import uuid7
from storage.state import Event, id_time_us
from storage.store import UserStore

ID_NEEDED = "is required where keys are; best a UUIDv7, and the same one when the event is sent again"
REFUSED = "nothing was applied; correct the events named here and send them all again"


class Ingest:
    """Takes in the events of one tenant."""

    def __init__(self, store: UserStore, settings: Settings, metrics: Metrics) -> None:
        self._store = store
        self._tenant = settings.tenant
        self._needs_ids = settings.keys_file is not None
        self._metrics = metrics

    async def append(self, body: object) -> EventCounts:
        """Apply the parsed body of ``POST /v1/events``; when this returns, the events are durable.

        raises  InvalidEvents  when one event is invalid, or there are none or too many
                StorageError   when the store did not take them; sending them again is safe where they have ids
        """
        now_us = time.time_ns() // 1_000
        posted = validated(body if isinstance(body, list) else [body], now_us, needs_ids=self._needs_ids)
        with self._metrics.asking_store("append"):
            appended = await self._store.append(self._tenant, [_event(event, now_us) for event in posted])
        self._metrics.count_events(appended)
        duplicates = sum(one.duplicate for one in appended)
        return EventCounts(
            accepted=len(appended) - duplicates,
            duplicates=duplicates,
            unknown_items=sum(one.unknown_item for one in appended),
        )


def validated(bodies: Sequence[object], now_us: int, *, needs_ids: bool = False) -> list[PostedEvent]:
    """The events, if all of them are valid; InvalidEvents names the first 20 that are not, and why."""
    if not 1 <= len(bodies) <= MAX_EVENTS:
        raise InvalidEvents(f"a request has 1 to {MAX_EVENTS:,} events; nothing was applied")
    events: list[PostedEvent] = []
    faults: list[list[ErrorDetail]] = []
    for index, body in enumerate(bodies):
        try:
            event = PostedEvent.model_validate(body, context={"now_us": now_us})
            events.append(event)
            if needs_ids and event.event_id is None:
                faults.append([ErrorDetail(index=index, field="event_id", reason=ID_NEEDED)])
        except ValidationError as exc:
            faults.append(details_of(exc, index))
        if len(faults) == MAX_DETAILS:
            break
    if faults:
        every_one = [detail for details in faults for detail in details]
        first_of_each = [details[0] for details in faults]
        raise InvalidEvents(REFUSED, every_one if len(every_one) <= MAX_DETAILS else first_of_each)
    return events


def _event(posted: PostedEvent, now_us: int) -> Event:
    """What is logged. An id made here has no id-time: a resend would come with another one anyway."""
    return Event(
        event_id=posted.event_id or uuid7(),
        user_id=posted.user_id,
        item_id=posted.item_id,
        type=posted.type,
        timestamp_us=now_us if posted.timestamp_us is None else posted.timestamp_us,
        id_time_us=id_time_us(posted.event_id, posted.timestamp_us) if posted.event_id else None,
        value=posted.value,
        recommendation_id=posted.recommendation_id,
    )
