"""Reads users from the store: the states of a batch, and before that the logs of users whose requests need them."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, Self

import numpy as np

from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.model_inputs import MAX_MISSING_EVENTS
from app.catalogue.trained_catalogue import NO_ROWS
from app.observability.metrics import StoreMetrics
from app.recommendation.batching import Limits, MicroBatcherByLane, Requester
from app.recommendation.fair_thread import FairThread
from app.recommendation.ranking.generation_context import GenerationContext
from app.recommendation.ranking.stored_users import SeenRows, StoredUsers
from app.schemas.event_rules import longest_within_s
from app.schemas.recommendations import RecommendationRequest
from model.artifact.string_table import FREE_SLOT
from model.lisa.item_intervals import Purchases
from storage.errors import PartlyRead, StorageError, StorageUnavailable
from storage.protocol import HistoryStore
from storage.state.corrections import EventFilter, SeenItems
from storage.state.generation import Generation

DAY_US = 86_400e6
READ_AT_ONCE = 2  # logs per node of the store
FEW_ITEMS = 200  # items of a log that take less time to look up than a switch to another thread
MAX_WAITING = 128  # logs


class LogQuery(NamedTuple):
    """The part of a user's log that requests need: seen items, and items excluded by events of certain types.

    within_s       how long an event excludes its item, by event type
    has_purchases  whether the user's purchases are needed too
    """

    user_id: str
    within_s: tuple[tuple[str, float], ...] = ()
    has_purchases: bool = False

    @classmethod
    def of(cls, request: RecommendationRequest) -> Self | None:
        """Return the query for the request's log; None if it needs no log."""
        if request.user_id is None or not needs_events(request):
            return None
        rules = request.event_rules
        within_s = tuple(sorted(longest_within_s(rules).items())) if rules else ()
        return cls(request.user_id, within_s, request.mode == "repeat")


def needs_events(request: RecommendationRequest) -> bool:
    """Return whether the request depends on single events of its user or visitor."""
    return bool(request.event_rules) or request.seen_rule == "all" or request.mode == "repeat"


def now_us() -> int:
    """Return the time of this machine, in microseconds since the epoch."""
    return time.time_ns() // 1_000


def log_queries(requests: Iterable[RecommendationRequest]) -> list[LogQuery]:
    """Return the distinct log queries of the requests."""
    return [query for query in dict.fromkeys(map(LogQuery.of, requests)) if query is not None]


class _Log(NamedTuple):
    """A user's log, and the filter on its events."""

    user_id: str
    events: EventFilter


class LogReader:
    """Reads the items that users have seen, from the newest events of each, for a few of the tenant's users at a time.

    Long logs are read page by page. Their reads queue behind each other, with keys taking turns, and delay no other
    requests.
    """

    def __init__(
        self, store: HistoryStore, tenant: str, metrics: StoreMetrics, max_entries: int, thread: FairThread
    ) -> None:
        self._store = store
        self._tenant = tenant
        self._metrics = metrics
        self._max_entries = max_entries
        self._thread = thread
        self._batcher: MicroBatcherByLane[str, _Log, SeenItems | None] = MicroBatcherByLane(
            self._read_batch,
            lambda _: 1.0,
            lambda log: store.node_of(tenant, log.user_id),
            lambda _: Limits(max_batch=READ_AT_ONCE, max_waiting=MAX_WAITING),
        )

    async def read(
        self, queries: Sequence[LogQuery], context: GenerationContext, requester: Requester
    ) -> dict[LogQuery, SeenRows]:
        """Read the users' current logs. Logs that cannot be read now are missing from the result, and this is reported.

        raises   StorageUnavailable  when an unreadable log determines which items to exclude, as a filter does
                 Overloaded          when the queue of log reads is full
                 ClientDisconnect    when the caller has disconnected
        """
        logs = [_Log(query.user_id, _events_of(query, context)) for query in queries]
        found: dict[LogQuery, SeenRows] = {}
        for query, seen in zip(queries, await self._read_logs(logs, requester), strict=True):
            if seen is None and query.within_s:
                raise StorageUnavailable("the user's log is not readable now, and it determines which items to exclude")
            if seen is not None:
                newest = None if seen.is_complete else self._max_entries
                in_rows = partial(_in_rows, seen, context.catalogue, newest, has_purchases=query.has_purchases)
                size = len(seen.item_ids) + len(seen.left_out) + len(seen.times_us)
                is_short = size <= FEW_ITEMS
                found[query] = in_rows() if is_short else await self._thread.run(in_rows, 1.0 + size, requester)
        return found

    async def lengths(self, user_ids: Sequence[str]) -> list[int]:
        """Return the number of entries that a read of each user's log would return; an empty list if the store fails.

        The failure is reported. A store that cannot return lengths cannot be read either.
        """
        try:
            return await self._store.log_lengths(self._tenant, user_ids, limit=self._max_entries)
        except StorageError as exc:
            self._metrics.failures.report(exc)
            return []

    async def archived_files(self, user_ids: Sequence[str]) -> int:
        """Return the number of archive files that contain the users' logs; 0 if the store fails, as in `lengths`."""
        try:
            files = await asyncio.gather(*(self._store.archived_files(self._tenant, user_id) for user_id in user_ids))
        except StorageError as exc:
            self._metrics.failures.report(exc)
            return 0
        return sum(files)

    async def _read_logs(self, logs: Sequence[_Log], requester: Requester) -> list[SeenItems | None]:
        if len(logs) == 1:
            return [await self._batcher.answer_one(logs[0], requester)]  # the common case
        return await self._batcher.submit(logs, requester)

    async def _read_batch(self, logs: Sequence[_Log]) -> list[SeenItems | None]:
        if len(logs) == 1:
            return [await self._seen_items(logs[0])]  # the common case
        return await asyncio.gather(*map(self._seen_items, logs))

    async def _seen_items(self, log: _Log) -> SeenItems | None:
        begin_s, is_failed = time.perf_counter(), False
        try:
            return await self._store.seen_items(self._tenant, log.user_id, log.events, limit=self._max_entries)
        except StorageError as exc:
            is_failed = True
            self._metrics.failures.report(exc)
            return None
        finally:
            self._metrics.observe("log", time.perf_counter() - begin_s, is_failed=is_failed)


