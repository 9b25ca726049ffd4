"""Different texts by number, to which others are added: what columns of texts refer to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.artifact.growing_table import GrowingTable
from model.artifact.string_table import StringTable

MIN_NEW, NEW_SHARE = 1_000, 1 / 8  # so many new texts, or so many for each one before, are a reason to look for unused


class Texts:
    """Different texts, without an object for each. One thread adds, any may read."""

    def __init__(self, texts: Iterable[str] | pl.Series = ()) -> None:
        self._table = GrowingTable(StringTable.of(texts))
        self._first = len(self._table)
        self._series: pl.Series | None = None
        self._packed = self._table.strings()

    def __len__(self) -> int:
        return len(self._table)

    @property
    def has_many_new(self) -> bool:
        """Whether it is time to make this anew of the texts that are still in use."""
        return len(self) - self._first > max(MIN_NEW, NEW_SHARE * self._first)

    @property
    def series(self) -> pl.Series:
        """The texts by number."""
        if self._series is None or len(self._series) < len(self):
            self._series = pl.Series([*self._table.strings()], dtype=pl.String)
        return self._series

    @property
    def packed(self) -> StringTable:
        """The texts by number, as a table."""
        if len(self._packed) < len(self):
            self._packed = self._table.strings()
        return self._packed

    def number(self, text: str) -> int | None:
        """Return the number of a text; None for an unknown one."""
        return self._table.get(text)

    def add(self, text: str) -> int:
        """Return the number of a text, which is added if it is unknown."""
        return int(self._table.add_all([text])[0])

    def add_all(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Return the numbers of the texts; those that are unknown are added."""
        return self._table.add_all(texts)

    def __getitem__(self, number: int) -> str:
        return self._table[number]

    def at(self, numbers: NDArray[np.integer]) -> list[str]:
        """Return the texts of these numbers, in order."""
        return self._table.at(numbers)
