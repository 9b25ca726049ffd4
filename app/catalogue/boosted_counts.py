"""The most popular items under boosts, each of which multiplies an item's count by e to the power of the boost."""

from math import exp, log

import numba
import numpy as np
from numpy.typing import NDArray

from model.inference.bitmap import Bitmap
from model.inference.scan import Boosts

ROUNDING_MARGIN = 1e-9  # exceeds the rounding error of a product, and of a difference of logarithms
LOGS = np.log(np.maximum(np.arange(1024), 0.5))  # of frequent counts


def best_rows(
    counts: NDArray[np.integer], popular_rows: NDArray[np.int32], k: int, excluded: Bitmap, boosts: Boosts
) -> NDArray[np.int64]:
    """Return the k rows with the highest boosted counts that are not excluded, in any order; of equal ones the first.

    counts        (N,)  of each row
    popular_rows  (N,)  all rows, by count, highest first, then in order
    """
    scores, rows = np.empty(min(k, len(counts))), np.empty(min(k, len(counts)), np.int64)
    if not len(rows):
        return rows
    gains = np.zeros(1)  # of each combination of sets; the bits of its number are the sets, of which there are few
    for gain in boosts.gains.tolist():
        gains = np.concatenate([gains, gains + gain])
    highest = np.exp(gains.max() + max(boosts.highest, 0.0)) * (1 + ROUNDING_MARGIN)
    raised = np.bitwise_or.reduce(boosts.sets[boosts.gains > 0], axis=0)
    if len(boosts.by_item):
        raised = ~np.zeros_like(raised)
    popular, gaining = (counts, popular_rows), (boosts.sets, gains, boosts.by_item)
    found = _find_best(popular, excluded, raised, gaining, highest, scores, rows)
    return rows[:found]


@numba.njit(cache=True, nogil=True)
def _find_best(popular, excluded, raised, gaining, highest, scores, rows):  # type: ignore[no-untyped-def]
    """Fill a heap of scores and rows, the worst first, and return their number.

    popular  the counts, and the rows by count
    raised   the items whose factors may be above 1
    gaining  the sets, the gain of each combination of sets, and the gains by item
    highest  the largest factor of any item
    """
    counts, popular_rows = popular
    found, limit, first = 0, -1, 0
    for row in popular_rows:
        count = counts[row]
        if found == len(rows) and count < scores[0]:  # no further item is among the best without a boost
            limit, first = count if count * highest >= scores[0] else -1, row
            break
        if not _has(excluded, row):
            found = _add(scores, rows, found, count * exp(_gain(gaining, row)), row)
    if limit < 0:
        return found
    needed = log(scores[0]) - ROUNDING_MARGIN
    for word in range(len(raised)):  # in the order of memory, which is faster
        if not raised[word] & ~excluded[word]:
            continue
        for row in range(64 * word, min(64 * word + 64, len(counts))):
            count = counts[row]
            is_left = count < limit or (count == limit and row >= first)
            if not is_left or count * highest < scores[0] or not _has(raised, row) or _has(excluded, row):
                continue
            gain = _gain(gaining, row)
            if count < len(LOGS) and gain < needed - LOGS[count]:
                continue
            found = _add(scores, rows, found, count * exp(gain), row)
            needed = log(scores[0]) - ROUNDING_MARGIN
    return found


@numba.njit(nogil=True)
def _has(items, row):  # type: ignore[no-untyped-def]
    return items[row // 64] >> np.uint64(row % 64) & np.uint64(1) != 0


@numba.njit(nogil=True)
def _gain(gaining, row):  # type: ignore[no-untyped-def]
    sets, gains, by_item = gaining
    combination = 0
    for place in range(len(sets)):
        combination |= _has(sets[place], row) << place
    return gains[combination] + by_item[row] if len(by_item) else gains[combination]


@numba.njit(nogil=True)
def _add(scores, rows, found, score, row):  # type: ignore[no-untyped-def]
    """Add an item to the heap, in place of the worst one if it is full, and return the new number of items."""
    if found < len(rows):
        place = found
        while place and not _is_worse(scores, rows, (place - 1) // 2, score, row):
            scores[place], rows[place] = scores[(place - 1) // 2], rows[(place - 1) // 2]
            place = (place - 1) // 2
        scores[place], rows[place] = score, row
        return found + 1
    if not found or not _is_worse(scores, rows, 0, score, row):
        return found
    place, child = 0, 1
    while child < found:
        if child + 1 < found and _is_worse(scores, rows, child + 1, scores[child], rows[child]):
            child += 1
        if not _is_worse(scores, rows, child, score, row):
            break
        scores[place], rows[place] = scores[child], rows[child]
        place, child = child, 2 * child + 1
    scores[place], rows[place] = score, row
    return found


@numba.njit(nogil=True)
def _is_worse(scores, rows, place, score, row):  # type: ignore[no-untyped-def]
    """Return whether the item in that place of the heap is worse than this one."""
    return scores[place] < score or (scores[place] == score and rows[place] > row)
