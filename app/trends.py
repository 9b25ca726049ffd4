"""What is used just now: counted from live events, told to the store now and then, and read from there for everybody.

Counting costs an event an addition in memory. What a process that is killed had not told yet is missing, at most some
seconds; what was undone or erased fades like everything else, as a trend names nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from storage.errors import StorageError
from storage.protocol import UserStore
from storage.records import AppendResult
from storage.state_event import Event
from storage.trends import HALF_LIFE_S, count_at, trend_of

ITEMS = 4096  # that are read; behind them nothing is used much, and popular items follow
MOST = 64.0  # half-lives that a clock may have been set ahead meanwhile; more than a double's range would be an error

logger = logging.getLogger(__name__)


class TrendCounter:
    """Of one tenant.

    newest  the items with the highest trends as far as this process has read, highest first; replaced as a whole
    """

    def __init__(self, store: UserStore, tenant: str) -> None:
        self.newest: Mapping[str, float] = {}
        self._store = store
        self._tenant = tenant
        self._types: Collection[str] = ()
        self._one_at_a_time = asyncio.Lock()
        self._begin_us = time.time_ns() // 1_000
        self._counts = defaultdict[str, float](float)  # in events of the moment `_begin_us`

    def count_types(self, event_weights: Mapping[str, float]) -> None:
        """From now on, count events of the types that weigh something."""
        self._types = frozenset(kind for kind, weight in event_weights.items() if weight > 0)

    def count(self, events: Sequence[Event], appended: Iterable[AppendResult]) -> None:
        """Count what was new of these."""
        counts, types, begin_us, scale = self._counts, self._types, self._begin_us, 1 / (HALF_LIFE_S * 1e6)
        for event, one in zip(events, appended, strict=True):
            if event.type in types and not one.duplicate:
                counts[event.item_id] += 2.0 ** min((event.timestamp_us - begin_us) * scale, MOST)

    async def sync(self) -> None:
        """Tell what was counted, and read what everybody has; StorageError when the store cannot be used."""
        await self.flush()
        async with self._one_at_a_time:
            self.newest = await self._store.trends(self._tenant, ITEMS)

    async def flush(self) -> None:
        """Tell what was counted; StorageError as for `look`, and then it is told the next time."""
        async with self._one_at_a_time:  # or who tells meanwhile has not told yet when this returns
            counts, begin_us = self._counts, self._begin_us
            self._counts, self._begin_us = defaultdict(float), time.time_ns() // 1_000
            told = {item_id: trend_of(begin_us, count) for item_id, count in counts.items() if count > 0}
            if not told:
                return
            try:
                await self._store.add_trends(self._tenant, told)
            except StorageError as exc:
                logger.debug("trends could not be noted, which will be tried again: %s", exc)
                for item_id, trend in told.items():
                    self._counts[item_id] += count_at(trend, self._begin_us)
                raise
