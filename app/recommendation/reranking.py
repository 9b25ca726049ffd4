"""Re-ranking: what a request wants of its list beyond the best items, which are pins, diversity and pages.

A list is one sequence, whatever its pages. The item at a place depends on the items before it and on the pins, and
never on how many items are asked for. So each page continues where the one before ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.catalogue.trained_catalogue import NO_ROWS, Rows, TrainedCatalogue
from app.recommendation.ranking import Ranked, Ranking, Scores, without_padding
from app.schemas.recommendations import RecommendationRequest
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.diversity import (
    NO_DIVERSITY,
    Candidates,
    Categories,
    Diversity,
    TargetCodes,
    category_counts,
    select_diverse,
)
from model.inference.scan import Boosts


class Page(NamedTuple):
    """One page of a list.

    pinned   places, counted from 0, of the items that were to stand where they are
    goes_on  whether there is another page
    """

    rows: Rows
    scores: Scores
    pinned: Sequence[int]
    goes_on: bool


NO_CODES: TargetCodes = np.zeros((0, 0), np.uint8)
# Items that are skipped for each that is chosen, as their categories are full: that many are expected, as a place of a
# scan costs less than another scan.
SKIPPED, MOST_SKIPPED = 15, 700


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """The rules of one request.

    wanted     how many items are looked for: k, and of a page one more, which tells whether there is another page
    shown      ids of the items that earlier pages have shown
    pins       rows of items that stand at fixed places, without those shown or filtered out
    places     places of the pins, counted from 0, in order
    elsewhere  rows that the rest of the list cannot have: those shown that are known, and the pins
    """

    catalogue: TrainedCatalogue
    boosts: Boosts | None
    diversity: Diversity
    k: int
    wanted: int
    shown: Sequence[str]
    pins: Rows
    places: Sequence[int]
    elsewhere: Rows

    @property
    def depth(self) -> int:
        """How many of the best items are likely to be enough."""
        return self._depth(self.wanted)

    def _depth(self, missing: int) -> int:
        skipped = min(SKIPPED * missing, MOST_SKIPPED) if self.diversity.max_per_category else 0
        return missing + skipped + self.diversity.window - 1

    def page(self, ranking: Ranking, best: Ranked, excluded: Bitmap) -> Page:
        """Return the page that the rules make of a ranking.

        best      at least the first `depth` of the ranking outside what is excluded, or all there are; -1 is no item
        excluded  with what is elsewhere
        """
        rows, scores = self._chosen(ranking, best, excluded)
        if not len(self.pins):
            return Page(rows[: self.k], scores[: self.k], (), len(rows) > self.k)
        every, own, pinned, place = rows.tolist(), scores.tolist(), [], -1
        for pin, score, wanted in zip(self.pins.tolist(), ranking.scores(self.pins).tolist(), self.places, strict=True):
            # behind the pin before, and at the list's end they close up
            place = min(max(wanted - len(self.shown), place + 1), len(every))
            every.insert(place, pin)
            own.insert(place, score)
            pinned.append(place)
        return Page(
            np.array(every[: self.k], np.int64),
            np.array(own[: self.k]),
            [place for place in pinned if place < self.k],
            len(every) > self.k,
        )

    def _chosen(self, ranking: Ranking, best: Ranked, excluded: Bitmap) -> Ranked:
        """Return the best items with regard to diversity: as many as are wanted, if they are there."""
        rows, scores = without_padding(best)
        if self.diversity == NO_DIVERSITY:
            return rows[: self.wanted], scores[: self.wanted]
        codes_of = ranking.codes if self.diversity.strength else _no_codes
        before, taken_before = codes_of(self.elsewhere), self._taken(self.elsewhere)
        is_all, further = len(rows) < self.depth, 0
        while True:
            categories = self._categories(rows)
            taken = np.zeros(
                self.catalogue.labels if self.diversity.max_per_category else 0, np.int64
            )  # the shop may say new ones
            taken[: len(taken_before)] = taken_before
            candidates = Candidates(ranking.relevance(scores), codes_of(rows), categories, is_all)
            places, left = select_diverse(self.diversity, self.wanted, candidates, before, taken)
            if is_all or len(places) == self.wanted:
                return rows[places], scores[places]
            # more each time, or it could take long
            further = max(self._depth(self.wanted - len(places)) - left, 2 * further)
            more, more_scores = self._further(ranking, further, excluded, rows, taken)
            is_all = len(more) < further
            rows, scores = np.concatenate([rows, more]), np.concatenate([scores, more_scores])

    def _categories(self, rows: Rows) -> Categories:
        """Return the categories of the items, where they matter."""
        if self.diversity.max_per_category:
            return self.catalogue.categories_of(rows)
        return Categories(NO_ROWS, np.zeros(len(rows) + 1, np.int64))

    def _taken(self, rows: Rows) -> NDArray[np.int64]:
        """Return how many of the items each category has."""
        if not self.diversity.max_per_category:
            return NO_ROWS
        if not len(rows):
            return np.zeros(self.catalogue.labels, np.int64)
        return category_counts(self.catalogue.categories_of(rows), self.catalogue.labels)

    def _further(self, ranking: Ranking, count: int, excluded: Bitmap, known: Rows, taken: NDArray[np.int64]) -> Ranked:
        """Return the next best items, at most `count`, without those of full categories."""
        outside = excluded.copy()
        bitmap.add(outside, known)
        if self.diversity.max_per_category:
            for number in np.flatnonzero(taken >= self.diversity.max_per_category).tolist():
                outside |= self.catalogue.in_category(self.catalogue.label(number))
        return ranking.best(count, outside)


def _no_codes(rows: Rows) -> TargetCodes:
    """Return no codes, where likeness does not count."""
    return NO_CODES


def rules_of(request: RecommendationRequest, catalogue: TrainedCatalogue, filtered: Bitmap) -> Rules:
    """Return the rules of a request.

    filtered  what its filters leave out, pinned or not
    """
    boosts = catalogue.boosts(request.boost) if request.boost else None
    shown = request.cursor or ()
    known = catalogue.rows(shown) if shown else NO_ROWS
    pins, places = _pins(request, catalogue, filtered) if request.pin else (NO_ROWS, ())
    return Rules(
        catalogue=catalogue,
        boosts=boosts,
        diversity=Diversity(request.diversity, request.max_per_category or 0),
        k=request.k,
        wanted=request.k + (request.cursor is not None),
        shown=shown,
        pins=pins,
        places=places,
        elsewhere=np.concatenate([known, pins]) if len(pins) else known,
    )


def _pins(request: RecommendationRequest, catalogue: TrainedCatalogue, filtered: Bitmap) -> tuple[Rows, Sequence[int]]:
    """Return rows and places of the pins that may be shown and are still to come, by place."""
    gone = set(request.cursor or ())
    if request.candidates is not None:
        gone |= {pin.item_id for pin in request.pin}.difference(request.candidates)
    asked = sorted(
        (pin.place - 1, row)
        for pin in request.pin
        if pin.item_id not in gone
        if (row := catalogue.row_of.get(pin.item_id)) is not None
    )
    rows = np.array([row for _, row in asked], np.int64)
    allowed = ~bitmap.has(filtered, rows)
    return rows[allowed], [place for (place, _), is_allowed in zip(asked, allowed.tolist(), strict=True) if is_allowed]
