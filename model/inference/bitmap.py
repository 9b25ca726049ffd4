"""Sets of items, one bit each: excluding a set takes a scan one operation per 64 items."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from model.inference.scan_kernel import BLOCK

Bitmap = NDArray[np.uint64]
"""(words,): item i is bit i % 64 of word i // 64. Words fill whole blocks; bits past the last item have no meaning."""


def empty(items: int) -> Bitmap:
    """Return an empty set over this number of items."""
    return np.zeros(-(-items // BLOCK) * (BLOCK // 64), np.uint64)


@numba.njit(cache=True, nogil=True)
def _add(bitmap, rows):  # type: ignore[no-untyped-def]
    for row in rows:
        bitmap[row // 64] |= np.uint64(1) << np.uint64(row % 64)


def add(bitmap: Bitmap, rows: NDArray[np.signedinteger]) -> None:
    """Add the items in these rows to the bitmap, in place."""
    _add(bitmap, rows)


@numba.njit(cache=True, nogil=True)
def _add_to_copies(bitmap, rows, copies):  # type: ignore[no-untyped-def]
    for place in range(len(rows)):
        copies[place, :] = bitmap
        for row in rows[place]:
            if row >= 0:
                copies[place, row // 64] |= np.uint64(1) << np.uint64(row % 64)


def with_each(bitmap: Bitmap, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a copy of the bitmap for each of Q lists of rows, with these rows added: (Q, n) -> (Q, words).

    rows  -1 for none
    """
    copies = np.empty((len(rows), len(bitmap)), np.uint64)
    _add_to_copies(bitmap, rows, copies)
    return copies


@numba.njit(cache=True, nogil=True)
def _discard(bitmap, rows):  # type: ignore[no-untyped-def]
    for row in rows:
        bitmap[row // 64] &= ~(np.uint64(1) << np.uint64(row % 64))


def discard(bitmap: Bitmap, rows: NDArray[np.int64]) -> None:
    """Remove the items in these rows from the bitmap, in place."""
    _discard(bitmap, rows)


@numba.njit(cache=True, nogil=True)
def _has(bitmap, rows, found):  # type: ignore[no-untyped-def]
    for place in range(len(rows)):
        found[place] = bitmap[rows[place] // 64] >> np.uint64(rows[place] % 64) & np.uint64(1) != 0


def has(bitmap: Bitmap, rows: NDArray[np.signedinteger]) -> NDArray[np.bool_]:
    """Return which rows are in the bitmap: (rows,)."""
    found = np.empty(len(rows), np.bool_)
    _has(bitmap, rows, found)
    return found


@numba.njit(cache=True, nogil=True)
def _first_outside(bitmap, rows, places):  # type: ignore[no-untyped-def]
    found = 0
    for row in rows:
        if found == len(places):
            break
        if bitmap[row // 64] >> np.uint64(row % 64) & np.uint64(1) == 0:
            places[found] = row
            found += 1
    return found


def first_outside(bitmap: Bitmap, rows: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Return the first rows that are not in the bitmap, at most `count`."""
    found = np.empty(min(count, len(rows)), np.int32)
    return found[: _first_outside(bitmap, rows, found)]


def count(bitmap: Bitmap, items: int) -> int:
    """Return how many of the first `items` items are in the bitmap."""
    whole, rest = divmod(items, 64)
    last = int(bitmap[whole]) & ((1 << rest) - 1) if rest else 0
    return int(np.bitwise_count(bitmap[:whole]).sum(dtype=np.int64)) + last.bit_count()


def to_mask(bitmaps: NDArray[np.uint64], items: int) -> NDArray[np.bool_]:
    """Unpack bitmaps: (..., words) -> (..., N)."""
    return np.unpackbits(bitmaps.view(np.uint8), axis=-1, count=items, bitorder="little").view(np.bool_)
