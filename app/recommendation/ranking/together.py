"""What goes with a basket: the complements of its items."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from app.catalogue.trained_catalogue import NO_ROWS, Rows, TrainedCatalogue
from app.schemas.recommendations import RecommendationRequest
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
