"""Explains why an item is recommended: the parts of its score, and the recent items that share its codewords."""

from typing import NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from app.catalogue.trained_catalogue import NO_ROWS, Rows, TrainedCatalogue
from app.schemas.scored_items import Explanation, HistoryCodeword, RecentItem, TargetCodeword
from model.inference.engine import Engine, Queries, ScoreParts
from model.inference.scan import Boosts
from storage.state.generation import Generation

NO_BINS = np.zeros((0, 0), np.float32)
MAX_PER_KIND = 3  # target codewords, history codewords and recent items of an explanation


class ExplainedQuery(NamedTuple):
    """A query whose recommended items are explained.

    vector         the engine's query, of one row
    lifting_items  (K,)       rows of the items whose followers get higher scores; -1 for none
    recent         (M,)       rows of the recent items that may share codewords
    histogram      (R, B, W)  None if the query has none
    boosts         additions to the scores
    """

    vector: Queries
    lifting_items: NDArray[np.integer]
    recent: Rows
    histogram: NDArray[np.float32] | None
    boosts: Boosts | None


class _Inputs(NamedTuple):
    """The input of the compiled code that explains k items.

    targets, histories    (N, B'), (N, B)     codes of all items
    rows                  (k,)                rows of the explained items
    recent, lifting_items (M,), (K,)          as in `ExplainedQuery`
    adding, lifts         (k, B'), (k, K)     contributions of each target codeword, and of following each lifting item
    bins                  (B, W)              the histogram of the slowest decay; empty if there is none
    """

    targets: NDArray[np.integer]
    histories: NDArray[np.integer]
    rows: NDArray[np.int64]
    recent: NDArray[np.int64]
    lifting_items: NDArray[np.int64]
    adding: NDArray[np.float32]
    lifts: NDArray[np.float32]
    bins: NDArray[np.float32]


class Explainer:
    """Explains the recommendations of one generation."""

    def __init__(self, generation: Generation, catalogue: TrainedCatalogue, engine: Engine) -> None:
        self._history_codes = engine.history_codes
        self._slowest = int(np.argmin(generation.decay_rates))
        self._catalogue = catalogue
        self._engine = engine
        no_parts = ScoreParts(np.zeros((0, 0), np.float32), np.zeros(0, np.float32), np.zeros((0, 0), np.float32))
        no_query = ExplainedQuery(Queries(torch.zeros((0, 0)), torch.zeros((0, 0))), NO_ROWS, NO_ROWS, None, None)
        self._contributions(NO_ROWS, no_parts, no_query)  # compile before the first request

    def explain(self, query: ExplainedQuery, rows: Rows) -> list[Explanation]:
        """Return one explanation for each item, in order."""
        parts = self._engine.explain(query.vector, rows)
        indices, amounts, sums, ends = self._contributions(rows, parts, query)
        # one list for the values of all items, because many small lists take longer
        books, words, history_books, history_words, others, shared, shared_history = indices
        adding, shares, adds, lifts = amounts
        others = others[: ends[2][-1]]
        shown = list(dict.fromkeys(others))
        names = dict(zip(shown, self._catalogue.named_items(np.array(shown, np.int64)), strict=True))
        codewords: list[TargetCodeword] = [
            {"codebook": book, "codeword": word, "adds": gain}
            for book, word, gain in zip(books[: ends[0][-1]], words, adding, strict=False)
        ]
        history: list[HistoryCodeword] = [
            {"codebook": book, "codeword": word, "share": share}
            for book, word, share in zip(history_books[: ends[1][-1]], history_words, shares, strict=False)
        ]
        items: list[RecentItem] = [
            {**names[other], "shared": same, "shared_history": of_history, "adds": gain, "follows": lift}
            for other, same, of_history, gain, lift in zip(others, shared, shared_history, adds, lifts, strict=False)
        ]
        explanations: list[Explanation] = [
            {
                "codewords": codewords[ends[0][n] : ends[0][n + 1]],
                "other_codewords": rest,
                "bias": bias,
                "follows": follows,
                "history": history[ends[1][n] : ends[1][n + 1]],
                "recent_items": items[ends[2][n] : ends[2][n + 1]],
            }
            for n, (bias, rest, follows) in enumerate(zip(parts.bias.tolist(), *sums, strict=True))
        ]
        if query.boosts is not None:
            for explanation, gain in zip(explanations, query.boosts.of(rows).tolist(), strict=True):
                explanation["boost"] = gain
        return explanations

    def _contributions(
        self, rows: Rows, parts: ScoreParts, query: ExplainedQuery
    ) -> tuple[list[list[int]], list[list[float]], list[list[float]], list[list[int]]]:
        """Return the numbers that explain k items, as `_fill_contributions` fills them in."""
        bins = NO_BINS if query.histogram is None else query.histogram[self._slowest]
        capacity = len(rows) * MAX_PER_KIND
        indices, amounts = np.empty((7, capacity), np.int64), np.empty((4, capacity))
        sums, ends = np.zeros((2, len(rows))), np.zeros((3, len(rows) + 1), np.int64)
        # convert to the compiled types: other types would compile for seconds at the first request
        integers = [np.array(one, np.int64) for one in (rows, query.recent, query.lifting_items)]
        numbers = [np.array(one, np.float32, order="C") for one in (parts.codewords, parts.lifts, bins)]
        inputs = _Inputs._make((self._engine.target_codes, self._history_codes, *integers, *numbers))
        _fill_contributions(inputs, indices, amounts, sums, ends)
        return indices.tolist(), amounts.tolist(), sums.tolist(), ends.tolist()


