"""All items that may be shown, best first, of which a list takes as many as it needs."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from app.catalogue import Rows
from app.trending import Trending
from model import bitmap
from model.bitmap import Bitmap
from model.engine import Engine, Queries
from model.scan import Boosts
from model.variety import TargetCodes

Scores = NDArray[np.floating]
Ranked = tuple[Rows, Scores]


def found_of(ranked: Ranked) -> Ranked:
    """Without the places behind the last item, which are -1."""
    rows, scores = ranked
    if not len(rows) or rows[-1] >= 0:
        return ranked
    found = int(np.count_nonzero(rows >= 0))
    return rows[:found], scores[:found]


class Ranking(Protocol):
    """What one request ranks items by, its boosts and candidates included."""

    def best(self, count: int, excluded: Bitmap) -> Ranked:
        """Rows and scores of so many of the best outside, or of all there are; ties by item order."""

    def relevance(self, scores: Scores) -> NDArray[np.float32]:
        """Scores as logarithms of odds, which likeness is weighed against."""

    def scores(self, rows: Rows) -> Scores:
        """Of any different items, in order, candidates or not."""

    def codes(self, rows: Rows) -> TargetCodes:
        """Target codes, whose likeness is that of the items."""


class Personal:
    """By what one query asks."""

    def __init__(self, engine: Engine, query: Queries, boosts: Boosts | None, candidates: Rows | None) -> None:
        self._engine, self._query, self._boosts, self._candidates = engine, query, boosts, candidates

    def best(self, count: int, excluded: Bitmap) -> Ranked:
        if self._candidates is not None:
            allowed = self._candidates[~bitmap.has(excluded, self._candidates)]
            (ranked,) = self._engine.rank_candidates(self._query, [allowed], count, self._boosts)
            return ranked
        (rows,), (scores,) = self._engine.top_k(self._query, count, excluded[None], self._boosts)
        return found_of((rows, scores))

    def relevance(self, scores: Scores) -> NDArray[np.float32]:
        return scores.astype(np.float32, copy=False)

    def scores(self, rows: Rows) -> Scores:
        return self._engine.scores_of(self._query, rows, self._boosts)

    def codes(self, rows: Rows) -> TargetCodes:
        return self._engine.target_codes.take(rows, axis=0)


class Popular:
    """By how often items were used."""

    def __init__(self, engine: Engine, trending: Trending, boosts: Boosts | None, candidates: Rows | None) -> None:
        self._engine, self._trending, self._boosts = engine, trending, boosts
        self._others = None if candidates is None else ~trending.catalogue.bitmap_of(candidates)

    def best(self, count: int, excluded: Bitmap) -> Ranked:
        outside = excluded if self._others is None else excluded | self._others
        return self._trending.ranked(count, outside, self._boosts)

    def relevance(self, scores: Scores) -> NDArray[np.float32]:
        return np.log1p(scores).astype(np.float32)

    def scores(self, rows: Rows) -> Scores:
        return self._trending.scores(rows, self._boosts)

    def codes(self, rows: Rows) -> TargetCodes:
        """None where there is no model: nothing is like anything then."""
        codes = self._engine.target_codes
        return codes.take(rows, axis=0) if len(codes) else np.empty((len(rows), 0), np.uint8)
