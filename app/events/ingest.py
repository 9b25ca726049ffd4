"""Event ingestion: events are validated, logged and folded; either all events of a request or none."""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

from pydantic import ValidationError
from uuid_utils import uuid7

from app.errors import MAX_DETAILS, ErrorDetail, InvalidEvents, PartlyAccepted, details_of
from app.events.cold_item_learner import prepare_events
from app.events.live_signals import LiveSignals
from app.events.new_users import ANYBODY, NewUsers, Sender
from app.events.steady_clock import SteadyClock
from app.events.vocabulary import Vocabulary
from app.observability.metrics import Metrics
from app.schemas.events import MAX_EVENTS, MAX_SHOWN, MAX_VALUE, EventCounts, PostedEvent
from app.schemas.fields import MAX_AHEAD_US, is_id, is_name
from app.settings import Settings
from model.data.orders import PURCHASE
from model.data.table import LAST_SECOND
from storage.errors import PartlyApplied, StorageError
from storage.protocol import EventStore
from storage.records import AppendResult
from storage.state.event import IMPRESSION, Event, id_time_us, logged_id

ID_NEEDED = "is required if the service has keys; use a UUIDv7, and the same one when you send the event again"
PLAIN_FIELDS = frozenset(
    {"event_id", "user_id", "item_id", "items", "type", "timestamp", "value", "recommendation_id", "order_id"}
)
FOLLOW_JUMPS_AFTER_S = 60.0
FEW_EVENTS = 100  # events that take at most half a millisecond to parse
EVENT_COST = 200.0  # of parsing an event, where a byte of JSON costs 1
REFUSED = "nothing was applied; correct the events in `details` and send all events again"


class ReceivedEvents(NamedTuple):
    """The events of a request.

    events     the events that the sender may post
    positions  the positions of these events in the request
    refused    the number of other events
    now_us     the time of receipt
    """

    events: list[Event]
    positions: Sequence[int]
    refused: int
    now_us: int


