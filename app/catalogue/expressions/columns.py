"""Columns: one property of all items by row, without an object per item.

A number or a time takes 8 bytes per item. A text or a set takes 2, or 4 if there are more than 32,767 distinct ones,
and each distinct text and set is stored once. A boolean takes a bit, and so does whether an item has a value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray
from typing_extensions import override

from app.catalogue.expressions.labels import LabelSnapshot, rows_of_numbers
from app.catalogue.expressions.texts import Texts
from model.artifact.word_index import Search
from model.inference import bitmap
from model.inference.bitmap import Bitmap

ItemValue: TypeAlias = "str | float | bool | tuple[str, ...]"
"""A value of a property; a time is a number of microseconds since the epoch."""

NO_TEXT = -1


def pack(mask: NDArray[np.bool_]) -> Bitmap:
    """Return the bitmap of the rows where the mask is true."""
    packed = bitmap.empty(len(mask))
    found = np.packbits(mask, bitorder="little")
    packed.view(np.uint8)[: len(found)] = found
    return packed


class Column(ABC):
    """The values of one property.

    known    the rows that have a value
    changes  the number of changes
    """

    known: Bitmap
    changes = 0

    @abstractmethod
    def value(self, row: int) -> ItemValue | None:
        """Return the value of one row."""


class StoredColumn(Column):
    """A column whose values can be set."""

    def set(self, rows: NDArray[np.int64], values: Sequence[Any]) -> None:
        """Set the values of distinct rows; None removes a value."""
        has_value = np.array([value is not None for value in values], np.bool_)
        if self._is_change(rows, has_value):
            self._note(rows, has_value, self._set(rows, values))

    def copy(self, other: Column, there: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Copy values from the rows `there` of another column of the same kind to distinct rows."""
        has_value = bitmap.has(other.known, there)
        if self._is_change(rows, has_value):
            self._note(rows, has_value, self._copy(other, there, rows))

    def grow(self, rows: int) -> None:
        """Extend the column to this number of rows; the new ones have no value."""
        self._grow(rows)
        self.known = _grown(self.known, rows)

    def _has(self, row: int) -> bool:
        return bool(bitmap.has(self.known, np.array([row]))[0])

    def _is_change(self, rows: NDArray[np.int64], has_value: NDArray[np.bool_]) -> bool:
        """Return whether any row has a value, before or after; a column without any value takes no memory."""
        return bool(has_value.any() or bitmap.has(self.known, rows).any())

    def _note(self, rows: NDArray[np.int64], has_value: NDArray[np.bool_], is_different: bool) -> None:
        if is_different or not np.array_equal(bitmap.has(self.known, rows), has_value):
            bitmap.add(self.known, rows[has_value])
            bitmap.discard(self.known, rows[~has_value])
            self.changes += 1

    @abstractmethod
    def _set(self, rows: NDArray[np.int64], values: Sequence[Any]) -> bool:
        """Set values, and return whether any value differs from before."""

    @abstractmethod
    def _copy(self, other: Any, there: NDArray[np.int64], rows: NDArray[np.int64]) -> bool:
        """Copy values, and return whether any value differs from before."""

    @abstractmethod
    def _grow(self, rows: int) -> None: ...


class NumberColumn(StoredColumn):
    """Numbers (N,), float64, or times (N,), int64, in microseconds since the epoch.

    A removed value stays in `values`, so that no thread that has just read `known` reads another one.
    """

    def __init__(self, rows: int, dtype: type[np.float64 | np.int64] = np.float64) -> None:
        self.values: NDArray[Any] = np.zeros(rows, dtype)
        self.known = bitmap.empty(rows)

    @override
    def value(self, row: int) -> float | None:
        return self.values[row].item() if self._has(row) else None

    @override
    def _set(self, rows: NDArray[np.int64], values: Sequence[Any]) -> bool:
        kept = [place for place, value in enumerate(values) if value is not None]
        return self._put(rows[kept], np.array([values[place] for place in kept], self.values.dtype))

    @override
    def _copy(self, other: NumberColumn, there: NDArray[np.int64], rows: NDArray[np.int64]) -> bool:
        kept = bitmap.has(other.known, there)
        return self._put(rows[kept], other.values[there[kept]])

    def _put(self, rows: NDArray[np.int64], values: NDArray[Any]) -> bool:
        is_different = not np.array_equal(self.values[rows], values)
        self.values[rows] = values
        return is_different

    @override
    def _grow(self, rows: int) -> None:
        self.values = np.concatenate([self.values, np.zeros(rows - len(self.values), self.values.dtype)])


class BooleanColumn(StoredColumn):
    """Booleans, stored as the rows where they are true."""

    def __init__(self, rows: int) -> None:
        self.true = bitmap.empty(rows)
        self.known = bitmap.empty(rows)

    @classmethod
    def all_true(cls, rows: int) -> BooleanColumn:
        """Return a column that is true in every row."""
        column = cls(rows)
        column.true, column.known = ~column.true, ~column.known
        return column

    @override
    def value(self, row: int) -> bool | None:
        return bool(bitmap.has(self.true, np.array([row]))[0]) if self._has(row) else None

    @override
    def _set(self, rows: NDArray[np.int64], values: Sequence[Any]) -> bool:
        kept = [place for place, value in enumerate(values) if value is not None]  # as of a number
        return self._put(rows[kept], np.array([values[place] is True for place in kept], np.bool_))

    @override
    def _copy(self, other: BooleanColumn, there: NDArray[np.int64], rows: NDArray[np.int64]) -> bool:
        return self._put(rows, bitmap.has(other.true, there))

    def _put(self, rows: NDArray[np.int64], is_true: NDArray[np.bool_]) -> bool:
        is_different = not np.array_equal(bitmap.has(self.true, rows), is_true)
        bitmap.add(self.true, rows[is_true])
        bitmap.discard(self.true, rows[~is_true])
        return is_different

    @override
    def _grow(self, rows: int) -> None:
        self.true = _grown(self.true, rows)


