"""Re-ranking: applies pins, diversity and paging to a ranking.

A list is one sequence across its pages. The item at a position depends only on the items before it and on the pins,
never on the number of requested items. So each page continues where the previous one ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.catalogue.trained_catalogue import NO_ROWS, Rows, TrainedCatalogue
from app.recommendation.filters import Cap, Selection
from app.recommendation.ranking.rankings import Ranked, Ranking, Scores, without_padding
from app.schemas.recommendations import RecommendationRequest
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.diversity import (
    LABEL_BITS,
    NO_LABELS,
    Candidates,
    ItemLabels,
    Reserved,
    TargetCodes,
    select_diverse,
    window,
)
from model.inference.scan import Boosts


class Page(NamedTuple):
    """One page of a list.

    pinned    positions of the pinned items, counted from 0
    has_next  whether there is another page
    """

    rows: Rows
    scores: Scores
    pinned: Sequence[int]
    has_next: bool


NO_CODES: TargetCodes = np.zeros((0, 0), np.uint8)
# The expected number of items that are skipped for each selected one because the limits on their labels are reached.
# A generous estimate, because a longer scan costs less than a second one.
SKIPPED_PER_ITEM, MAX_SKIPPED = 15, 700
NO_CANDIDATES = Candidates(np.zeros(0, np.float32), NO_CODES, NO_LABELS, are_all=True)


@dataclass(frozen=True, slots=True, eq=False)
class RerankingRules:
    """The re-ranking rules of one request.

    count       the number of items to select: k, and for a page one more, which shows whether there is another page
    shown       ids of the items on earlier pages
    diversity   how far the list may depart from the order of the scores, from 0 to 1
    caps        the limits on the number of items of each label
    pins        rows of items with fixed positions, without those shown or filtered out
    pin_places  positions of the pins, counted from 0, in order
    reserved    rows that the rest of the list may not contain: known items already shown, and the pins
    """

    boosts: Boosts | None
    diversity: float
    caps: Sequence[Cap]
    k: int
    count: int
    shown: Sequence[str]
    pins: Rows
    pin_places: Sequence[int]
    reserved: Rows

    @property
    def depth(self) -> int:
        """The number of best items that is likely to be sufficient."""
        return self._depth_for(self.count)

    def _depth_for(self, missing: int) -> int:
        skipped = min(SKIPPED_PER_ITEM * missing, MAX_SKIPPED) if self.caps else 0
        return missing + skipped + window(self.diversity) - 1

    def page(self, ranking: Ranking, best: Ranked, excluded: Bitmap) -> Page:
        """Return the next page of a ranking, with the rules applied.

        best      at least the first `depth` items of the ranking that are not excluded, or all there are; -1 is padding
        excluded  includes the reserved rows
        """
        rows, scores = self._diversified(ranking, best, excluded)
        if not len(self.pins):
            return Page(rows[: self.k], scores[: self.k], (), len(rows) > self.k)
        page_rows, page_scores, pinned, place = rows.tolist(), scores.tolist(), [], -1
        pin_scores = ranking.scores(self.pins).tolist()
        for pin, score, pin_place in zip(self.pins.tolist(), pin_scores, self.pin_places, strict=True):
            # after the previous pin; pins beyond the list's end move up to it
            place = min(max(pin_place - len(self.shown), place + 1), len(page_rows))
            page_rows.insert(place, pin)
            page_scores.insert(place, score)
            pinned.append(place)
        return Page(
            np.array(page_rows[: self.k], np.int64),
            np.array(page_scores[: self.k]),
            [place for place in pinned if place < self.k],
            len(page_rows) > self.k,
        )

    def full(self, place: int, rows: Rows) -> Bitmap:
        """Return the items that the cap at that position excludes from the rest of a list with these rows."""
        listed = Reserved(NO_CODES, self._labels(np.union1d(self.reserved, rows)))
        return self._with_labels(place, select_diverse(0.0, 0, NO_CANDIDATES, listed, self._most).full)

    def _diversified(self, ranking: Ranking, best: Ranked, excluded: Bitmap) -> Ranked:
        """Return the best items under diversity and caps, `count` of them if there are as many."""
        rows, scores = without_padding(best)
        if not self.diversity and not self.caps:
            return rows[: self.count], scores[: self.count]
        codes_of = ranking.codes if self.diversity else lambda _: NO_CODES
        reserved, labels = Reserved(codes_of(self.reserved), self._labels(self.reserved)), self._labels(rows)
        is_all, step, most = len(rows) < self.depth, 0, self._most
        while True:
            candidates = Candidates(ranking.relevance(scores), codes_of(rows), labels, is_all)
            selected, left, full = select_diverse(self.diversity, self.count, candidates, reserved, most)
            if is_all or len(selected) == self.count:
                return rows[selected], scores[selected]
            # at least doubles each time, which bounds the number of scans
            step = max(self._depth_for(self.count - len(selected)) - left, 2 * step)
            more, more_scores = self._next_best(ranking, step, excluded, rows, full)
            is_all = len(more) < step
            labels = labels.followed_by(self._labels(more))
            rows, scores = np.concatenate([rows, more]), np.concatenate([scores, more_scores])

    @property
    def _most(self) -> NDArray[np.int64]:
        return np.array([cap.most for cap in self.caps], np.int64)

    def _labels(self, rows: Rows) -> ItemLabels:
        """Return the labels of the items that the caps refer to, numbered across all caps."""
        if not len(rows):
            return NO_LABELS
        parts = [cap.items.of_rows(rows) for cap in self.caps]
        if not parts:
            return ItemLabels(NO_ROWS, np.zeros(len(rows) + 1, np.int64))
        if len(parts) == 1:  # the common case
            return parts[0]
        labels = np.concatenate(
            [part.labels.astype(np.int64) + (place << LABEL_BITS) for place, part in enumerate(parts)]
        )
        ends = np.array([part.ends for part in parts])
        begins = ends[:, :-1] + np.concatenate([[0], np.cumsum(ends[:-1, -1])])[:, None]
        by_item = ItemLabels.gathered(labels, begins.T.ravel(), np.diff(ends).T.ravel())
        return ItemLabels(by_item.labels, by_item.ends[:: len(parts)])

    def _next_best(
        self, ranking: Ranking, count: int, excluded: Bitmap, ranked: Rows, full: NDArray[np.int64]
    ) -> Ranked:
        """Return the best items after those already ranked, at most `count`, without items of full labels."""
        outside = excluded.copy()
        bitmap.add(outside, ranked)
        if len(full):
            for place in range(len(self.caps)):
                outside |= self._with_labels(place, full)
        return ranking.best(count, outside)

    def _with_labels(self, place: int, labels: NDArray[np.int64]) -> Bitmap:
        """Return the items that have one of the labels that belong to the cap at that position."""
        return self.caps[place].items.rows_with_labels(labels[labels >> LABEL_BITS == place] - (place << LABEL_BITS))


def reranking_rules(
    request: RecommendationRequest, selection: Selection, catalogue: TrainedCatalogue, filtered_out: Bitmap
) -> RerankingRules:
    """Return the re-ranking rules of a request.

    selection     the items and scores that its expressions select
    filtered_out  items that its filters exclude, pinned or not
    """
    caps = [*selection.caps]
    if request.max_per_category is not None:
        caps.append(Cap(catalogue.categories, request.max_per_category))
    shown = request.cursor or ()
    known = catalogue.rows(shown) if shown else NO_ROWS
    pins, pin_places = _pins(request, catalogue, filtered_out) if request.pin else (NO_ROWS, ())
    return RerankingRules(
        boosts=boosts_of(request, selection, catalogue),
        diversity=request.diversity,
        caps=caps,
        k=request.k,
        count=request.k + (request.cursor is not None),
        shown=shown,
        pins=pins,
        pin_places=pin_places,
        reserved=np.concatenate([known, pins]) if len(pins) else known,
    )


def boosts_of(request: RecommendationRequest, selection: Selection, catalogue: TrainedCatalogue) -> Boosts | None:
    """Return what the request's boosts and objective add to the scores; None for nothing."""
    boosts = catalogue.build_boosts(request.boost) if isinstance(request.boost, dict) else None
    gains = [one for one in (selection.gains, selection.worth) if one is not None]
    if not gains:
        return boosts
    total = gains[0] if len(gains) == 1 else gains[0] + gains[1]
    return Boosts.of_items(total) if boosts is None else boosts.plus(total)


def _pins(
    request: RecommendationRequest, catalogue: TrainedCatalogue, filtered_out: Bitmap
) -> tuple[Rows, Sequence[int]]:
    """Return rows and positions of the pins that are allowed and not on earlier pages, by position."""
    skipped = set(request.cursor or ())
    if request.candidates is not None:
        skipped |= {pin.item_id for pin in request.pin}.difference(request.candidates)
    pins = sorted(
        (pin.place - 1, row)
        for pin in request.pin
        if pin.item_id not in skipped
        if (row := catalogue.row_of.get(pin.item_id)) is not None
    )
    rows = np.array([row for _, row in pins], np.int64)
    allowed = ~bitmap.has(filtered_out, rows)
    return rows[allowed], [place for (place, _), is_allowed in zip(pins, allowed.tolist(), strict=True) if is_allowed]