class Ingest:
    """Ingests the events of one tenant."""

    def __init__(
        self, store: EventStore, settings: Settings, metrics: Metrics, signals: LiveSignals, vocabulary: Vocabulary
    ) -> None:
        self._store = store
        self._tenant = settings.tenant
        self._needs_ids = settings.keys_file is not None
        self._max_value = settings.max_value
        self._metrics = metrics
        self._outcomes = metrics.events.of_tenant(self._tenant)
        self._signals = signals
        self._vocabulary = vocabulary
        self._clock = SteadyClock(FOLLOW_JUMPS_AFTER_S)
        self._new_users = NewUsers(store, self._tenant)

    async def append(self, body: object, sender: Sender = ANYBODY) -> EventCounts:
        """Apply the parsed body of ``POST /v1/events``; when this returns, the events are durable.

        raises  InvalidEvents  when an event is invalid, or there are none or too many
                TooManyNewUsersAtOnce, TooManyNewUsers  when the sender may not add as many users
                StorageError   when the store did not accept them; resending is safe if they have ids
        """
        received = await self.receive(body, sender)
        allowed, positions, refused = received.events, received.positions, received.refused
        if sender.count_new_users is not None:
            await self._new_users.admit({event.user_id for event in allowed}, sender)
        try:
            results = await self._append(allowed, received.now_us)
        except PartlyApplied as exc:
            # rejected events are resent, and counted then
            counts = self.count([allowed[place] for place in exc.results], list(exc.results.values()), refused=0)
            by_position = {positions[place]: result for place, result in exc.results.items()}
            raise PartlyAccepted(exc.failure, by_position, counts.model_dump()) from exc
        return self.count(allowed, results, refused)

    async def receive(self, body: object, sender: Sender) -> ReceivedEvents:
        """Parse an event or an array of events, and return those that the sender may post.

        raises  InvalidEvents, StorageError  as `append`; also if the sender may not post events of a type
        """
        now_us = self._clock.now_us()
        max_us = max(now_us, time.time_ns() // 1_000) + MAX_AHEAD_US
        bodies = body if isinstance(body, list) else [body]
        parse = partial(parse_events, bodies, now_us, max_us, needs_ids=self._needs_ids, max_value=self._max_value)
        if len(bodies) > FEW_EVENTS and sender.run_apart is not None:
            events: list[Event] = await sender.run_apart(parse, EVENT_COST * len(bodies))
        else:
            events = parse()
        if sender.event_types:
            require_types(events, sender.event_types)
        positions = await self._allowed_positions(events, sender)
        allowed = [events[position] for position in positions]
        return ReceivedEvents(allowed, positions, len(events) - len(allowed), now_us)

    async def _allowed_positions(self, events: Sequence[Event], sender: Sender) -> Sequence[int]:
        """Return the positions of the events that the sender may post: page keys may not post on unknown items."""
        if sender.is_public:
            about = [event.item_ids for event in events]
            unknown = await self._vocabulary.unknown_items({*chain.from_iterable(about)})
            if unknown:
                return [position for position, own in enumerate(about) if unknown.isdisjoint(own)]
        return range(len(events))

    async def _append(self, events: Sequence[Event], now_us: int) -> list[AppendResult]:
        """Append the events, and learn from the durable ones; raises PartlyApplied as the store does."""
        if not events:
            return []
        signals, learners = self._signals, self._signals.learners
        logged, observations = await prepare_events(events, learners)

        def learn_from(results: Mapping[int, AppendResult]) -> None:
            durable, outcomes = [events[place] for place in results], list(results.values())
            if any(event.type == PURCHASE for event in durable):
                signals.order_counter.count(durable, outcomes, now_us)
            for learner, observed in zip(learners, observations, strict=True):
                of_durable = {n: observed[place] for n, place in enumerate(results) if place in observed}
                learner.observe_after(durable, outcomes, of_durable)
            signals.trend_counter.count(durable, outcomes, now_us)
            signals.click_through.count(durable, outcomes)

        async def learn(results: Mapping[int, AppendResult]) -> None:
            left = iter(results.items())
            while some := dict(islice(left, FEW_EVENTS)):
                learn_from(some)
                if len(some) == FEW_EVENTS:
                    await asyncio.sleep(0)  # let other requests run

        begin_s, is_failed = time.perf_counter(), False
        try:
            results = await self._store.append(self._tenant, logged)
        except StorageError as exc:
            is_failed = True
            if isinstance(exc, PartlyApplied):
                await learn(exc.results)
            raise
        finally:
            self._metrics.store.observe("append", time.perf_counter() - begin_s, is_failed=is_failed)
        await learn(dict(enumerate(results)))
        return results

    def count(self, events: Sequence[Event], results: Sequence[AppendResult], refused: int) -> EventCounts:
        """Count the outcomes of events, also in the metrics."""
        types = self._signals.event_types
        duplicates = unknown_items = unknown_types = late = 0
        for event, result in zip(events, results, strict=True):
            duplicates += result.duplicate
            unknown_items += result.unknown_item
            unknown_types += not (result.duplicate or event.type in types)
            late += result.late
        accepted = len(results) - duplicates
        self._outcomes.count(
            {
                "accepted": accepted,
                "duplicate": duplicates,
                "unknown_item": unknown_items,
                "unknown_type": unknown_types,
                "late": late,
                "refused": refused,
            }
        )
        return EventCounts(
            accepted=accepted,
            duplicates=duplicates,
            unknown_items=unknown_items,
            unknown_types=unknown_types,
            refused=refused,
        )


def parse_events(
    bodies: Sequence[object], now_us: int, max_us: int, *, needs_ids: bool = False, max_value: float = MAX_VALUE
) -> list[Event]:
    """Parse events.

    now_us     the time of events without a timestamp
    max_us     the latest allowed time
    max_value  the largest allowed value
    raises     InvalidEvents  when an event is invalid, or there are none or too many
    """
    events = parse_plain_events(bodies, now_us, max_us, needs_ids=needs_ids, max_value=max_value)
    if events is None:
        posted = validate_events(bodies, max_us, needs_ids=needs_ids, max_value=max_value)
        events = [to_event(one, now_us) for one in posted]
    return events


def parse_plain_events(
    bodies: Sequence[object], now_us: int, max_us: int, *, needs_ids: bool = False, max_value: float = MAX_VALUE
) -> list[Event] | None:
    """Parse events of the most common form; return None if any is of another form, or invalid.

    `validate_events` returns the same result for these events, in ten times the time. Tests verify that both agree.
    """
    if not 1 <= len(bodies) <= MAX_EVENTS:
        return None
    events: list[Event] = []
    for body in bodies:
        if type(body) is not dict or not PLAIN_FIELDS.issuperset(body):
            return None
        event_id, user_id = body.get("event_id"), body.get("user_id")
        kind, timestamp, value = body.get("type", "click"), body.get("timestamp"), body.get("value")
        recommendation_id, order_id = body.get("recommendation_id"), body.get("order_id")
        about = _item_and_items(body)
        if not (is_id(user_id) and about is not None and (kind == "click" or is_name(kind))):
            return None
        if not ((recommendation_id is None or is_name(recommendation_id)) and (order_id is None or is_id(order_id))):
            return None
        if not (is_id(event_id) or (event_id is None and not needs_ids)):
            return None
        if not (value is None or (type(value) is float and 0 <= value <= max_value)):
            return None
        if timestamp is None:
            time_us = None
        elif type(timestamp) in (int, float) and abs(timestamp) <= LAST_SECOND:
            time_us = round(timestamp * 1_000_000)
            if time_us > max_us:
                return None
        else:
            return None
        item_id, items = about
        events.append(
            Event(
                logged_id(event_id) if event_id else str(uuid7()),
                user_id,
                item_id,
                kind,
                now_us if time_us is None else time_us,
                id_time_us(event_id, time_us) if event_id else None,
                value,
                recommendation_id,
                items=items,
                order_id=order_id,
            )
        )
    return events


def _item_and_items(body: Mapping[str, object]) -> tuple[str, tuple[str, ...]] | None:
    """Return an event's item, or an empty id and an impression's items; None if they are not in the common form."""
    item_id = body.get("item_id")
    if "items" not in body:
        if not is_id(item_id):
            return None
        return ("", (item_id,)) if body.get("type") == IMPRESSION else (item_id, ())
    items = body["items"]
    if body.get("type") != IMPRESSION or item_id is not None or type(items) is not list:
        return None
    is_valid = 1 <= len(items) <= MAX_SHOWN and all(map(is_id, items)) and len({*items}) == len(items)
    return ("", tuple(items)) if is_valid else None


def validate_events(
    bodies: Sequence[object], max_us: int, *, needs_ids: bool = False, max_value: float = MAX_VALUE
) -> list[PostedEvent]:
    """Return the events if all are valid; otherwise InvalidEvents names the first 20 that are not, and why."""
    require_event_count(bodies)
    context = {"max_us": max_us, "max_value": max_value}
    events: list[PostedEvent] = []
    faults: list[list[ErrorDetail]] = []
    for index, body in enumerate(bodies):
        try:
            event = PostedEvent.model_validate(body, context=context)
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


def require_types(events: Sequence[Event], types: Collection[str]) -> None:
    """Raise InvalidEvents if an event has none of these types."""
    others = [index for index, event in enumerate(events) if event.type not in types]
    refuse(others, "type", f"this key may post only events of the types {', '.join(types)}")


def refuse(positions: Sequence[int], field: str, reason: str) -> None:
    """Raise InvalidEvents if there are events at these positions; it names the first 20, the field and the reason."""
    if positions:
        details = [ErrorDetail(index=at, field=field, reason=reason) for at in positions[:MAX_DETAILS]]
        raise InvalidEvents(REFUSED, details)


def require_event_count(bodies: Sequence[object]) -> None:
    """Raise InvalidEvents if there are none or too many."""
    if not 1 <= len(bodies) <= MAX_EVENTS:
        raise InvalidEvents(f"a request must have 1 to {MAX_EVENTS:,} events; nothing was applied")


def to_event(posted: PostedEvent, now_us: int) -> Event:
    """Return the event as it is logged. A generated id has no id-time, because a resend would get another id anyway."""
    item_id = posted.item_id or ""  # events without an item have items
    is_impression = posted.type == IMPRESSION
    return Event(
        event_id=logged_id(posted.event_id) if posted.event_id else str(uuid7()),
        user_id=posted.user_id,
        item_id="" if is_impression else item_id,
        type=posted.type,
        timestamp_us=now_us if posted.timestamp_us is None else posted.timestamp_us,
        id_time_us=id_time_us(posted.event_id, posted.timestamp_us) if posted.event_id else None,
        value=posted.value,
        recommendation_id=posted.recommendation_id,
        items=tuple(posted.items or [item_id]) if is_impression else (),
        order_id=posted.order_id,
    )
