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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.catalogue import Rows, gains_of
from app.schemas.scored_items import ScoredItem
from app.shelf import LiveCatalogue
from model import bitmap
from model.bitmap import Bitmap
from model.scan import Boosts
from storage.errors import StorageError
from storage.protocol import UserStore
from storage.records import AppendResult
from storage.state_event import Event
from storage.trends import HALF_LIFE_S, count_at, trend_of

ITEMS = 4096  # that are read; behind them nothing is used much, and popular items follow
PRIOR = 1000.0  # events that training's popularity counts as where both are ranked together
MOST = 64.0  # half-lives that a clock may have been set ahead meanwhile; more than a double's range would be an error
ENOUGH = 1000.0  # events of this moment, below which what is used just now is chance

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


class Trending:
    """The trends of the items that one catalogue has."""

    def __init__(self, trends: TrendCounter, catalogue: LiveCatalogue) -> None:
        self._trends = trends
        self.catalogue = catalogue
        self._newest: Mapping[str, float] = {}
        self._read = _Read.of({}, catalogue)

    def items(self, k: int, categories: Collection[str] = ()) -> list[ScoredItem]:
        """The k highest of those that can be had in one of the categories, or in any; by how often they are used."""
        excluded = self.catalogue.unavailable.copy()
        if categories:
            excluded |= ~self.catalogue.in_categories(categories)
        read = self._now()
        rows = bitmap.first_outside(excluded, read.rows, k)
        return self.catalogue.scored_items(rows, [read.counts[row] for row in rows.tolist()])

    @property
    def are_known(self) -> bool:
        """Whether there were events enough to tell what is used just now."""
        return self._now().total >= ENOUGH

    def first(self, k: int, excluded: Bitmap) -> Rows:
        """The k items outside that are used most just now, popular ones where few are."""
        return np.array([row for _, row in self._first(k, excluded)], np.int64)

    def popular(self, k: int, excluded: Bitmap) -> list[ScoredItem]:
        """The same with their scores; by training's counts alone where too little is known."""
        if not self.are_known:
            return self.catalogue.popular(k, excluded)
        first = self._first(k, excluded)
        return self.catalogue.scored_items(np.array([row for _, row in first], np.int64), [score for score, _ in first])

    def ranked(self, k: int, excluded: Bitmap, boosts: Boosts | None) -> tuple[Rows, NDArray[np.float64]]:
        """As `popular`, with boosts, which multiply an item's score by e to their power."""
        if not self.are_known:
            return self.catalogue.most_popular(k, excluded, boosts)
        read = self._now()
        used = read.rows.astype(np.int64)
        used = used[~bitmap.has(excluded, used)]
        others, _ = self.catalogue.most_popular(k, excluded | read.bitmap, boosts)
        rows = np.concatenate([used, others])
        scores = self.scores(rows, boosts)
        best = np.argsort(-scores, kind="stable")[:k]
        return rows[best], scores[best]

    def scores(self, rows: Rows, boosts: Boosts | None) -> NDArray[np.float64]:
        """Of any items, as in `ranked`."""
        counts = self.catalogue.boosted_counts(rows, boosts)
        if not self.are_known:
            return counts
        read = self._now()
        counts *= PRIOR / max(int(self.catalogue.counts.sum()), 1)
        just_now = np.fromiter((read.counts.get(row, 0.0) for row in rows.tolist()), np.float64, len(rows))
        scores: NDArray[np.float64] = counts + just_now * (1.0 if boosts is None else np.exp(gains_of(boosts, rows)))
        return scores

    def _first(self, k: int, excluded: Bitmap) -> list[tuple[float, int]]:
        read, counts = self._now(), self.catalogue.counts
        excluded = excluded | self.catalogue.unavailable
        each = PRIOR / max(int(counts.sum()), 1)
        used = bitmap.first_outside(excluded, read.with_prior, k).tolist()
        others = bitmap.first_outside(excluded | read.bitmap, self.catalogue.popular_rows, k).tolist()
        found = [(read.counts.get(row, 0.0) + each * int(counts[row]), row) for row in [*used, *others]]
        return sorted(found, key=lambda one: -one[0])[:k]

    def _now(self) -> _Read:
        newest = self._trends.newest
        if newest is not self._newest:
            self._read, self._newest = _Read.of(newest, self.catalogue), newest
        return self._read


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read, in rows of a catalogue.

    rows        highest trend first
    counts      how many events of the moment of reading each is worth
    with_prior  the same rows, in the order in which training's popularity counts too
    """

    rows: NDArray[np.int32]
    counts: Mapping[int, float]
    with_prior: NDArray[np.int32]
    bitmap: Bitmap
    total: float

    @classmethod
    def of(cls, trends: Mapping[str, float], catalogue: LiveCatalogue) -> _Read:
        now_us = time.time_ns() // 1_000
        known = {catalogue.row_of.get(item_id): trend for item_id, trend in trends.items()}
        counts = {row: count_at(trend, now_us) for row, trend in known.items() if row is not None}
        rows, each = np.fromiter(counts, np.int32, len(counts)), PRIOR / max(int(catalogue.counts.sum()), 1)
        expected = np.fromiter(counts.values(), np.float64, len(counts)) + each * catalogue.counts[rows]
        in_order = rows[np.argsort(-expected, kind="stable")]
        return cls(rows, counts, in_order, catalogue.bitmap_of(rows.astype(np.int64)), sum(counts.values()))
