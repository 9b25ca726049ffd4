"""Counts of what stands near the items of a block in histories, as the rows of the whole matrix would have them.

A block is some consecutive items with all of their events. Whatever is counted of an item stands in its own row, so
that blocks together are the whole matrix, to the last bit: sums of a row are taken in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from model.lisa.item_codes import DECAY_PER_EVENT, WINDOW

LookUp = Callable[[NDArray[np.int64], range], NDArray[np.int32]]
"""Returns the items of the events that stand so many places after each of these: (P,) -> (steps, P).

Anything stands for a place that is none.
"""


class ItemBlock(NamedTuple):
    """The items from ``first`` to before ``end``, and the places (P,) of their events in the histories, ascending.

    at_once  how many places are looked up together at most, as a popular item alone may have too many
    """

    first: int
    end: int
    places: NDArray[np.int64]
    at_once: int

    def parts(self) -> Iterator[NDArray[np.int64]]:
        """Iterate over the places, so many at once."""
        for begin in range(0, len(self.places), self.at_once):
            yield np.array(self.places[begin : begin + self.at_once])


class BlockCounter:
    """Counts neighbours of the events of one block."""

    def __init__(self, block: ItemBlock, starts: NDArray[np.int64], items: int, look_up: LookUp) -> None:
        """Count in histories.

        starts  (users + 1,)  where each user's events begin, and the end
        items   N, the size of the catalogue
        """
        self._block, self._starts, self._look_up = block, starts, look_up
        self._shape = block.end - block.first, items

    def followers(self, window: int, decay: float) -> sparse.csr_array:
        """Count as ``item_codes.follower_counts`` what follows the block's items: (n, N)."""
        return self._counts(range(1, window + 1), decay)

    def cooccurrence(self) -> sparse.csr_array:
        """Count as ``item_codes.cooccurrence`` what stands near the block's items: (n, N)."""
        following = self._counts(range(1, WINDOW + 1), DECAY_PER_EVENT)
        counts = sparse.csr_array(following + self._counts(range(-1, -WINDOW - 1, -1), DECAY_PER_EVENT))
        row = np.repeat(np.arange(self._block.first, self._block.end), np.diff(counts.indptr))
        counts.data[counts.indices == row] = 0
        counts.eliminate_zeros()
        return counts

    def _counts(self, steps: range, decay: float) -> sparse.csr_array:
        """Count what is so many steps away, where the history reaches so far."""
        counts = sparse.csr_array(self._shape, dtype=np.float32)
        for distance, pairs in enumerate(self._pairs(steps)):
            weight = np.full(pairs.data.max(initial=0), np.exp(-decay * distance), np.float32)
            sums = np.cumsum(weight)  # one after the other, as a sum of all pairs' weights is computed
            counts += sparse.csr_array((sums[pairs.data - 1], pairs.indices, pairs.indptr), shape=self._shape)
        return counts

    def _pairs(self, steps: range) -> list[sparse.csr_array]:
        """Count the pairs of events that are so far from each other, for each step: (n, N) of int64."""
        found = [sparse.csr_array(self._shape, dtype=np.int64) for _ in steps]
        for places in self._block.parts():
            user = np.searchsorted(self._starts, places, side="right") - 1
            reach = self._starts[user + 1] - 1 - places if steps.step > 0 else places - self._starts[user]
            row = self._look_up(places, range(1))[0] - np.int32(self._block.first)
            for distance, others in enumerate(self._look_up(places, steps)):
                near = reach > distance
                once = np.ones(np.count_nonzero(near), np.int64)
                found[distance] += sparse.coo_array((once, (row[near], others[near])), shape=self._shape).tocsr()
        return found


def strongest_columns(strengths: sparse.csr_array, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Find the ``count`` strongest columns of each row, strongest first, ties by column: (n, N) -> 2 x (n, count).

    returns  the columns, -1 where there are fewer, and their strengths, 0 there
    """
    shape = strengths.shape[0], count
    columns, found = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    rows = np.repeat(np.arange(len(columns)), np.diff(strengths.indptr))
    strongest_first = np.lexsort((strengths.indices, -strengths.data, rows))
    place = np.arange(len(rows)) - strengths.indptr[rows]
    kept, cells = strongest_first[place < count], (rows[place < count], place[place < count])
    columns[cells], found[cells] = strengths.indices[kept], strengths.data[kept]
    return columns, found
