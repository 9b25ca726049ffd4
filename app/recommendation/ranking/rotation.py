"""Rotation: items that were shown to a user but not chosen rank lower for some days.

If an item was shown c times, the last time a fraction a of `rotation_days` ago, its odds are multiplied by
``(1 - rotation * (1 - a)) ** c``. No item is removed: if a filter allows no other items, the list contains these.
"""

import time
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from app.catalogue.trained_catalogue import Rows, TrainedCatalogue
from app.recommendation.ranking.rankings import Ranked, Ranking, Scores, scores_in
from app.schemas.recommendations import RecommendationRequest
from model.inference.bitmap import Bitmap
from storage.state.layout import State

DAY_S = 86_400.0
LEAST_LEFT = 1e-6  # of the odds after one impression, so that scores remain finite


def now_s() -> float:
    """Return the time of this machine, in seconds since the epoch."""
    return time.time()


class Rotation(NamedTuple):
    """Gains, at most 0, of the scores of some items.

    rows   (S,)  rows of the items that were shown
    gains  (S,)  float64, changes of their log-odds
    """

    rows: Rows
    gains: NDArray[np.float64]

    @classmethod
    def of(cls, request: RecommendationRequest, state: State, catalogue: TrainedCatalogue) -> Self | None:
        """Return the current rotation of a user's list; None if no item ranks lower."""
        rows = catalogue.rows_of_state_items(state["shown_items"])
        tired = 1.0 - (now_s() - state["shown_times_s"]) / (DAY_S * request.rotation_days)
        lowered = np.flatnonzero((tired > 0) & (rows >= 0))
        if not len(lowered):
            return None
        left = np.maximum(1.0 - request.rotation * np.minimum(tired[lowered], 1.0), LEAST_LEFT)
        return cls(rows[lowered].astype(np.int64), state["shown_counts"][lowered] * np.log(left))

    def first(self, ranking: Ranking, best: Ranked, count: int) -> Ranked:
        """Return the first `count` items of a ranking after rotation; ties keep the order of the ranking.

        best  its first items: `count` plus the number of items in the rotation, or all that there are
        """
        rows, scores = best
        scores = ranking.with_gains(scores, scores_in(self, rows))
        order = np.argsort(-scores, kind="stable")[:count]
        return rows[order], scores[order]


class RotatedRanking(Ranking):
    """A ranking to which a rotation is applied."""

    def __init__(self, ranking: Ranking, rotation: Rotation) -> None:
        self.engine, self._ranking, self._rotation = ranking.engine, ranking, rotation

    @override
    def best(self, count: int, excluded: Bitmap) -> Ranked:
        best = self._ranking.best(count + len(self._rotation.rows), excluded)
        return self._rotation.first(self._ranking, best, count)

    @override
    def relevance(self, scores: Scores) -> NDArray[np.float32]:
        return self._ranking.relevance(scores)

    @override
    def scores(self, rows: Rows) -> Scores:
        return self._ranking.with_gains(self._ranking.scores(rows), scores_in(self._rotation, rows))

    @override
    def with_gains(self, scores: Scores, gains: NDArray[np.float64]) -> Scores:
        return self._ranking.with_gains(scores, gains)