class TextColumn(StoredColumn):
    """Texts by number (N,), int16 or int32, in `texts`; NO_TEXT is no value. `numbered` is a snapshot of both."""

    def __init__(self, numbers: NDArray[np.signedinteger], texts: Texts) -> None:
        # replaced together, so that concurrent readers see both
        self.numbered: tuple[NDArray[Any], Texts] = numbers.astype(_dtype_for(texts), copy=False), texts
        self.known = pack(numbers != NO_TEXT)

    @classmethod
    def of(cls, values: Sequence[str | None] | pl.Series) -> TextColumn:
        """Return the column of these values."""
        texts = pl.Series(values, dtype=pl.String)
        different = texts.drop_nulls().unique(maintain_order=True)
        numbers = texts.cast(pl.Enum(different)).to_physical().cast(pl.Int32).fill_null(NO_TEXT)
        return cls(numbers.to_numpy(writable=True), Texts(different))

    @classmethod
    def empty(cls, rows: int) -> TextColumn:
        """Return a column without values, which takes no memory until one is set."""
        return cls(np.broadcast_to(np.int16(NO_TEXT), rows), Texts())

    @property
    def numbers(self) -> NDArray[Any]:
        """The number of each row's text."""
        return self.numbered[0]

    @property
    def texts(self) -> Texts:
        """The texts by number."""
        return self.numbered[1]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The number of characters of each text: (N,)."""
        numbers, texts = self.numbered
        sizes: NDArray[np.int64] = np.append(texts.series.str.len_chars().to_numpy(), 0).astype(np.int64)[numbers]
        return sizes

    def rows_with(self, is_wanted: NDArray[np.bool_]) -> Bitmap:
        """Return the rows whose text has a wanted number; `is_wanted` has a last element for rows without a text."""
        return rows_of_numbers(is_wanted, self.numbers)

    def by_label(self) -> LabelSnapshot:
        """Return a snapshot of the items by text."""
        return LabelSnapshot(self.numbers.copy(), len(self.texts), None)

    def match_levels(self, search: Search, *, with_typos: bool) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Return how well texts match a search: the rows (M,) that have a text, and levels of `StringTable` (M,)."""
        numbers, texts = self.numbered
        rows = np.flatnonzero(numbers != NO_TEXT)
        chosen = numbers[rows]  # before the texts, which others may extend
        return rows, texts.match_levels(search, with_typos=with_typos)[chosen]

    def values_at(self, rows: NDArray[np.int64]) -> list[str | None]:
        """Return the values of some rows."""
        numbers, texts = self.numbered
        wanted = numbers[rows].astype(np.int64)
        has_text = wanted != NO_TEXT
        found = iter(texts.at(wanted[has_text]))
        return [next(found) if has else None for has in has_text.tolist()]

    @override
    def value(self, row: int) -> str | None:
        numbers, texts = self.numbered
        number = int(numbers[row])
        return None if number == NO_TEXT else texts[number]

    @override
    def _set(self, rows: NDArray[np.int64], values: Sequence[Any]) -> bool:
        has_text = [value is not None for value in values]
        given = np.full(len(rows), NO_TEXT, np.int64)
        given[has_text] = self.texts.add_all([value for value in values if value is not None])
        return self._put(rows, given)

    @override
    def _copy(self, other: TextColumn, there: NDArray[np.int64], rows: NDArray[np.int64]) -> bool:
        numbers, texts = other.numbered
        theirs = numbers[there]
        has_text = theirs != NO_TEXT
        used = np.unique(theirs[has_text])
        own = self.texts.add_all(texts.at(used))
        given = np.full(len(rows), NO_TEXT, np.int64)
        given[has_text] = own[np.searchsorted(used, theirs[has_text])]
        return self._put(rows, given)

    def _put(self, rows: NDArray[np.int64], given: NDArray[np.int64]) -> bool:
        numbers = self.numbers.astype(_dtype_for(self.texts), copy=False)
        if not numbers.flags.writeable:
            numbers = numbers.copy()
        is_different = not np.array_equal(numbers[rows], given)
        numbers[rows] = given
        self.numbered = numbers, self.texts
        if self.texts.has_many_new:
            self._drop_unused()
        return is_different

    @override
    def _grow(self, rows: int) -> None:
        numbers = self.numbers
        new = np.full(rows - len(numbers), NO_TEXT, numbers.dtype)
        self.numbered = np.concatenate([numbers, new]), self.texts

    def _drop_unused(self) -> None:
        is_used = np.bincount(self.numbers.astype(np.int64) + 1, minlength=len(self.texts) + 1)[1:] > 0
        texts = self.texts.without_unused(is_used)
        if texts is self.texts:
            return
        renumbered = np.append(np.cumsum(is_used) - 1, NO_TEXT).astype(_dtype_for(texts))
        self.numbered = renumbered[self.numbers], texts


def _dtype_for(texts: Texts) -> type[np.int16 | np.int32]:
    """Return the narrowest type that can number every text."""
    return np.int16 if len(texts) <= np.iinfo(np.int16).max else np.int32


def _grown(items: Bitmap, rows: int) -> Bitmap:
    grown = bitmap.empty(rows)
    grown[: len(items)] = items
    return grown
