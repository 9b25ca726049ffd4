"""Columns: one property of all items each, by row, without an object for any item.

A number or a time takes 8 bytes an item, a boolean 1, a text 4, and a set 4 and 8 for each of its texts; each different
text is kept once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import polars as pl
from numpy.typing import NDArray
from typing_extensions import override

from model.artifact.string_table import Labels, StringIndex, StringTable
from model.inference import bitmap
from model.inference.bitmap import Bitmap

NO_TEXT = -1
NO_BOOLEAN = -1
NO_TIME = np.iinfo(np.int64).min
CACHED_SETS = 64  # of items that have an element


def pack(mask: NDArray[np.bool_]) -> Bitmap:
    """Return the bitmap of the rows at which the mask is true."""
    packed = bitmap.empty(len(mask))
    found = np.packbits(mask, bitorder="little")
    packed.view(np.uint8)[: len(found)] = found
    return packed


class Column(ABC):
    """The values of one property."""

    @cached_property
    @abstractmethod
    def known(self) -> Bitmap:
        """The rows that have a value."""


@dataclass(frozen=True, eq=False)
class NumberColumn(Column):
    """Numbers (N,), float64; NaN is no value."""

    values: NDArray[np.float64]

    @cached_property
    @override
    def known(self) -> Bitmap:
        return pack(~np.isnan(self.values))


@dataclass(frozen=True, eq=False)
class TimeColumn(Column):
    """Times (N,), int64, in microseconds since the epoch; NO_TIME is no value."""

    values: NDArray[np.int64]

    @cached_property
    @override
    def known(self) -> Bitmap:
        return pack(self.values != NO_TIME)


@dataclass(frozen=True, eq=False)
class BooleanColumn(Column):
    """Booleans (N,), int8; NO_BOOLEAN is no value."""

    values: NDArray[np.int8]

    @cached_property
    @override
    def known(self) -> Bitmap:
        return pack(self.values != NO_BOOLEAN)


class TextColumn(Column):
    """Texts by number (N,), int32, which are places in `texts`; NO_TEXT is no value."""

    def __init__(self, numbers: NDArray[np.int32], texts: StringTable) -> None:
        self.numbers = numbers
        self.texts = texts
        self._index = StringIndex.of(texts)

    @classmethod
    def of(cls, values: Sequence[str | None]) -> TextColumn:
        """Return the column of these values."""
        texts = pl.Series(values, dtype=pl.String)
        different = texts.drop_nulls().unique(maintain_order=True)
        numbers = texts.cast(pl.Enum(different)).to_physical().cast(pl.Int32).fill_null(NO_TEXT)
        return cls(numbers.to_numpy(), StringTable.of(different))

    @cached_property
    @override
    def known(self) -> Bitmap:
        return pack(self.numbers != NO_TEXT)

    @cached_property
    def series(self) -> pl.Series:
        """The different texts, by number."""
        return pl.Series(list(self.texts), dtype=pl.String)

    def number(self, text: str) -> int | None:
        """Return the number of a text; None for one that no item has."""
        return self._index.get(text)

    def rows_with(self, is_wanted: NDArray[np.bool_]) -> Bitmap:
        """Return the rows whose text has a wanted number; `is_wanted` has one more element, for rows without a text."""
        return pack(is_wanted[self.numbers])


class SetColumn(Column):
    """Sets of texts.

    labels    the texts of each row
    is_known  (N,)  bool; a set may be known and empty
    """

    def __init__(self, labels: Labels, is_known: NDArray[np.bool_]) -> None:
        self.labels = labels
        self._is_known = is_known
        self.rows_with = lru_cache(CACHED_SETS)(self._rows_with)

    @classmethod
    def of(cls, values: Sequence[Sequence[str] | None]) -> SetColumn:
        """Return the column of these values."""
        labels = Labels.of([list(dict.fromkeys(value or ())) for value in values])
        return cls(labels, np.array([value is not None for value in values], np.bool_))

    @cached_property
    @override
    def known(self) -> Bitmap:
        return pack(self._is_known)

    @cached_property
    def series(self) -> pl.Series:
        """The different texts, by number."""
        return pl.Series(list(self.labels.names), dtype=pl.String)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How many texts each set has: (N,)."""
        ends = self.labels.ends.astype(np.int64)
        return ends[1:] - ends[:-1]

    def rows_with_any(self, is_wanted: NDArray[np.bool_]) -> Bitmap:
        """Return the rows whose sets have a text with a wanted number."""
        rows = bitmap.empty(len(self.labels))
        for number in np.flatnonzero(is_wanted).tolist():
            bitmap.add(rows, self.labels.items_of(number))
        return rows

    def _rows_with(self, text: str) -> Bitmap:
        rows = bitmap.empty(len(self.labels))
        bitmap.add(rows, self.labels.items_with(text))
        return rows
