"""A growing table of distinct strings in one buffer, with an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from model.artifact.string_table import (
    FREE_SLOT,
    MAX_LOAD,
    StringIndex,
    StringTable,
    fill,
    find,
    first_slot,
    joined,
    probe,
)

GROWTH = 1.25  # capacity, as a multiple of the needed size

ScalarT = TypeVar("ScalarT", bound=np.generic)


class GrowingTable:
    """A growing list of distinct, numbered strings. One thread may add strings, any thread may read."""

    def __init__(self, strings: StringTable) -> None:
        self._count, table = len(strings), np.array(StringIndex.of(strings).table)
        # replaced together, because a reader's row must be within the arrays that it reads
        self._parts = np.array(strings.buffer), strings.ends.astype(np.int64), table

    def __len__(self) -> int:
        return self._count

    def strings(self) -> StringTable:
        """Return the current strings, without a copy."""
        buffer, ends, _ = self._parts
        ends = ends[: self._count + 1]
        return StringTable(buffer[: ends[-1]], ends.view(np.uint64))

    def get(self, string: str) -> int | None:
        """Return the number of a string; None for an unknown one."""
        row: int = find(*self._parts, string.encode())
        return None if row == FREE_SLOT else row

    def add_all(self, strings: Sequence[str]) -> NDArray[np.int64]:
        """Return the numbers of the strings, and add those that are unknown."""
        return self.add_joined(*joined(strings))

    def add_joined(self, strings: NDArray[np.uint8], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Do what `add_all` does, for concatenated strings and their ends (N + 1,)."""
        rows = np.empty(len(ends) - 1, np.int64)
        self._reserve(len(rows), len(strings))
        self._count = _add_each(*self._parts, self._count, strings, ends, rows)
        return rows

    def __getitem__(self, number: int) -> str:
        buffer, ends, _ = self._parts
        begin, end = ends[number : number + 2].tolist()
        return buffer[begin:end].tobytes().decode()

    def at(self, numbers: NDArray[np.integer]) -> list[str]:
        """Return the strings of these numbers, in order."""
        return self.strings().at(numbers)

    def _reserve(self, strings: int, size: int) -> None:
        """Make room for `strings` more strings of `size` bytes together."""
        buffer, ends, table = self._parts
        needed = self._count + strings + 1
        buffer, ends = extended(buffer, int(ends[self._count]) + size), extended(ends, needed)
        if needed > MAX_LOAD * len(table):
            table = np.full(int(needed * GROWTH / MAX_LOAD) + 1, FREE_SLOT, np.int32)
            fill(buffer, ends[: self._count + 1], table)
        self._parts = buffer, ends, table


def extended(array: NDArray[ScalarT], size: int) -> NDArray[ScalarT]:
    """Return the array if it has at least this size, else a larger copy that is filled up with zeros."""
    if len(array) >= size:
        return array
    return np.concatenate([array, np.zeros(int(size * GROWTH) - len(array), array.dtype)])


@numba.njit(cache=True, nogil=True)
def _add_each(buffer, ends, table, count, wanted, wanted_ends, rows):  # type: ignore[no-untyped-def]
    """Find the strings, and append those that are new; return the new count. All parts must have the room.

    Numba recompiles this only when this file changes, so change it together with `first_slot`.
    """
    for n in range(len(rows)):
        begin, end = np.int64(wanted_ends[n]), np.int64(wanted_ends[n + 1])
        row = probe(buffer, ends, table, wanted, begin, end)
        if row == FREE_SLOT:
            row, first = count, ends[count]
            for place in range(end - begin):
                buffer[first + place] = wanted[begin + place]
            ends[count + 1] = first + end - begin
            slot = first_slot(wanted, begin, end, len(table))
            while table[slot] != FREE_SLOT:
                slot = slot + 1 if slot + 1 < len(table) else 0
            table[slot] = row  # last, for concurrent readers
            count += 1
        rows[n] = row
    return count
