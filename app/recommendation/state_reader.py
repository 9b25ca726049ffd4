"""Reads the states and seen items of a batch's users from the store."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.catalogue.model_inputs import MAX_MISSING_EVENTS
from app.observability.metrics import StoreMetrics
from app.schemas.recommendations import RecommendationRequest
from storage.errors import PartlyRead, StorageError
from storage.protocol import HistoryStore
from storage.state.generation import Generation


@dataclass(frozen=True, slots=True)
class StoredUsers:
    """The stored data of some requests' users.

    states  encoded states by user; a user without events, or whose state is still being folded, is missing
    seen    item ids of the whole log by user, for users whose requests exclude seen items
    read_s  how long the store took; 0 when there was no user to read
    """

    states: Mapping[str, bytes]
    seen: Mapping[str, set[str]]
    read_s: float = 0.0


class StateReader:
    """Reads states and logs of one tenant's users for one generation."""

    def __init__(self, store: HistoryStore, tenant: str, generation: Generation, metrics: StoreMetrics) -> None:
        self._store = store
        self._tenant = tenant
        self._generation = generation
        self._metrics = metrics

    def node_of(self, request: RecommendationRequest) -> str:
        """Return the node that has the state of the request's user; "" where there is only one, or no user."""
        return "" if request.user_id is None else self._store.node_of(self._tenant, request.user_id)

    async def read(self, requests: Sequence[RecommendationRequest]) -> StoredUsers:
        """Read the requests' users. Users that cannot be read now are missing; this is reported."""
        user_ids = _distinct(request.user_id for request in requests)
        if not user_ids:
            return StoredUsers({}, {})
        all_seen = _distinct(request.user_id for request in requests if request.exclude_seen == "all")
        failures: list[StorageError] = []
        begin_s = time.perf_counter()
        states: Iterable[tuple[str, bytes | None]]
        try:
            with self._metrics.timed("states"):
                read = await self._store.states(
                    self._tenant, user_ids, self._generation, max_missing=MAX_MISSING_EVENTS
                )
            states = zip(user_ids, read, strict=True)
        except StorageError as exc:
            failures.append(exc)
            states = exc.values.items() if isinstance(exc, PartlyRead) else ()
        seen = await self._read_seen(all_seen, failures.append) if all_seen else {}
        read_s = time.perf_counter() - begin_s
        if failures:
            self._metrics.failures.report(failures[0])
            self._metrics.count_failed_read()
        unread = set(all_seen).difference(seen)
        known: dict[str, bytes] = {}
        for user_id, state in states:
            if state is not None and user_id not in unread:
                known[user_id] = state  # noqa: PERF403
        return StoredUsers(known, seen, read_s)

    async def _read_seen(
        self, user_ids: Sequence[str], report_failure: Callable[[StorageError], None]
    ) -> dict[str, set[str]]:
        """Return the item ids in each user's log, for the users that can be read."""

        async def seen_items(user_id: str) -> set[str] | None:
            try:
                with self._metrics.timed("log"):
                    return await self._store.seen_items(self._tenant, user_id, self._generation.unseen_types)
            except StorageError as exc:
                report_failure(exc)
                return None

        seen_by_user = await asyncio.gather(*map(seen_items, user_ids))
        return {user_id: seen for user_id, seen in zip(user_ids, seen_by_user, strict=True) if seen is not None}


def _distinct(user_ids: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(user_id for user_id in user_ids if user_id is not None))
