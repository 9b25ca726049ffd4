"""The most popular items under boosts, each of which multiplies an item's count by e to the power of the boost.

An item that nobody has chosen counts as half a choice, or no boost could move it.
"""

import heapq
from math import exp, log

import numba
import numpy as np
from numpy.typing import NDArray

from model.inference.bitmap import Bitmap
from model.inference.scan import Boosts

ROUNDING_MARGIN = 1e-9  # exceeds the rounding error of a product, and of a difference of logarithms
LEAST_COUNT = 0.5
LOGS = np.log(np.maximum(np.arange(1024), LEAST_COUNT))  # of frequent counts


def best_rows(
    counts: NDArray[np.integer], popular_rows: NDArray[np.int32], k: int, excluded: Bitmap, boosts: Boosts
) -> NDArray[np.int64]:
    """Return the k rows with the highest boosted counts that are not excluded, in any order; of equal ones the first.

    counts        (N,)  of each row
    popular_rows  (N,)  all rows, by count, highest first, then in order
    """
    most = min(k, len(counts))
    if not most:
        return np.empty(0, np.int64)
    gains = np.zeros(1)  # of each combination of sets; the bits of its number are the sets, of which there are few
    for gain in boosts.gains.tolist():
        gains = np.concatenate([gains, gains + gain])
    highest = np.exp(gains.max() + max(boosts.highest, 0.0)) * (1 + ROUNDING_MARGIN)
    raised = np.bitwise_or.reduce(boosts.sets[boosts.gains > 0], axis=0)
    if len(boosts.by_item):
        raised = ~np.zeros_like(raised)
    popular, gaining = (counts, popular_rows), (boosts.sets, gains, boosts.by_item)
    return np.array(_find_best(popular, excluded, raised, gaining, highest, most), np.int64)


@numba.njit(cache=True, nogil=True)
def _find_best(popular, excluded, raised, gaining, highest, most):  # type: ignore[no-untyped-def]
    """Return the rows, at most so many, by a heap of scores and rows, the worst first.

    popular  the counts, and the rows by count
    raised   the items whose factors may be above 1
    gaining  the sets, the gain of each combination of sets, and the gains by item
    highest  the largest factor of any item
    """
    counts, popular_rows = popular
    heap = [(0.0, np.int64(0)) for _ in range(0)]
    limit, first = -1.0, 0
    for row in popular_rows:
        count = max(counts[row], LEAST_COUNT)
        if len(heap) == most and count < heap[0][0]:  # no further item is among the best without a boost
            limit, first = count if count * highest >= heap[0][0] else -1.0, row
            break
        if not _has(excluded, row):
            _offer(heap, most, count * exp(_gain(gaining, row)), np.int64(row))
    if limit < 0:
        return [-row for _, row in heap]
    needed = log(heap[0][0]) - ROUNDING_MARGIN
    for word in range(len(raised)):  # in the order of memory, which is faster
        if not raised[word] & ~excluded[word]:
            continue
        for row in range(64 * word, min(64 * word + 64, len(counts))):
            count = max(counts[row], LEAST_COUNT)
            is_left = count < limit or (count == limit and row >= first)
            if not is_left or count * highest < heap[0][0] or not _has(raised, row) or _has(excluded, row):
                continue
            gain = _gain(gaining, row)
            if count < len(LOGS) and gain < needed - LOGS[counts[row]]:
                continue
            _offer(heap, most, count * exp(gain), np.int64(row))
            needed = log(heap[0][0]) - ROUNDING_MARGIN
    return [-row for _, row in heap]


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
def _offer(heap, most, score, row):  # type: ignore[no-untyped-def]
    """Add an item to the heap, in place of the worst one if it has the most; of equal scores the later row is worse."""
    if len(heap) < most:
        heapq.heappush(heap, (score, -row))
    elif heap[0] < (score, -row):
        heapq.heapreplace(heap, (score, -row))
