"""Complements of the items in a basket: items that are bought together with them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
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
        self._pairs = _CountedPairs({}, catalogue, learned)

    def of(self, basket: Rows) -> Mapping[int, float]:
        """Return the scores of the complements of all items of a basket by row, without the basket's items."""
        pairs, newest = self._pairs, self._orders.newest
        if newest is not pairs.counts:
            pairs = self._pairs = _CountedPairs(newest, self._catalogue, self._learned)
        found: defaultdict[int, float] = defaultdict(float)
        in_basket = basket.tolist()
        for row in in_basket:
            for other, score in pairs.scores_of(row).items():
                found[other] += score
        return {row: score for row, score in found.items() if row not in in_basket}


class _CountedPairs:
    """The pairs in one reading of the counts, of which an item's are scored when they are first needed."""

    def __init__(self, counts: Mapping[str, float], catalogue: TrainedCatalogue, learned: int) -> None:
        self.counts = counts
        self._catalogue = catalogue
        self._learned = learned
        self._orders = max(counts.get(ALL_ORDERS, 0.0), 1.0)
        self._partners: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
        self._scores: dict[int, Mapping[int, float]] = {}
        for name, both in counts.items():
            if SEPARATOR in name:
                one, other = name.split(SEPARATOR, 1)
                self._partners[one].append((other, both))
                self._partners[other].append((one, both))

    def scores_of(self, row: int) -> Mapping[int, float]:
        """Return the strongest complements of a row and their scores, computed as in training."""
        partners = self._partners.get(self._catalogue.item_ids[row]) if self._partners else None
        if not partners:
            return {}
        if row not in self._scores:
            self._scores[row] = self._strongest(row, partners)
        return self._scores[row]

    def _strongest(self, row: int, partners: Sequence[tuple[str, float]]) -> Mapping[int, float]:
        with_item = self.counts.get(self._catalogue.item_ids[row], 0.0)
        rows = self._catalogue.row_of.places_of([other for other, _ in partners]).tolist()
        scores: dict[int, float] = {}
        for (other, both), other_row in zip(partners, rows, strict=True):
            if other_row == FREE_SLOT or max(row, other_row) < self._learned:
                continue
            with_other = max(self.counts.get(other, 0.0), both)
            scores[other_row] = complement_score(both, max(with_item, both), min(with_other / self._orders, 1.0))
        return dict(nlargest(COUNT, scores.items(), itemgetter(1)))


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


def _with_newer(trained: Scored, newer: Mapping[int, float], most: int | None) -> Scored:
    """Return rows and scores of both, strongest first; ties by item order."""
    both: defaultdict[int, float] = defaultdict(float)
    both.update(zip(trained[0].tolist(), trained[1].tolist(), strict=True))
    for row, score in newer.items():
        both[row] += score
    rows, scores = np.array([*both], np.int64), np.array([*both.values()], np.float64)
    strongest_first = np.lexsort((rows, -scores))[:most]
    return rows[strongest_first], scores[strongest_first]
