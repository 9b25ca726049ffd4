"""Counts of what stands near the items of a block in histories, as the rows of the whole matrix would have them.

A block is some consecutive items with all of their events. Whatever is counted of an item stands in its own row, so
that blocks together are the whole matrix, to the last bit: sums of a row are taken in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """The items from ``first`` to before ``end``, and the places (P,) of their events in the histories, ascending."""

    first: int
    end: int
    places: NDArray[np.int64]


class BlockCounter:
    """Counts neighbours of the events of one block."""

    def __init__(self, block: ItemBlock, starts: NDArray[np.int64], items: int, look_up: LookUp) -> None:
        """Look the block's own events up.

        starts  (users + 1,)  where each user's events begin, and the end
        items   N, the size of the catalogue
        """
        user = np.searchsorted(starts, block.places, side="right") - 1
        self._before = block.places - starts[user]
        self._after = starts[user + 1] - 1 - block.places
        self._row = look_up(block.places, range(1))[0] - np.int32(block.first)
        self._block, self._shape, self._look_up = block, (block.end - block.first, items), look_up

    def followers(self, window: int, decay: float) -> sparse.csr_array:
        """Count as ``item_codes.follower_counts`` what follows the block's items: (n, N)."""
        return self._counts(range(1, window + 1), self._after, decay)

    def cooccurrence(self) -> sparse.csr_array:
        """Count as ``item_codes.cooccurrence`` what stands near the block's items: (n, N)."""
        following = self._counts(range(1, WINDOW + 1), self._after, DECAY_PER_EVENT)
        counts = sparse.csr_array(following + self._counts(range(-1, -WINDOW - 1, -1), self._before, DECAY_PER_EVENT))
        row = np.repeat(np.arange(self._block.first, self._block.end), np.diff(counts.indptr))
        counts.data[counts.indices == row] = 0
        counts.eliminate_zeros()
        return counts

    def _counts(self, steps: range, reach: NDArray[np.int64], decay: float) -> sparse.csr_array:
        """Count what is so many steps away, where the history reaches so far."""
        counts = sparse.csr_array(self._shape, dtype=np.float32)
        for distance, others in enumerate(self._look_up(self._block.places, steps), 1):
            near = reach >= distance
            weight = np.full(np.count_nonzero(near), np.exp(-decay * (distance - 1)), np.float32)
            counts += sparse.coo_array((weight, (self._row[near], others[near])), shape=self._shape).tocsr()
        return counts
