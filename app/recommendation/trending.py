"""What is trending among the items of one catalogue, blended with how popular they were in training."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.trained_catalogue import Rows, gains_of
from app.events.trend_counter import TrendCounter
from app.schemas.scored_items import ScoredItem
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.scan import Boosts
from storage.trends import count_at

PRIOR = 1000.0  # events that training's popularity counts as where both are ranked together
ENOUGH = 1000.0  # events of this moment; with fewer, what is trending is chance


class Trending:
    """Ranks the items of one catalogue by their trends."""

    def __init__(self, trends: TrendCounter, catalogue: LiveCatalogue) -> None:
        self._trends = trends
        self.catalogue = catalogue
        self._newest: Mapping[str, float] = {}
        self._read = _Read.of({}, catalogue)

    def items(self, k: int, categories: Collection[str] = ()) -> list[ScoredItem]:
        """Return the k highest trends among the available items of the categories, or of all categories."""
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
        """Return the k items not excluded that are used most now, then popular ones."""
        return np.array([row for _, row in self._first(k, excluded)], np.int64)

    def popular(self, k: int, excluded: Bitmap) -> list[ScoredItem]:
        """Return the same items with their scores; by the counts of training alone while few events are known."""
        if not self.are_known:
            return self.catalogue.popular(k, excluded)
        first = self._first(k, excluded)
        return self.catalogue.scored_items(np.array([row for _, row in first], np.int64), [score for score, _ in first])

    def ranked(self, k: int, excluded: Bitmap, boosts: Boosts | None) -> tuple[Rows, NDArray[np.float64]]:
        """Return rows and scores as `popular` does, with boosts, which multiply an item's score by e to their power."""
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
        """Return the scores of any items, as in `ranked`."""
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