@numba.njit(cache=True, nogil=True)
def _fill_contributions(inputs, indices, amounts, sums, ends):  # type: ignore[no-untyped-def]
    """Fill in the strongest contributions to each item's score, at most MAX_PER_KIND of each kind, item by item.

    indices  books and words of the target codewords that add most; books and words of the history codewords with the
             largest shares; rows of the recent items that add most, and the numbers of target and history codewords
             that they share with the item
    amounts  the contributions of those target codewords; the shares of those history codewords; the contributions of
             the shared target codewords, and of following those recent items
    sums     the contributions of the other target codewords, and of following all recent items
    ends     the end of each item's target codewords, history codewords and recent items, with a 0 before the first
    """
    targets, histories, rows, recent, lifting_items, adding, lifts, bins = inputs
    totals = np.zeros(len(bins))
    for book in range(len(bins)):
        for word in range(bins.shape[1]):
            totals[book] += bins[book, word]
    others = _distinct(lifting_items[: lifts.shape[1]], recent)
    shares, order = np.empty(len(bins)), np.empty(max(adding.shape[1], len(bins)), np.int64)
    for item in range(len(rows)):
        row, end = rows[item], ends[0, item]
        _strongest_first(adding[item], order)
        for place in range(adding.shape[1]):
            book = order[place]
            if place < MAX_PER_KIND:
                indices[0, end], indices[1, end], amounts[0, end] = book, targets[row, book], adding[item, book]
                end += 1
            else:
                sums[0, item] += adding[item, book]
        ends[0, item + 1] = end
        for lift in lifts[item]:
            sums[1, item] += lift
        for book in range(len(bins)):
            shares[book] = bins[book, histories[row, book]] / totals[book]
        _strongest_first(shares, order)
        end = ends[1, item]
        for place in range(min(len(bins), MAX_PER_KIND)):
            book = order[place]
            if shares[book] > 0:
                indices[2, end], indices[3, end], amounts[1, end] = book, histories[row, book], shares[book]
                end += 1
        ends[1, item + 1] = end
        begin = ends[2, item]
        part = slice(begin, begin + MAX_PER_KIND)
        ends[2, item + 1] = begin + _fill_recent_items(inputs, item, others, indices[4:, part], amounts[2:, part])


@numba.njit(nogil=True)
def _strongest_first(values, order):  # type: ignore[no-untyped-def]
    """Fill in the order of a few values, the largest first; ties keep their order."""
    for number in range(len(values)):
        place = number
        while place > 0 and values[order[place - 1]] < values[number]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = number


@numba.njit(nogil=True)
def _fill_recent_items(inputs, item, others, top, gains):  # type: ignore[no-untyped-def]
    """Fill in the recent items that add most to one item's score, and return their number.

    top    (3, MAX_PER_KIND)  rows, and the numbers of shared target and history codewords
    gains  (2, MAX_PER_KIND)  contributions of the shared target codewords, and of following
    """
    targets, histories, lifting_items = inputs.targets, inputs.histories, inputs.lifting_items
    row, adding, lifts = inputs.rows[item], inputs.adding[item], inputs.lifts[item]
    filled = 0
    for other in others:
        adds, same, of_history, follows = 0.0, 0, 0, 0.0
        for book in range(targets.shape[1]):
            is_same = targets[row, book] == targets[other, book]
            adds += is_same * adding[book]  # no branch, because it would be mispredicted
            same += is_same
        for book in range(histories.shape[1]):
            of_history += histories[row, book] == histories[other, book]
        for place in range(len(lifts)):
            if lifting_items[place] == other:
                follows += lifts[place]
        if same + of_history == 0 and follows <= 0:
            continue
        place = filled
        while place > 0 and (
            gains[0, place - 1] + gains[1, place - 1] < adds + follows
            or (gains[0, place - 1] + gains[1, place - 1] == adds + follows and top[1, place - 1] < same)
        ):
            place -= 1
        if place == MAX_PER_KIND:
            continue
        filled = min(filled + 1, MAX_PER_KIND)
        for later in range(filled - 1, place, -1):
            top[:, later], gains[:, later] = top[:, later - 1], gains[:, later - 1]
        top[0, place], top[1, place], top[2, place] = other, same, of_history
        gains[0, place], gains[1, place] = adds, follows
    return filled


@numba.njit(nogil=True)
def _distinct(rows, others):  # type: ignore[no-untyped-def]
    """Return the distinct rows of both arrays, in order, without -1."""
    count, distinct = 0, np.empty(len(rows) + len(others), np.int64)
    for number in range(len(distinct)):
        row = rows[number] if number < len(rows) else others[number - len(rows)]
        if row >= 0 and row not in distinct[:count]:
            distinct[count] = row
            count += 1
    return distinct[:count]
