"""Trending items of one catalogue: recent visitor counts blended with the popularity in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.trained_catalogue import Rows
from app.events.trend_counter import TrendCounter
from app.schemas.scored_items import ScoredItem
from model.artifact.string_table import FREE_SLOT
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.scan import Boosts

PRIOR_EVENTS = 1000.0  # the weight, in events, of the popularity in training
MIN_RECENT_EVENTS = 1000.0  # with fewer events, trends are noise


class Trending:
    """Ranks the items of one catalogue by trend."""

    def __init__(self, trends: TrendCounter, catalogue: LiveCatalogue) -> None:
        self._trends = trends
        self.catalogue = catalogue
        self._newest: Mapping[str, float] = {}
        self._prior = PRIOR_EVENTS / max(int(catalogue.counts.sum()), 1)  # of each event in training
        self._snapshot = _TrendSnapshot.of({}, catalogue, self._prior)

    def items(self, k: int, categories: Sequence[str] = ()) -> list[ScoredItem]:
        """Return the k items with the strongest trends among available items of these categories, or of all."""
        excluded = self.catalogue.unavailable.copy()
        if categories:
            excluded |= ~self.catalogue.in_categories(categories)
        snapshot = self._latest()
        rows = bitmap.first_outside(excluded, snapshot.rows, k)
        return self.catalogue.scored_items(rows, [snapshot.counts[row] for row in rows.tolist()])

    @property
    def has_enough_events(self) -> bool:
        """Whether there are enough recent events for meaningful trends."""
        return self._latest().total >= MIN_RECENT_EVENTS

    def top_rows(self, k: int, excluded: Bitmap) -> Rows:
        """Return the rows of the k items with the highest blended counts that are not excluded."""
        return np.array([row for _, row in self._top_blended(k, excluded)], np.int64)

    def popular_items(self, k: int, excluded: Bitmap) -> list[ScoredItem]:
        """Return the same items with scores. Without enough recent events, only the counts in training matter."""
        if not self.has_enough_events:
            return self.catalogue.popular_items(k, excluded)
        top = self._top_blended(k, excluded)
        return self.catalogue.scored_items(np.array([row for _, row in top], np.int64), [score for score, _ in top])

    def top_k(self, k: int, excluded: Bitmap, boosts: Boosts | None) -> tuple[Rows, NDArray[np.float64]]:
        """Return rows and scores as `popular_items` does. A boost multiplies a score by e to the power of the boost."""
        if not self.has_enough_events:
            return self.catalogue.popular_top_k(k, excluded, boosts)
        snapshot = self._latest()
        trending = snapshot.rows.astype(np.int64)
        trending = trending[~bitmap.has(excluded, trending)]
        others, _ = self.catalogue.popular_top_k(k, excluded | snapshot.bitmap, boosts)
        rows = np.concatenate([trending, others])
        scores = self.scores(rows, boosts)
        best = np.argsort(-scores, kind="stable")[:k]
        return rows[best], scores[best]

    def scores(self, rows: Rows, boosts: Boosts | None) -> NDArray[np.float64]:
        """Return the scores of any items, as `top_k` does."""
        counts = self.catalogue.boosted_counts(rows, boosts)
        if not self.has_enough_events:
            return counts
        snapshot = self._latest()
        counts *= self._prior
        recent_counts = np.fromiter((snapshot.counts.get(row, 0.0) for row in rows.tolist()), np.float64, len(rows))
        factors = 1.0 if boosts is None else np.exp(boosts.of(rows))
        scores: NDArray[np.float64] = counts + recent_counts * factors
        return scores

    def _top_blended(self, k: int, excluded: Bitmap) -> list[tuple[float, int]]:
        snapshot, counts = self._latest(), self.catalogue.counts
        excluded = excluded | self.catalogue.unavailable
        trending = bitmap.first_outside(excluded, snapshot.rows_by_blended_count, k).tolist()
        others = bitmap.first_outside(excluded | snapshot.bitmap, self.catalogue.popular_rows, k).tolist()
        scored = [(snapshot.counts.get(row, 0.0) + self._prior * int(counts[row]), row) for row in [*trending, *others]]
        return sorted(scored, key=lambda one: -one[0])[:k]

    def _latest(self) -> _TrendSnapshot:
        newest = self._trends.newest
        if newest is not self._newest:
            self._snapshot, self._newest = _TrendSnapshot.of(newest, self.catalogue, self._prior), newest
        return self._snapshot


@dataclass(frozen=True, slots=True)
class _TrendSnapshot:
    """The trends as last read from the store, in rows of a catalogue.

    rows                   strongest trend first
    counts                 each row's decayed number of visitors at the time of the read
    rows_by_blended_count  the same rows, ordered by the sum of recent events and popularity in training
    """

    rows: NDArray[np.int32]
    counts: Mapping[int, float]
    rows_by_blended_count: NDArray[np.int32]
    bitmap: Bitmap
    total: float

    @classmethod
    def of(cls, trends: Mapping[str, float], catalogue: LiveCatalogue, prior: float) -> _TrendSnapshot:
        places = catalogue.row_of.places_of(list(trends)).tolist()
        counts = {row: count for row, count in zip(places, trends.values(), strict=True) if row != FREE_SLOT}
        rows = np.fromiter(counts, np.int32, len(counts))
        blended_counts = np.fromiter(counts.values(), np.float64, len(counts)) + prior * catalogue.counts[rows]
        by_blended_count = rows[np.argsort(-blended_counts, kind="stable")]
        return cls(rows, counts, by_blended_count, catalogue.bitmap_of(rows.astype(np.int64)), sum(counts.values()))
