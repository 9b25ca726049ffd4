"""Counts how often items are near each other in training histories, at once or by blocks of items."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from model.data.arrays import IN_MEMORY, Arrays, OnStage, ignored, shares_of
from model.data.interactions import Histories, starts_of
from model.lisa import item_codes
from model.lisa.item_followers import WINDOW, Followers, strongest_followers, strongest_of
from model.lisa.neighbours import BlockCounter, ItemBlock

PAIRS_SHARE = 2  # a block has half of a piece's events, because each event has up to 60 neighbours
LOOKED_UP_AT_ONCE = 1 << 16
STORED_AT_ONCE = 1 << 26
VECTORS = "computing item vectors"  # a stage


class ItemIndex:
    """The places of the events of each item, by blocks of items that fit into a piece together."""

    def __init__(self, item: NDArray[np.integer], items: int, arrays: Arrays) -> None:
        self._arrays, self._events = arrays, len(item)
        self._starts = starts_of(arrays.counted(item, items))
        places = (lambda part: np.arange(part.start, part.stop), np.int64)
        (self._places,) = arrays.bucketed([places], item, self._starts, [*self._stretches()])

    def blocks(self) -> Iterator[ItemBlock]:
        """Iterate over all blocks."""
        for one in self._stretches():
            places = self._places[self._starts[one.start] : self._starts[one.stop]]
            yield ItemBlock(one.start, one.stop, places, max(self._arrays.piece // PAIRS_SHARE, 1))

    def look_up(self, column: NDArray[Any], places: NDArray[np.int64], steps: range) -> NDArray[Any]:
        """Look up a column of the events at ``steps`` after some places, which ascend: (P,) -> (steps, P).

        Beyond the first or last event, the result is arbitrary.
        """
        found = np.empty((len(steps), len(places)), column.dtype)
        for begin in range(0, len(places), LOOKED_UP_AT_ONCE):
            part = slice(begin, begin + LOOKED_UP_AT_ONCE)
            for row, step in enumerate(steps):
                found[row, part] = column[np.clip(places[part] + step, 0, self._events - 1)]
            self._arrays.release()  # once for all steps, which use the same pages
        return found

    def _stretches(self) -> Iterator[slice]:
        return self._arrays.groups(self._starts, PAIRS_SHARE)


class PairCounts:
    """The counts are identical for one piece and for many."""

    def __init__(
        self, histories: Histories, items: int, arrays: Arrays = IN_MEMORY, on_stage: OnStage = ignored
    ) -> None:
        self._histories, self._items, self._arrays, self._on_stage = histories, items, arrays, on_stage
        is_whole = len(histories.item) <= arrays.piece
        self._index = None if is_whole else ItemIndex(histories.item, items, arrays)

    def followers(self, count: int, decay: float) -> Followers:
        """Find the ``count`` strongest followers of every item; see ``strongest_followers``."""
        stage = "counting followers"
        self._on_stage(stage)
        if self._index is None:
            return strongest_followers(self._histories.item, self._histories.starts, self._items, count, decay)
        counters = self._counters(self._index, stage)
        found = [strongest_of(counter.followers(WINDOW, decay), count) for _, counter in counters]
        return Followers(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    def item_vectors(self, width: int, seed: int) -> NDArray[np.float32]:
        """Compute item vectors (N, width) from the co-occurrence; see ``item_codes.item_vectors``."""
        stage = f"counting neighbours of {self._items:,} items"
        self._on_stage(stage)
        if self._index is None:
            counts = item_codes.cooccurrence(self._histories.item, self._histories.starts, self._items)
            self._on_stage(VECTORS)
            return item_codes.item_vectors(counts, width, seed)
        most = min(2 * item_codes.WINDOW * len(self._histories.item), self._items**2)
        association = StoredMatrix(most, self._arrays)
        for first, counter in self._counters(self._index, stage):
            association.append(first, counter.cooccurrence())
        self._on_stage(VECTORS)
        association.become_mutual_information()
        return item_codes.strongest_components(association, self._items, width, seed)

    def _counters(self, index: ItemIndex, stage: str) -> Iterator[tuple[int, BlockCounter]]:
        """Iterate over the blocks of items: the first item of each, and its counter."""
        look_up, report = partial(index.look_up, self._histories.item), shares_of(stage, self._on_stage)
        for block in index.blocks():
            report(block.first / self._items)
            yield block.first, BlockCounter(block, self._histories.starts, self._items, look_up)


class StoredMatrix:
    """A symmetric matrix (N, N) of float32 by blocks of rows, whose arrays may be mapped.

    Each array has many entries, because each takes a file if it is mapped.
    """

    def __init__(self, most: int, arrays: Arrays) -> None:
        """Create an empty matrix, which will have at most ``most`` entries."""
        self._at_once = min(most, STORED_AT_ONCE)
        self._data, self._indices = np.empty(0, np.float32), np.empty(0, np.int32)  # unused places
        self._blocks: list[tuple[int, sparse.csr_array]] = []
        self._arrays = arrays

    def append(self, first: int, rows: sparse.csr_array) -> None:
        """Append a block of rows; ``first`` is the number of its first row."""
        count = len(rows.data)
        if count > len(self._data):
            room = max(count, self._at_once)
            self._data, self._indices = self._arrays.empty(room, np.float32), self._arrays.empty(room, np.int32)
        data, indices = self._data[:count], self._indices[:count]
        self._data, self._indices = self._data[count:], self._indices[count:]
        data[:], indices[:] = rows.data, rows.indices
        self._blocks.append((first, sparse.csr_array((data, indices, rows.indptr.astype(np.int32)), shape=rows.shape)))

    def become_mutual_information(self) -> None:
        """Turn counts of co-occurrence into their mutual information, in place."""
        sums = []
        for _, rows in self._blocks:
            sums.append(item_codes.degrees(rows))
            self._arrays.release()
        degree = np.concatenate(sums)
        for first, rows in self._blocks:
            rows.data[:] = item_codes.mutual_information(rows, degree, first).data
            self._arrays.release()

    def __matmul__(self, other: NDArray[np.float32], /) -> NDArray[np.float32]:
        product = np.empty(other.shape, np.float32)
        for first, rows in self._blocks:
            product[first : first + rows.shape[0]] = rows @ other
            self._arrays.release()
        return product
