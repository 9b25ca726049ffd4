"""Complements of the items in a basket: items that are bought together with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from heapq import nlargest
from operator import itemgetter
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from app.catalogue.trained_catalogue import NO_ROWS, Rows, TrainedCatalogue
from app.events.order_counter import ALL_ORDERS, SEPARATOR, OrderCounter
from app.schemas.recommendations import RecommendationRequest
from model.artifact.string_table import FREE_SLOT
from model.lisa.item_complements import COUNT, Complements, basket_gains, complement_score

MAX_LIFTED = 40  # the strongest complements, which rank higher in a user's list


NO_LIFT = NO_ROWS, np.zeros(0, np.float32)
Scored = tuple[NDArray[np.int64], NDArray[np.float64]]


class LiveComplements:
    """The complements in one catalogue that follow from orders placed since its model was trained.

    At least one item of each pair is newer than the model. The model's own table contains the other pairs.
    """

    def __init__(self, orders: OrderCounter, catalogue: TrainedCatalogue, learned: int) -> None:
        self._orders = orders
        self._catalogue = catalogue
        self._learned = learned  # the number of rows, from the first, that the model was trained on
        self._newest: Mapping[str, float] = {}
        self._scores: Mapping[int, Mapping[int, float]] = {}

    def of(self, basket: Rows) -> Mapping[int, float]:
        """Return the scores of the complements of all items of a basket by row, without the basket's items."""
        newest = self._orders.newest
        if newest is not self._newest:
            self._scores, self._newest = _live_scores(newest, self._catalogue, self._learned), newest
        found: defaultdict[int, float] = defaultdict(float)
        in_basket = basket.tolist()
        for row in in_basket:
            for other, score in self._scores.get(row, {}).items():
                found[other] += score
        return {row: score for row, score in found.items() if row not in in_basket}


class Basket(NamedTuple):
    """The known items of a basket and their complements, strongest first; all complements if only they are listed.

    rows         (M,)
    complements  (C,)
    scores       (C,)  float64
    """

    rows: Rows
    complements: Rows
    scores: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        request: RecommendationRequest,
        catalogue: TrainedCatalogue,
        complements: Complements,
        live: LiveComplements,
    ) -> Self:
        """Return the basket of a request."""
        rows, most = catalogue.rows(request.basket), None if request.basket_only else MAX_LIFTED
        newer = live.of(rows)
        if not newer:
            return cls(rows, *complements.of(rows, most))
        return cls(rows, *_with_newer(complements.of(rows), newer, most))

    @property
    def lifted(self) -> tuple[Rows, NDArray[np.float32]]:
        """The items that rank higher in a user's list, and the gains of their scores."""
        return self.complements, basket_gains(self.scores)

    def gains_of(self, rows: Rows) -> NDArray[np.float64]:
        """Return the gains of the scores of some items: (len(rows),)."""
        gains = dict(zip(*(part.tolist() for part in self.lifted), strict=True))
        return np.array([gains.get(row, 0.0) for row in rows.tolist()])


def _live_scores(
    counts: Mapping[str, float], catalogue: TrainedCatalogue, learned: int
) -> Mapping[int, Mapping[int, float]]:
    """Return the strongest complements of each row from counts of orders, computed as in training."""
    found: defaultdict[int, dict[int, float]] = defaultdict(dict)
    orders = max(counts.get(ALL_ORDERS, 0.0), 1.0)
    pairs = {name: name.split(SEPARATOR, 1) for name in counts if SEPARATOR in name}
    columns = ([pair[place] for pair in pairs.values()] for place in (0, 1))
    places = (catalogue.row_of.places_of(column).tolist() for column in columns)
    for (name, (one, other)), row, other_row in zip(pairs.items(), *places, strict=True):
        if min(row, other_row) == FREE_SLOT or max(row, other_row) < learned:
            continue
        both = counts[name]
        with_one, with_other = max(counts.get(one, 0.0), both), max(counts.get(other, 0.0), both)
        found[row][other_row] = complement_score(both, with_one, min(with_other / orders, 1.0))
        found[other_row][row] = complement_score(both, with_other, min(with_one / orders, 1.0))
    return {row: dict(nlargest(COUNT, scores.items(), itemgetter(1))) for row, scores in found.items()}


def _with_newer(trained: Scored, newer: Mapping[int, float], most: int | None) -> Scored:
    """Return rows and scores of both, strongest first; ties by item order."""
    both: defaultdict[int, float] = defaultdict(float)
    both.update(zip(trained[0].tolist(), trained[1].tolist(), strict=True))
    for row, score in newer.items():
        both[row] += score
    rows, scores = np.array([*both], np.int64), np.array([*both.values()], np.float64)
    strongest_first = np.lexsort((rows, -scores))[:most]
    return rows[strongest_first], scores[strongest_first]
