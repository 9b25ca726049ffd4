"""Distinct texts by number, in an append-only table that columns of texts refer to."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.artifact.growing_table import GrowingTable, extended
from model.artifact.string_table import StringTable, ends_of
from model.artifact.word_index import GrowingWordIndex, Levels, Search

MIN_NEW, NEW_SHARE = 1_000, 1 / 8  # either number of new texts triggers the removal of unused ones


class Texts:
    """Distinct texts, without an object for each. One thread may add texts while any thread reads."""

    def __init__(self, texts: Iterable[str] | pl.Series = ()) -> None:
        self._table = GrowingTable(texts if isinstance(texts, StringTable) else StringTable.of(texts))
        self._first = len(self._table)
        self._series: pl.Series | None = None
        self._sorted = np.zeros(0, np.int32)
        self._words = GrowingWordIndex()
        self._folded: tuple[NDArray[np.uint8], NDArray[np.int64], int] = np.zeros(0, np.uint8), np.zeros(1, np.int64), 0

    def __len__(self) -> int:
        return len(self._table)

    @property
    def has_many_new(self) -> bool:
        """Whether enough texts are new to rebuild the table from the texts still in use."""
        return len(self) - self._first > max(MIN_NEW, NEW_SHARE * self._first)

    @property
    def series(self) -> pl.Series:
        """The texts by number."""
        if self._series is None or len(self._series) < len(self):
            self._series = pl.Series([*self._table.strings()], dtype=pl.String)
        return self._series

    @property
    def sorted_numbers(self) -> NDArray[np.int32]:
        """The numbers of the texts in alphabetical order. Few new texts are inserted; many are sorted with the rest."""
        order, count = self._sorted, len(self)
        if count - len(order) > NEW_SHARE * len(order):
            order = pl.Series([*self._table.strings()], dtype=pl.String).arg_sort().to_numpy().astype(np.int32)
        elif count > len(order):
            new = sorted((self[number], number) for number in range(len(order), count))
            places = [bisect(order, text, key=self.__getitem__) for text, _ in new]
            order = np.insert(order, places, [number for _, number in new])
        self._sorted = order
        return order

    def without_unused(self, is_used: NDArray[np.bool_]) -> Texts:
        """Return a table of the texts still in use, which is this table while most are."""
        self._first = len(self)
        if is_used.sum() > (1 - NEW_SHARE) * len(self):
            return self
        strings = self._table.strings()
        ends = strings.ends.astype(np.int64)
        sizes = ends[1:] - ends[:-1]
        return Texts(StringTable(strings.buffer[np.repeat(is_used, sizes)], ends_of(sizes[is_used])))

    def number(self, text: str) -> int | None:
        """Return the number of a text; None if it is unknown."""
        return self._table.get(text)

    def add_all(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Return the numbers of the texts, adding unknown ones."""
        return self._table.add_all(texts)

    @property
    def folded(self) -> StringTable:
        """The texts in folded case, by number. Only texts added since the last call are folded."""
        strings = self._table.strings()
        buffer, ends, count = self._folded
        if count < len(strings):
            begin = strings.ends[count]
            new = StringTable(strings.buffer[int(begin) :], strings.ends[count:] - begin).folded
            used = int(ends[count])
            buffer, ends = extended(buffer, used + len(new.buffer)), extended(ends, len(strings) + 1)
            buffer[used : used + len(new.buffer)] = new.buffer
            ends[count + 1 : len(strings) + 1] = used + new.ends[1:].astype(np.int64)
            self._folded = buffer, ends, len(strings)
        return StringTable(buffer, ends[: len(strings) + 1].view(np.uint64))

    def match_levels(self, search: Search, *, with_typos: bool) -> Levels:
        """Return each text's match level by number, as in `StringTable`. The first search builds an index."""
        return self._words.match_levels(self.folded, search, with_typos=with_typos)

    def __getitem__(self, number: int) -> str:
        return self._table[number]

    def at(self, numbers: NDArray[np.integer]) -> list[str]:
        """Return the texts with these numbers, in order."""
        return self._table.at(numbers)
