"""Items by their labels: their categories, or the texts of one of their properties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numba
import numpy as np
from numpy.typing import NDArray

from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.diversity import ItemLabels


class LabelledItems(Protocol):
    """Items and their labels, numbered from 0."""

    def of_rows(self, rows: NDArray[np.int64]) -> ItemLabels:
        """Return the labels of the items in these rows."""

    def rows_with_labels(self, labels: NDArray[np.int64]) -> Bitmap:
        """Return the items that have at least one of the labels."""


@dataclass(frozen=True, slots=True, eq=False)
class LabelSnapshot:
    """A snapshot of the labels of N items in a column.

    numbers  (N,)  int16 or int32, the number of each item's text or set of texts; -1 for none
    count    the number of distinct texts or sets
    sets     the labels of each set; None if a text is its own label
    """

    numbers: NDArray[np.signedinteger]
    count: int
    sets: ItemLabels | None

    @property
    def nbytes(self) -> int:
        """Its size in memory, in bytes."""
        return self.numbers.nbytes + (0 if self.sets is None else self.sets.labels.nbytes + self.sets.ends.nbytes)

    def of_rows(self, rows: NDArray[np.int64]) -> ItemLabels:
        """Return the labels of the items in these rows."""
        numbers = self.numbers[rows].astype(np.int64)
        known = numbers >= 0
        if self.sets is None:
            return ItemLabels(numbers[known], np.concatenate([[0], np.cumsum(known)]))
        labels, ends_of_sets = self.sets
        begins = np.where(known, ends_of_sets[numbers], 0)
        sizes = np.where(known, ends_of_sets[numbers + 1] - begins, 0)
        return ItemLabels.gathered(labels, begins, sizes)

    def rows_with_labels(self, labels: NDArray[np.int64]) -> Bitmap:
        """Return the items that have at least one of the labels."""
        if self.sets is None:
            is_wanted = np.zeros(self.count + 1, np.bool_)  # the last element is for items without a text
            is_wanted[labels] = True
            return rows_of_numbers(is_wanted, self.numbers)
        is_label_wanted = np.zeros(max(labels.max(initial=0), self.sets.labels.max(initial=0)) + 1, np.bool_)
        is_label_wanted[labels] = True
        return rows_of_numbers(sets_with_any(is_label_wanted, self.sets), self.numbers)


def sets_with_any(is_wanted: NDArray[np.bool_], sets: ItemLabels) -> NDArray[np.bool_]:
    """Return which sets have a wanted label; the result has one more element, False, for rows without a set.

    sets  with labels and ends of any integer types; a loop is compiled for each pair of types
    """
    found = np.zeros(len(sets.ends), np.bool_)
    _mark_sets(is_wanted, sets.labels, sets.ends, found)
    return found


def rows_of_numbers(is_wanted: NDArray[np.bool_], numbers: NDArray[np.signedinteger]) -> Bitmap:
    """Return the rows whose number is wanted; a number below 0 counts from the end."""
    rows = bitmap.empty(len(numbers))
    _gather(is_wanted, np.ascontiguousarray(numbers), rows)
    return rows


@numba.njit(cache=True, nogil=True)
def _mark_sets(is_wanted, labels, ends, found):  # type: ignore[no-untyped-def]
    """Mark the sets that have a wanted label."""
    for place in range(len(ends) - 1):
        for label in labels[ends[place] : ends[place + 1]]:
            found[place] |= is_wanted[label]


@numba.njit(cache=True, nogil=True)
def _gather(is_wanted, numbers, rows):  # type: ignore[no-untyped-def]
    """Mark the rows whose numbers are wanted."""
    size = len(is_wanted)
    for word in range(len(rows)):
        bits = np.uint64(0)
        begin = word * 64
        for place in range(min(64, len(numbers) - begin)):
            number = numbers[begin + place]
            bits |= np.uint64(is_wanted[number if number >= 0 else number + size]) << np.uint64(place)
        rows[word] = bits