def carried_rows(request: RecommendationRequest, generation: Generation, catalogue: LiveCatalogue) -> SeenRows:
    """Return the rows of the events in the visitor's state that the request refers to, at the current time."""
    assert request.state is not None
    state = request.state.opened
    assert state is not None  # states are opened before requests are answered
    seen = SeenItems(_events_within(longest_within_s(request.event_rules), generation), len(state.events))
    seen.add(("", one.item_id, one.type, one.time_s * 1_000_000, None) for one in state.events)
    return _in_rows(seen, catalogue, None if state.event_count <= len(state.events) else len(state.events))


def _events_of(query: LogQuery, context: GenerationContext) -> EventFilter:
    timed_types = context.bought_types if query.has_purchases else ()
    events = _events_within(dict(query.within_s), context.generation)
    return events._replace(timed_types=timed_types, state_of=context.generation)


def _events_within(within_s: Mapping[str, float], generation: Generation) -> EventFilter:
    time_us = now_us()
    since_us = {name: time_us - seconds * 1e6 for name, seconds in within_s.items()}
    return EventFilter(generation.unseen_types, since_us)


def _in_rows(seen: SeenItems, catalogue: LiveCatalogue, newest: int | None, *, has_purchases: bool = False) -> SeenRows:
    bought = _purchases(seen, catalogue) if has_purchases else None
    left_out = catalogue.rows(seen.left_out) if seen.left_out else NO_ROWS
    return SeenRows(catalogue.rows(seen.item_ids), left_out, newest, bought, seen.state)


def _purchases(seen: SeenItems, catalogue: LiveCatalogue) -> Purchases:
    """Return the purchases of items in the catalogue, with their current age."""
    rows, times_us = catalogue.row_of.places_of(seen.timed_items), np.array(seen.times_us, np.float64)
    is_known = rows != FREE_SLOT
    return Purchases(rows[is_known], np.maximum(now_us() - times_us[is_known], 0.0) / DAY_US)


class StateReader:
    """Reads states of one tenant's users for one generation.

    node_of  returns the node that stores a user's state; "" if there is only one
    """

    def __init__(self, store: HistoryStore, tenant: str, generation: Generation, metrics: StoreMetrics) -> None:
        self._store = store
        self._tenant = tenant
        self._generation = generation
        self._metrics = metrics
        self.node_of = partial(store.node_of, tenant)

    async def read(self, requests: Sequence[RecommendationRequest], seen: Sequence[SeenRows | None]) -> StoredUsers:
        """Read the requests' users. Users that cannot be read now are missing from the result, and this is reported.

        seen  what was read from the log of each request's user; None if the read failed, and then the user is missing
        """
        before = _states_read_before(requests, seen)
        named = dict.fromkeys([request.user_id for request in requests])
        user_ids = [user_id for user_id in named if user_id is not None and user_id not in before]
        if not user_ids:
            return StoredUsers({user_id: state for user_id, state in before.items() if state is not None}, seen)
        unread = {request.user_id for request, one in zip(requests, seen, strict=True) if one is None}
        begin_s, is_failed = time.perf_counter(), False
        states: Iterable[tuple[str, bytes | None]]
        try:
            read = await self._store.states(self._tenant, user_ids, self._generation, max_missing=MAX_MISSING_EVENTS)
            states = zip(user_ids, read, strict=True)
        except StorageError as exc:
            states = exc.values.items() if isinstance(exc, PartlyRead) else ()
            self._metrics.failures.report(exc)
            is_failed = True
        read_s = time.perf_counter() - begin_s
        if is_failed or unread:
            self._metrics.count_failed_read()
        known: dict[str, bytes] = {}
        for user_id, state in chain(before.items(), states):
            if state is not None and user_id not in unread:
                known[user_id] = state  # noqa: PERF403
        return StoredUsers(known, seen, read_s, is_failed)


def _states_read_before(
    requests: Sequence[RecommendationRequest], seen: Sequence[SeenRows | None]
) -> dict[str, bytes | None]:
    """Return the states that came with logs, for users with one request; with several, another may need a newer one."""
    if not [one for one in seen if one is not None and one.state is not None]:
        return {}  # the common case
    counts = Counter(request.user_id for request in requests) if len(requests) > 1 else {requests[0].user_id: 1}
    return {
        request.user_id: one.state.value
        for request, one in zip(requests, seen, strict=True)
        if one is not None and one.state is not None and request.user_id is not None and counts[request.user_id] == 1
    }
