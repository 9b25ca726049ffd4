"""The newest items that stepped, of many states at once, compiled: a request is to cost no Python for each user.

``storage.state.stepped_items`` says what they are, of one state; tests hold the two equal.
"""

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray


def _field(number: types.Type, dimensions: int) -> types.Array:
    """The type of a field of any array of states: as they lie in the bytes, read-only or at odd addresses."""
    return types.Array(number, dimensions, "A", readonly=True, aligned=False)


def windows(states: NDArray[np.void], length: int) -> NDArray[np.int64]:
    """Rows of the newest items that stepped, newest first, then -1: (Q,) states -> (Q, length)."""
    found = np.full((len(states), length), -1)
    _fill(states["recent_items"], states["item_count"], found)
    return found


@numba.njit(
    types.void(_field(types.int32, 2), _field(types.uint64, 1), types.Array(types.int64, 2, "C")),
    cache=True,
    nogil=True,
)
def _fill(rings, counts, found):  # type: ignore[no-untyped-def]
    users, slots = rings.shape
    for user in range(users):
        slot, place = np.int64(counts[user] % np.uint64(slots)), 0
        for _ in range(slots):
            slot = slot - 1 if slot else slots - 1
            if place < found.shape[1] and rings[user, slot] >= 0:
                found[user, place] = rings[user, slot]
                place += 1
