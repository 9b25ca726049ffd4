"""Rankings of the catalogue for one request: by a model, by popularity, by scores of a few items, or blended."""

from collections import defaultdict
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from app.catalogue.trained_catalogue import Rows
from app.recommendation.ranking.trending import Trending
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.diversity import TargetCodes
from model.inference.engine import Engine
from model.inference.query_products import Queries
from model.inference.scan import Boosts

Scores = NDArray[np.floating]
Ranked = tuple[Rows, Scores]
LEAST_SCORE = 1e-300  # the smallest score, whose logarithm is finite

# Of blended rankings. `benchmarks/quality/cold/users.py` shows that a trained model needs little help.
MAX_BLENDED_EVENTS = 3  # users with more events get only the personal ranking
SMOOTHING = 0.1
EXTRA_DEPTH = 20  # items beyond the requested k that each ranking contributes


def without_padding(ranked: Ranked) -> Ranked:
    """Return the ranking without its padding, the rows of -1 after the last item."""
    rows, scores = ranked
    if not len(rows) or rows[-1] >= 0:
        return ranked
    count = int(np.count_nonzero(rows >= 0))
    return rows[:count], scores[:count]


def scores_in(listed: Ranked, rows: Rows) -> NDArray[np.float64]:
    """Return the score of each row, 0 for a row that is not listed: (len(rows),)."""
    scores = dict(zip(*(part.tolist() for part in listed), strict=True))
    return np.array([scores.get(row, 0.0) for row in rows.tolist()])


class Ranking(Protocol):
    """Ranks items for one request, with its boosts and candidates applied."""

    engine: Engine

    def best(self, count: int, excluded: Bitmap) -> Ranked:
        """Return rows and scores of the best items that are not excluded, at most `count`; ties by item order."""

    def relevance(self, scores: Scores) -> NDArray[np.float32]:
        """Return the scores on a logarithmic scale, which diversity weighs against the similarity of items."""

    def scores(self, rows: Rows) -> Scores:
        """Return the scores of distinct items, in order, whether candidates or not."""

    def with_gains(self, scores: Scores, gains: NDArray[np.float64]) -> Scores:
        """Return the scores after the items' log-odds have changed by these gains. By default, scores are odds."""
        return scores * np.exp(gains)

    def codes(self, rows: Rows) -> TargetCodes:
        """Return the target codes of the items, which diversity compares. Without a model, no items are similar."""
        codes = self.engine.target_codes
        return codes.take(rows, axis=0) if len(codes) else np.empty((len(rows), 0), np.uint8)


class PersonalRanking(Ranking):
    """Ranks items by one query of the engine."""

    def __init__(self, engine: Engine, query: Queries, boosts: Boosts | None, candidates: Rows | None) -> None:
        self.engine, self._query, self._boosts, self._candidates = engine, query, boosts, candidates

    @override
    def best(self, count: int, excluded: Bitmap) -> Ranked:
        if self._candidates is not None:
            allowed = self._candidates[~bitmap.has(excluded, self._candidates)]
            (ranked,) = self.engine.rank_candidates(self._query, [allowed], count, self._boosts)
            return ranked
        (rows,), (scores,) = self.engine.top_k(self._query, count, excluded[None], self._boosts)
        return without_padding((rows, scores))

    @override
    def relevance(self, scores: Scores) -> NDArray[np.float32]:
        return scores.astype(np.float32, copy=False)

    @override
    def scores(self, rows: Rows) -> Scores:
        return self.engine.scores_of(self._query, rows, self._boosts)

    @override
    def with_gains(self, scores: Scores, gains: NDArray[np.float64]) -> Scores:
        return (scores + gains).astype(np.float32)


class PopularRanking(Ranking):
    """Ranks items by popularity and trends."""

    def __init__(self, engine: Engine, trending: Trending, boosts: Boosts | None, candidates: Rows | None) -> None:
        self.engine, self._trending, self._boosts = engine, trending, boosts
        self._not_candidates = None if candidates is None else ~trending.catalogue.bitmap_of(candidates)

    @override
    def best(self, count: int, excluded: Bitmap) -> Ranked:
        if self._not_candidates is not None:
            excluded = excluded | self._not_candidates
        return self._trending.top_k(count, excluded, self._boosts)

    @override
    def relevance(self, scores: Scores) -> NDArray[np.float32]:
        return np.log1p(scores).astype(np.float32)

    @override
    def scores(self, rows: Rows) -> Scores:
        return self._trending.scores(rows, self._boosts)


class ListedRanking(Ranking):
    """Ranks only the listed items, by given scores above 0.

    A boost multiplies a score by e to the power of the boost.

    listed  the items and their scores
    """

    def __init__(self, engine: Engine, listed: Ranked, boosts: Boosts | None, candidates: Rows | None) -> None:
        self.engine, self._listed, self._boosts = engine, listed, boosts
        rows, scores = listed
        if candidates is not None:
            is_candidate = np.isin(rows, candidates)
            rows, scores = rows[is_candidate], scores[is_candidate]
        if boosts is not None:
            scores = scores * np.exp(boosts.of(rows))
        best_first = np.lexsort((rows, -scores))
        self._rows, self._scores = rows[best_first], scores[best_first]

    @override
    def best(self, count: int, excluded: Bitmap) -> Ranked:
        allowed = np.flatnonzero(~bitmap.has(excluded, self._rows))[:count]
        return self._rows[allowed], self._scores[allowed]

    @override
    def relevance(self, scores: Scores) -> NDArray[np.float32]:
        positive: Scores = np.maximum(scores, LEAST_SCORE)
        return np.log(positive).astype(np.float32)

    @override
    def scores(self, rows: Rows) -> Scores:
        scores = scores_in(self._listed, rows)
        return scores if self._boosts is None else scores * np.exp(self._boosts.of(rows))


def blend(personal: Rows, trending: Rows, events: int, k: int) -> tuple[Rows, NDArray[np.float64]]:
    """Return the k best items of two rankings and their scores, best first; ties in the personal order.

    After n events, an item scores ``w / (1 + personal rank) + (1 - w) / (1 + trending rank)`` with
    ``w = n / (n + SMOOTHING)``.
    """
    weight = events / (events + SMOOTHING)
    scores = defaultdict[int, float](float)
    for share, ranking in ((weight, personal), (1 - weight, trending)):
        for rank, row in enumerate(ranking.tolist(), 1):
            scores[row] += share / (1 + rank)
    best = sorted(scores.items(), key=lambda item: -item[1])[:k]
    return np.array([row for row, _ in best], np.int64), np.array([score for _, score in best])
