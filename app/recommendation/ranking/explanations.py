"""Explains why an item is recommended: the parts of its score, and the recent items that share its codewords.

An explanation is some ten JSON objects. Compiled code writes them, because creating and encoding a hundred objects for
a list takes longer than ranking the catalogue.
"""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

import numba
import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from app.catalogue.trained_catalogue import NO_ROWS, Rows, TrainedCatalogue
from model.inference.engine import Engine, ScoreParts
from model.inference.query_products import Queries
from storage.state.generation import Generation

NO_BINS = np.zeros((0, 0), np.float32)
MAX_PER_KIND = 3  # target codewords, history codewords and recent items of an explanation
MAX_PUNCTUATION = 1_000  # bytes of an explanation in addition to its numbers with fractions and its names


def _bytes(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode(), np.uint8)


COMMA, ZERO = ord(","), ord("0")
END, END_OF_ARRAY = _bytes("},"), _bytes("]")
CODEWORDS, CODEBOOK, CODEWORD, ADDS = map(_bytes, ('{"codewords":[', '{"codebook":', ',"codeword":', ',"adds":'))
OTHER_CODEWORDS, BIAS, FOLLOWS = map(_bytes, (',"other_codewords":', ',"bias":', ',"follows":'))
HISTORY, SHARE = _bytes(',"history":['), _bytes(',"share":')
RECENT_ITEMS, SHARED, SHARED_HISTORY = map(_bytes, (',"recent_items":[', ',"shared":', ',"shared_history":'))


class ExplainedQuery(NamedTuple):
    """A query whose recommended items are explained.

    vector         the engine's query, of one row
    lifting_items  (K,)       rows of the items whose followers get higher scores; -1 for none
    recent         (M,)       rows of the recent items that may share codewords
    histogram      (R, B, W)  None if the query has none
    """

    vector: Queries
    lifting_items: NDArray[np.integer]
    recent: Rows
    histogram: NDArray[np.float32] | None


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
        nothing, no_bias = np.zeros((0, 0), np.float32), np.zeros(0, np.float32)
        no_parts = ScoreParts(nothing, nothing, no_bias, nothing)
        no_query = ExplainedQuery(Queries(torch.zeros((0, 0)), torch.zeros((0, 0))), NO_ROWS, NO_ROWS, None)
        self._encoded(NO_ROWS, no_parts, no_query)  # compile before the first request

    def explain(self, query: ExplainedQuery, rows: Rows, gains: Mapping[bytes, NDArray[np.floating]]) -> list[bytes]:
        """Return the JSON of the explanation of each item, in order.

        gains  what else is added to the items' scores, by the field of the explanation: (len(rows),) each
        """
        if not len(rows):
            return []
        explanations = self._encoded(rows, self._engine.explain(query.vector, rows), query)
        for name, of_items in gains.items():
            numbers = _numbers(of_items.astype(np.float64))[1:-1].split(b",")
            explanations = [b'%b,"%b":%b' % (one, name, gain) for one, gain in zip(explanations, numbers, strict=True)]
        return [one + b"}" for one in explanations]

    def _encoded(self, rows: Rows, parts: ScoreParts, query: ExplainedQuery) -> list[bytes]:
        """Return the explanations without what else is added to the scores, and without the closing brace."""
        bins = NO_BINS if query.histogram is None else query.histogram[self._slowest]
        count, capacity = len(rows), len(rows) * MAX_PER_KIND
        indices, amounts = np.empty((7, capacity), np.int64), np.zeros((4, capacity))
        sums, ends = np.zeros((2, count)), np.zeros((3, count + 1), np.int64)
        # convert to the compiled types: other types would compile for seconds at the first request
        integers = [np.array(one, np.int64) for one in (rows, query.recent, query.lifting_items)]
        numbers = [np.array(one, np.float32, order="C") for one in (parts.codewords, parts.lifts, bins)]
        inputs = _Inputs._make((self._engine.target_codes, self._history_codes, *integers, *numbers))
        _fill_contributions(inputs, indices, amounts, sums, ends)
        sums[0] += parts.history.sum(axis=1)
        names = self._catalogue.encoded_names(indices[4, : ends[2, -1]])
        name_ends = np.array([*accumulate(map(len, names), initial=0)], np.int64)
        amounts_text = _numbers(np.concatenate([amounts.ravel(), sums.ravel(), parts.bias]))
        text = np.empty(count * MAX_PUNCTUATION + len(amounts_text) + int(name_ends[-1]), np.uint8)
        text_ends = np.zeros(count + 1, np.int64)
        encoded = np.frombuffer(amounts_text, np.uint8), np.frombuffer(b"".join(names), np.uint8)
        _write_explanations(indices, ends, *encoded, name_ends, text, text_ends)
        whole = text[: text_ends[-1]].tobytes()
        return [whole[begin:end] for begin, end in pairwise(text_ends.tolist())]


