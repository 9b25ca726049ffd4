"""Reads users from the store: the states of a batch, and before the batch the logs of who excludes all seen items."""

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.model_inputs import MAX_MISSING_EVENTS
from app.observability.metrics import StoreMetrics
from app.recommendation.batching import Limits, MicroBatcherByLane, Requester
from app.recommendation.fair_thread import FairThread
from app.recommendation.ranking.stored_users import SeenRows, StoredUsers
from app.schemas.recommendations import RecommendationRequest
from storage.errors import PartlyRead, StorageError
from storage.protocol import HistoryStore
from storage.state.corrections import SeenItems
from storage.state.generation import Generation

READ_AT_ONCE = 2  # logs, of each node of the store
MAX_WAITING = 128  # logs


class _Log(NamedTuple):
    """A user's log, and the types of events in it that do not count as seen."""

    user_id: str
    unseen_types: Collection[str]


class LogReader:
    """Reads which items users have seen, by the newest events of each, for a few users of the tenant at a time.

    Long logs are read page by page. So they wait for each other, keys taking turns, and hold nobody else up.
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
        self, user_ids: Sequence[str], generation: Generation, catalogue: LiveCatalogue, requester: Requester
    ) -> dict[str, SeenRows]:
        """Read the users' logs. Users that cannot be read now are missing; this is reported.

        raises   Overloaded        when too many logs wait to be read already
                 ClientDisconnect  when the caller is gone
        """
        logs = [_Log(user_id, generation.unseen_types) for user_id in user_ids]
        found: dict[str, SeenRows] = {}
        for user_id, seen in zip(user_ids, await self._batcher.submit(logs, requester), strict=True):
            if seen is not None:
                newest = None if seen.is_complete else self._max_entries
                item_ids = seen.item_ids
                rows = await self._thread.run(partial(catalogue.rows, item_ids), 1.0 + len(item_ids), requester)
                found[user_id] = SeenRows(rows, newest)
        return found

    async def lengths(self, user_ids: Sequence[str]) -> list[int]:
        """Return how many entries of each user's log would be read; none where the store cannot tell.

        Such a store cannot be read either; this is reported.
        """
        try:
            return await self._store.log_lengths(self._tenant, user_ids, limit=self._max_entries)
        except StorageError as exc:
            self._metrics.failures.report(exc)
            return []

    async def archived_files(self, user_ids: Sequence[str]) -> int:
        """Return in how many files of an archive the users' logs are; 0 where the store cannot tell, as `lengths`."""
        try:
            files = await asyncio.gather(*(self._store.archived_files(self._tenant, user_id) for user_id in user_ids))
        except StorageError as exc:
            self._metrics.failures.report(exc)
            return 0
        return sum(files)

    async def _read_batch(self, logs: Sequence[_Log]) -> list[SeenItems | None]:
        return await asyncio.gather(*map(self._seen_items, logs))

    async def _seen_items(self, log: _Log) -> SeenItems | None:
        begin_s, is_failed = time.perf_counter(), False
        try:
            return await self._store.seen_items(self._tenant, log.user_id, log.unseen_types, limit=self._max_entries)
        except StorageError as exc:
            is_failed = True
            self._metrics.failures.report(exc)
            return None
        finally:
            self._metrics.observe("log", time.perf_counter() - begin_s, is_failed=is_failed)


class StateReader:
    """Reads states of one tenant's users for one generation.

    node_of  returns the node that has a user's state, "" where there is only one
    """

    def __init__(self, store: HistoryStore, tenant: str, generation: Generation, metrics: StoreMetrics) -> None:
        self._store = store
        self._tenant = tenant
        self._generation = generation
        self._metrics = metrics
        self.node_of = partial(store.node_of, tenant)

    async def read(self, requests: Sequence[RecommendationRequest], seen: Mapping[str, SeenRows]) -> StoredUsers:
        """Read the requests' users. Users that cannot be read now are missing; this is reported.

        seen  what was read of the logs of those who exclude all seen items; without it they are missing too
        """
        user_ids = _distinct(request.user_id for request in requests)
        if not user_ids:
            return StoredUsers({}, {})
        unread = set(users_who_exclude_all(requests)).difference(seen)
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
        for user_id, state in states:
            if state is not None and user_id not in unread:
                known[user_id] = state  # noqa: PERF403
        return StoredUsers(known, seen, read_s, is_failed)


def users_who_exclude_all(requests: Iterable[RecommendationRequest]) -> list[str]:
    """Return the users of requests that exclude everything that was seen, for which their logs are needed."""
    return _distinct(request.user_id for request in requests if request.exclude_seen == "all")


def _distinct(user_ids: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(user_id for user_id in user_ids if user_id is not None))
