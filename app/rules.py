"""What a request wants of its list beyond the best items: pins, variety, pages.

A list is one sequence, whatever its pages: what stands at a place depends on what stands before it and on the pins, and
never on how many items are asked for. So a page begins where the one before ended, as if it had gone on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.catalogue import Catalogue, Rows
from app.ranking import Ranked, Ranking, Scores
from app.schemas import RecommendationRequest
from model import bitmap
from model.bitmap import Bitmap
from model.scan import Boosts
from model.variety import Categories, Codes, Variety, choose, count


class Listed(NamedTuple):
    """One page.

    pinned   (n,)  bool, which of the items were to stand where they are
    goes_on  whether there is another page
    """

    rows: Rows
    scores: Scores
    pinned: NDArray[np.bool_]
    goes_on: bool


NO_ROWS: Rows = np.zeros(0, np.int64)
NO_CODES: Codes = np.zeros((0, 0), np.uint8)
SKIPPED = 1  # items for each that is chosen, as their categories are full: at first that many are expected


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """Of one request.

    wanted   items that are looked for: k, and of a page one more, which tells whether there is another
    shown    ids of what the pages before have shown
    known    their rows, of those that are still known
    pins     rows of items that stand at fixed places, without those shown or filtered out
    places   of the pins, counted from 0, in order
    """

    catalogue: Catalogue
    boosts: Boosts | None
    variety: Variety
    k: int
    wanted: int
    shown: Sequence[str]
    known: Rows
    pins: Rows
    places: NDArray[np.int64]

    @property
    def elsewhere(self) -> Rows:
        """What the rest of the list cannot have, as it stands before it or at a place of its own."""
        return np.concatenate([self.known, self.pins]) if len(self.known) or len(self.pins) else NO_ROWS

    @property
    def depth(self) -> int:
        """How many of the best are likely to be enough."""
        skipped = SKIPPED * self.wanted if self.variety.most else 0
        return self.wanted + skipped + self.variety.window - 1

    def applied(self, ranking: Ranking, best: Ranked, excluded: Bitmap) -> Listed:
        """The page.

        best      at least the first `depth` of the ranking outside what is excluded, or all there are; -1 is no item
        excluded  with what is elsewhere
        """
        rows, scores = self._chosen(ranking, best, excluded)
        if not len(self.pins):
            page = slice(self.k)
            return Listed(rows[page], scores[page], np.zeros(len(rows[page]), np.bool_), len(rows) > self.k)
        order, is_pin = self._order(len(rows))
        page = slice(self.k)
        return Listed(
            np.concatenate([rows, self.pins])[order[page]],
            np.concatenate([scores, ranking.scores(self.pins)])[order[page]],
            is_pin[page],
            len(order) > self.k,
        )

    def _order(self, chosen: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """What stands at each place of the page, chosen ones by number, then pins; at the list's end pins close up."""
        order: list[int] = []
        pin, best = 0, 0
        while len(order) < self.wanted and (pin < len(self.pins) or best < chosen):
            if pin < len(self.pins) and (best == chosen or self.places[pin] <= len(self.shown) + len(order)):
                order.append(chosen + pin)
                pin += 1
            else:
                order.append(best)
                best += 1
        places = np.array(order, np.int64)
        return places, places >= chosen

    def _chosen(self, ranking: Ranking, best: Ranked, excluded: Bitmap) -> Ranked:
        """The best items with regard to variety: as many as are wanted, if they are there."""
        rows, scores = best
        rows, scores = rows[rows >= 0], scores[rows >= 0]
        if self.variety == Variety(0.0, 0):
            return rows[: self.wanted], scores[: self.wanted]
        elsewhere = self.elsewhere
        codes_of = ranking.codes if self.variety.diversity else _no_codes
        before, taken_before, is_all = codes_of(elsewhere), self._taken(elsewhere), len(rows) < self.depth
        while True:
            categories, taken = self._categories(rows), taken_before.copy()
            relevance, codes = ranking.relevance(scores), codes_of(rows)
            places, left = choose(self.variety, self.wanted, relevance, codes, categories, before, taken, is_all)
            if is_all or len(places) == self.wanted:
                return rows[places], scores[places]
            missing = (1 + SKIPPED) * (self.wanted - len(places)) + self.variety.window - 1 - left
            further = max(missing, len(rows) // 2)  # more each time, or it could take long
            more, more_scores = self._further(ranking, further, excluded, rows, taken)
            is_all = len(more) < further
            rows, scores = np.concatenate([rows, more]), np.concatenate([scores, more_scores])

    def _categories(self, rows: Rows) -> Categories:
        """Of the items, where they matter."""
        if self.variety.most:
            return self.catalogue.categories_of(rows)
        return Categories(NO_ROWS, np.zeros(len(rows) + 1, np.int64))

    def _taken(self, rows: Rows) -> NDArray[np.int64]:
        """How many of the items each category has."""
        if not self.variety.most:
            return NO_ROWS
        return count(self.catalogue.categories_of(rows), self.catalogue.labels)

    def _further(self, ranking: Ranking, count: int, excluded: Bitmap, known: Rows, taken: NDArray[np.int64]) -> Ranked:
        """So many of the next best items, without those of full categories."""
        outside = excluded.copy()
        bitmap.add(outside, known)
        if self.variety.most:
            full = np.flatnonzero(taken >= self.variety.most).tolist()
            outside |= self.catalogue.in_categories([self.catalogue.label(number) for number in full])
        return ranking.best(count, outside)


def _no_codes(rows: Rows) -> Codes:
    """Where likeness does not count."""
    return NO_CODES


def rules_of(request: RecommendationRequest, catalogue: Catalogue, filtered: Bitmap) -> Rules | None:
    """The rules of a request; None where it wants nothing beyond the best.

    filtered  what its filters leave out, pinned or not
    """
    boosts = catalogue.boosts(request.boost) if request.boost else None
    if boosts is None and not (request.pin or request.diversity or request.max_per_category) and request.cursor is None:
        return None
    shown = request.cursor or ()
    pins, places = _pins(request, catalogue, filtered) if request.pin else (NO_ROWS, NO_ROWS)
    return Rules(
        catalogue=catalogue,
        boosts=boosts,
        variety=Variety(request.diversity, request.max_per_category or 0),
        k=request.k,
        wanted=request.k + (request.cursor is not None),
        shown=shown,
        known=catalogue.rows(shown) if shown else NO_ROWS,
        pins=pins,
        places=places,
    )


def _pins(request: RecommendationRequest, catalogue: Catalogue, filtered: Bitmap) -> tuple[Rows, NDArray[np.int64]]:
    """Rows and places of the pins that may be shown and are still to come, by place."""
    gone = set(request.cursor or ())
    if request.candidates is not None:
        gone |= {pin.item_id for pin in request.pin}.difference(request.candidates)
    asked = sorted(
        (pin.place - 1, row)
        for pin in request.pin
        if pin.item_id not in gone
        if (row := catalogue.row_of.get(pin.item_id)) is not None
    )
    places, rows = (np.array([one[part] for one in asked], np.int64) for part in range(2))
    allowed = ~bitmap.has(filtered, rows)
    return rows[allowed], places[allowed]