def _numbers(amounts: NDArray[np.float64]) -> bytes:
    """Return a JSON array of the numbers, each in its shortest form."""
    return orjson.dumps(amounts, option=orjson.OPT_SERIALIZE_NUMPY)


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


@numba.njit(cache=True, nogil=True)
def _write_explanations(indices, ends, amounts, names, name_ends, text, text_ends):  # type: ignore[no-untyped-def]
    """Write the explanations of k items as JSON, without the closing brace, and the end of each.

    indices, ends     as `_fill_contributions` fills them in
    amounts           its `amounts` and `sums`, and the bias of each item, as one JSON array
    names, name_ends  JSON of the recent items' names without the closing brace, and the end of each, after a 0
    """
    capacity, items = indices.shape[1], len(text_ends) - 1
    starts, count = np.empty(4 * capacity + 3 * items + 2, np.int64), 0
    for at in range(len(amounts)):
        if at == 0 or amounts[at] == COMMA:
            starts[count] = at + 1
            count += 1
    starts[count] = len(amounts)
    place, sums = 0, 4 * capacity
    for item in range(items):
        place = _put(text, place, CODEWORDS)
        for n in range(ends[0, item], ends[0, item + 1]):
            place = _put_codeword(text, place, indices[0, n], indices[1, n])
            place = _put_amount(text, place, ADDS, amounts, starts, n)
            place = _put(text, place, END)
        place = _end_array(text, place)
        place = _put_amount(text, place, OTHER_CODEWORDS, amounts, starts, sums + item)
        place = _put_amount(text, place, BIAS, amounts, starts, sums + 2 * items + item)
        place = _put_amount(text, place, FOLLOWS, amounts, starts, sums + items + item)
        place = _put(text, place, HISTORY)
        for n in range(ends[1, item], ends[1, item + 1]):
            place = _put_codeword(text, place, indices[2, n], indices[3, n])
            place = _put_amount(text, place, SHARE, amounts, starts, capacity + n)
            place = _put(text, place, END)
        place = _end_array(text, place)
        place = _put(text, place, RECENT_ITEMS)
        for n in range(ends[2, item], ends[2, item + 1]):
            place = _put(text, place, names[name_ends[n] : name_ends[n + 1]])
            place = _put_integer(text, _put(text, place, SHARED), indices[5, n])
            place = _put_integer(text, _put(text, place, SHARED_HISTORY), indices[6, n])
            place = _put_amount(text, place, ADDS, amounts, starts, 2 * capacity + n)
            place = _put_amount(text, place, FOLLOWS, amounts, starts, 3 * capacity + n)
            place = _put(text, place, END)
        place = _end_array(text, place)
        text_ends[item + 1] = place


@numba.njit(nogil=True)
def _put(text, place, part):  # type: ignore[no-untyped-def]
    for byte in part:
        text[place] = byte
        place += 1
    return place


@numba.njit(nogil=True)
def _put_amount(text, place, name, amounts, starts, number):  # type: ignore[no-untyped-def]
    return _put(text, _put(text, place, name), amounts[starts[number] : starts[number + 1] - 1])


@numba.njit(nogil=True)
def _put_codeword(text, place, book, word):  # type: ignore[no-untyped-def]
    place = _put_integer(text, _put(text, place, CODEBOOK), book)
    return _put_integer(text, _put(text, place, CODEWORD), word)


@numba.njit(nogil=True)
def _put_integer(text, place, number):  # type: ignore[no-untyped-def]
    """Write a number of at least 0."""
    end, rest = place + 1, number
    while rest >= 10:
        end, rest = end + 1, rest // 10
    for at in range(end - 1, place - 1, -1):
        text[at], number = ZERO + number % 10, number // 10
    return end


@numba.njit(nogil=True)
def _end_array(text, place):  # type: ignore[no-untyped-def]
    """End an array, without the comma after its last element."""
    return _put(text, place - 1 if text[place - 1] == COMMA else place, END_OF_ARRAY)
