"""Different texts by number, to which others are added: what columns of texts refer to."""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from model.artifact.string_table import StringIndex, StringTable

MIN_PACKED, PACKED_SHARE = 1_000, 1 / 8  # so many new texts, or so many for each packed one, are packed too


class Texts:
    """Different texts, most of them packed without an object for each. One thread adds, any may read."""

    def __init__(self, texts: Iterable[str] | pl.Series = ()) -> None:
        self._packed = StringTable.of(texts)
        self._index = StringIndex.of(self._packed)
        self._new: dict[str, int] = {}
        self._added: list[str] = []  # the new ones by number
        self._series: pl.Series | None = None

    def __len__(self) -> int:
        return len(self._packed) + len(self._added)

    @property
    def has_many_new(self) -> bool:
        """Whether it is time to make this anew of the texts that are still in use."""
        return len(self._new) > max(MIN_PACKED, PACKED_SHARE * len(self._packed))

    @property
    def series(self) -> pl.Series:
        """The texts by number."""
        if self._series is None or len(self._series) < len(self):
            self._series = pl.Series([*self._packed, *self._added], dtype=pl.String)
        return self._series

    def number(self, text: str) -> int | None:
        """Return the number of a text; None for an unknown one."""
        number = self._new.get(text)
        return self._index.get(text) if number is None else number

    def add(self, text: str) -> int:
        """Return the number of a text, which is added if it is unknown."""
        number = self.number(text)
        if number is None:
            number = len(self)
            self._added.append(text)
            self._new[text] = number
        return number

    def __getitem__(self, number: int) -> str:
        packed = len(self._packed)
        return self._packed[number] if number < packed else self._added[number - packed]
