"""A list that is more than the best items: each is chosen with regard to those before it.

Source: maximal marginal relevance, Carbonell and Goldstein, SIGIR 1998, with an item's score as its relevance and the
share of equal target codewords as the likeness of two items.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

WINDOW = 24  # how many of the best that are left are looked at for each place

Codes = NDArray[np.uint8]
"""(n, B') target codes"""


class Categories(NamedTuple):
    """Of n items: item i has the labels between ends[i] and ends[i + 1].

    labels  (M,)      int64
    ends    (n + 1,)  int64
    """

    labels: NDArray[np.int64]
    ends: NDArray[np.int64]


class Variety(NamedTuple):
    """How much of it there is to be.

    diversity  0 to 1; 0 leaves the order as it is
    most       items of one category; 0 for any number
    """

    diversity: float
    most: int

    @property
    def window(self) -> int:
        """How many items have to be known for each place, that of the place included."""
        return WINDOW if self.diversity else 1


NO_VARIETY = Variety(0.0, 0)


def choose(
    variety: Variety,
    count: int,
    scores: NDArray[np.float32],
    codes: Codes,
    categories: Categories,
    before: Codes,
    taken: NDArray[np.int64],
    is_all: bool,
) -> tuple[NDArray[np.int64], int]:
    """Places of the chosen items among those given: at most `count`, fewer where more items would have to be known.

    And how many of the given ones could still be chosen then, the first `window` of them.

    For each place of the list, of the `window` best items that are left and whose categories are not full, the one with
    the largest (1 - diversity) * score - diversity * its largest likeness to one that was chosen before.

    scores      (n,)   descending
    codes       of these items; any where there is to be no diversity
    categories  of these items
    before      codes of what is in the list already
    taken       (L,)   how many items of each category are; those that are chosen are added
    is_all      whether there are no more items than these
    """
    chosen = np.empty(count, np.int64)
    found, left = _choose(
        variety.diversity, variety.most, variety.window, scores, codes, *categories, before, taken, is_all, chosen
    )
    return chosen[:found], left


def count(categories: Categories, labels: int) -> NDArray[np.int64]:
    """How many of the items each of so many categories has: (labels,)."""
    taken = np.zeros(labels, np.int64)
    if len(categories.labels):
        _count(*categories, taken)
    return taken


@numba.njit(cache=True, nogil=True)
def _count(labels, ends, taken):  # type: ignore[no-untyped-def]
    for item in range(len(ends) - 1):
        _take(item, labels, ends, taken)


@numba.njit(nogil=True)
def _take(item, labels, ends, taken):  # type: ignore[no-untyped-def]
    for place in range(ends[item], ends[item + 1]):
        if labels[place] not in labels[ends[item] : place]:  # a shop may have said it twice
            taken[labels[place]] += 1


@numba.njit(cache=True, nogil=True)
def _choose(diversity, most, window, scores, codes, labels, ends, before, taken, is_all, chosen):  # type: ignore[no-untyped-def]
    count, books = len(scores), codes.shape[1]
    is_gone, likeness = np.zeros(count, np.bool_), np.zeros(count, np.float64)
    books = max(books, 1)  # without codes nothing is like anything
    known, first, found, seen = 0, 0, 0, 0  # of the items, the likeness of so many is known
    while found < len(chosen):
        best, best_value, seen, item = -1, 0.0, 0, first
        while item < count and seen < window:
            if not is_gone[item]:
                if most > 0:
                    for place in range(ends[item], ends[item + 1]):
                        is_gone[item] |= taken[labels[place]] >= most
                if not is_gone[item]:
                    if item >= known:
                        known = item + 1
                        if diversity > 0:
                            for other in before:
                                likeness[item] = max(likeness[item], _same(codes[item], other) / books)
                            for place in range(found):
                                same = _same(codes[item], codes[chosen[place]])
                                likeness[item] = max(likeness[item], same / books)
                    value = (1 - diversity) * scores[item] - diversity * likeness[item]
                    if best < 0 or value > best_value:
                        best, best_value = item, value
                    seen += 1
            item += 1
        if best < 0 or (seen < window and not is_all):
            break
        chosen[found] = best
        found += 1
        is_gone[best] = True
        _take(best, labels, ends, taken)
        if diversity > 0:
            for other in range(first, known):
                if not is_gone[other]:
                    likeness[other] = max(likeness[other], _same(codes[other], codes[best]) / books)
        while first < count and is_gone[first]:
            first += 1
    return found, seen


@numba.njit(nogil=True)
def _same(one, other):  # type: ignore[no-untyped-def]
    same = 0
    for book in range(len(one)):
        same += one[book] == other[book]
    return same


def compile_loops() -> None:
    """Before the first request waits for it."""
    codes, labels, ends = np.zeros((0, 1), np.uint8), np.zeros(0, np.int64), np.zeros(1, np.int64)
    _choose(0.5, 1, 1, np.zeros(0, np.float32), codes, labels, ends, codes, labels, True, labels)
    _count(labels, ends, labels)
