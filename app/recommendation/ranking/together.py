"""What goes with a basket: the complements of its items, and their ranking for a list of nothing else."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from app.catalogue.trained_catalogue import NO_ROWS, Rows, TrainedCatalogue
from app.recommendation.ranking.rankings import Ranked, Ranking, Scores
from app.schemas.recommendations import RecommendationRequest
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.diversity import TargetCodes
from model.inference.engine import Engine
from model.inference.scan import Boosts
from model.lisa.item_complements import Complements, basket_gains

MAX_LIFTED = 40  # complements that rise in a user's list, the strongest ones


NO_LIFT = NO_ROWS, np.zeros(0, np.float32)


class Basket(NamedTuple):
    """The known items of a basket and their complements, strongest first: all where nothing else is listed.

    rows         (M,)
    complements  (C,)
    scores       (C,)  float64
    """

    rows: Rows
    complements: Rows
    scores: NDArray[np.float64]

    @classmethod
    def of(cls, request: RecommendationRequest, catalogue: TrainedCatalogue, complements: Complements) -> Self:
        """Return the basket of a request."""
        rows = catalogue.rows(request.basket)
        return cls(rows, *complements.of(rows, None if request.basket_only else MAX_LIFTED))

    @property
    def lifted(self) -> tuple[Rows, NDArray[np.float32]]:
        """The items that rise in a user's list, and what their scores gain."""
        return self.complements, basket_gains(self.scores)

    def gains_of(self, rows: Rows) -> NDArray[np.float64]:
        """Return what the scores of some items gain: (len(rows),)."""
        gains = dict(zip(*(part.tolist() for part in self.lifted), strict=True))
        return np.array([gains.get(row, 0.0) for row in rows.tolist()])


class ComplementRanking(Ranking):
    """Ranks the complements of a basket by their scores, and no other items.

    A boost multiplies a score by e to its power.
    """

    def __init__(self, engine: Engine, basket: Basket, boosts: Boosts | None, candidates: Rows | None) -> None:
        self._engine, self._basket, self._boosts = engine, basket, boosts
        rows, scores = basket.complements, basket.scores
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
        return np.log(scores).astype(np.float32)

    @override
    def scores(self, rows: Rows) -> Scores:
        known = dict(zip(self._basket.complements.tolist(), self._basket.scores.tolist(), strict=True))
        scores = np.array([known.get(row, 0.0) for row in rows.tolist()])
        return scores if self._boosts is None else scores * np.exp(self._boosts.of(rows))

    @override
    def with_gains(self, scores: Scores, gains: NDArray[np.float64]) -> Scores:
        return scores * np.exp(gains)

    @override
    def codes(self, rows: Rows) -> TargetCodes:
        return self._engine.target_codes.take(rows, axis=0)
