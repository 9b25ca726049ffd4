"""Trends: each process counts live events by item, flushes the counts to the store, and reads those of all processes.

Counting costs an addition in memory for each event. A killed process loses what it had not flushed, at most some
seconds. Events that were undone or erased fade like all others, as a trend names no user.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from storage.errors import StorageError
from storage.protocol import StatisticsStore
from storage.records import AppendResult
from storage.state.event import Event
from storage.trends import HALF_LIFE_S, count_at, trend_of

MAX_ITEMS = 4096  # that are read; those after them are hardly used, and popular items follow
MAX_HALF_LIVES = 64.0  # that a clock may have been set ahead meanwhile; beyond a double's range would be an error

logger = logging.getLogger(__name__)


class TrendCounter:
    """Counts the events of one tenant by item; what an event counts halves with each half-life.

    newest  the items with the highest trends of all processes as last read, highest first; replaced as a whole
    """

    def __init__(self, store: StatisticsStore, tenant: str) -> None:
        self.newest: Mapping[str, float] = {}
        self._store = store
        self._tenant = tenant
        self._types: Collection[str] = ()
        self._flushing = asyncio.Lock()
        self._begin_us = time.time_ns() // 1_000
        self._counts = defaultdict[str, float](float)  # in events of the moment `_begin_us`

    def set_event_weights(self, event_weights: Mapping[str, float]) -> None:
        """From now on, count the events of all types that have a weight."""
        self._types = frozenset(kind for kind, weight in event_weights.items() if weight > 0)

    def count(self, events: Sequence[Event], results: Iterable[AppendResult]) -> None:
        """Count the new ones of these events."""
        counts, types, begin_us, scale = self._counts, self._types, self._begin_us, 1 / (HALF_LIFE_S * 1e6)
        for event, result in zip(events, results, strict=True):
            if event.type in types and not result.duplicate:
                counts[event.item_id] += 2.0 ** min((event.timestamp_us - begin_us) * scale, MAX_HALF_LIVES)

    async def sync(self) -> None:
        """Flush, then read the trends of all processes; StorageError when the store cannot be used."""
        await self.flush()
        async with self._flushing:
            self.newest = await self._store.trends(self._tenant, MAX_ITEMS)

    async def flush(self) -> None:
        """Write the counts to the store; after a StorageError they are kept for the next time."""
        # without the lock, this might return before another flush has written what it has taken
        async with self._flushing:
            counts, begin_us = self._counts, self._begin_us
            self._counts, self._begin_us = defaultdict(float), time.time_ns() // 1_000
            trends = {item_id: trend_of(begin_us, count) for item_id, count in counts.items() if count > 0}
            if not trends:
                return
            try:
                await self._store.add_trends(self._tenant, trends)
            except StorageError as exc:
                logger.debug("trends could not be noted, which will be tried again: %s", exc)
                for item_id, trend in trends.items():
                    self._counts[item_id] += count_at(trend, self._begin_us)
                raise
