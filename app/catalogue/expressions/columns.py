"""Columns: one property of all items each, by row, without an object for any item.

A number or a time takes 8 bytes an item, a text or a set 2, or 4 where there are more than 32,767 different ones, and
each different text and set is kept once. A boolean, and which items have a value at all, take a bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray
from typing_extensions import override

from app.catalogue.expressions.labels import LabelSnapshot, rows_of_numbers, sets_with_any
from app.catalogue.expressions.texts import Texts
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.diversity import ItemLabels

ItemValue: TypeAlias = "str | float | bool | tuple[str, ...]"
"""A value of a property; a time is a number of microseconds since the epoch."""

ItemType: TypeAlias = Literal["text", "number", "boolean", "time", "set"]

NO_TEXT = -1
SURROGATES = range(0xD800, 0xE000)  # are no characters
LABELS = 0x110000 - len(SURROGATES)  # different ones in a column of sets


def pack(mask: NDArray[np.bool_]) -> Bitmap:
    """Return the bitmap of the rows at which the mask is true."""
    packed = bitmap.empty(len(mask))
    found = np.packbits(mask, bitorder="little")
    packed.view(np.uint8)[: len(found)] = found
    return packed


class Column(ABC):
    """The values of one property.

    known    the rows that have a value
    changes  how often a value was set
    """

    known: Bitmap
    changes = 0

    def set(self, rows: NDArray[np.int64], values: Sequence[Any]) -> None:
        """Give different rows new values; None takes a value away."""
        if not len(rows):
            return
        has_value = np.array([value is not None for value in values], np.bool_)
        self._set(rows, values)
        bitmap.add(self.known, rows[has_value])
        bitmap.discard(self.known, rows[~has_value])
        self.changes += 1

    def value(self, row: int) -> ItemValue | None:
        """Return the value of one row."""
        return self._value(row) if bitmap.has(self.known, np.array([row]))[0] else None

    @abstractmethod
    def _set(self, rows: NDArray[np.int64], values: Sequence[Any]) -> None: ...

    @abstractmethod
    def _value(self, row: int) -> ItemValue: ...


class NumberColumn(Column):
    """Numbers (N,), float64, or times (N,), int64, in microseconds since the epoch."""

    def __init__(self, rows: int, dtype: type[np.float64 | np.int64] = np.float64) -> None:
        self.values: NDArray[Any] = np.zeros(rows, dtype)
        self.known = bitmap.empty(rows)

    @override
    def _set(self, rows: NDArray[np.int64], values: Sequence[Any]) -> None:
        self.values[rows] = [0 if value is None else value for value in values]

    @override
    def _value(self, row: int) -> float:
        number: float = self.values[row].item()
        return number


class BooleanColumn(Column):
    """Booleans: the rows where they are true."""

    def __init__(self, rows: int) -> None:
        self.true = bitmap.empty(rows)
        self.known = bitmap.empty(rows)

    @override
    def _set(self, rows: NDArray[np.int64], values: Sequence[Any]) -> None:
        is_true = np.array([value is True for value in values], np.bool_)
        bitmap.add(self.true, rows[is_true])
        bitmap.discard(self.true, rows[~is_true])

    @override
    def _value(self, row: int) -> bool:
        return bool(bitmap.has(self.true, np.array([row]))[0])


class TextColumn(Column):
    """Texts by number (N,), int16 or int32, in `texts`; NO_TEXT is no value. `numbered` is both, of one moment."""

    def __init__(self, numbers: NDArray[np.signedinteger], texts: Texts) -> None:
        # replaced together, for whoever reads meanwhile
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
        """Return a column without any value."""
        return cls(np.full(rows, NO_TEXT, np.int16), Texts())

    @property
    def numbers(self) -> NDArray[Any]:
        """The number of each row's text."""
        return self.numbered[0]

    @property
    def texts(self) -> Texts:
        """The texts by number."""
        return self.numbered[1]

    def rows_with(self, is_wanted: NDArray[np.bool_]) -> Bitmap:
        """Return the rows whose text has a wanted number; `is_wanted` has one more element, for rows without a text."""
        return rows_of_numbers(is_wanted, self.numbers)

    def by_label(self) -> LabelSnapshot:
        """Return the items as they are now, by their texts."""
        return LabelSnapshot(self.numbers.copy(), len(self.texts), None)

    @override
    def _set(self, rows: NDArray[np.int64], values: Sequence[Any]) -> None:
        has_text = [value is not None for value in values]
        given = np.full(len(rows), NO_TEXT, np.int64)
        given[has_text] = self.texts.add_all([value for value in values if value is not None])
        numbers = self.numbers.astype(_dtype_for(self.texts), copy=False)
        numbers[rows] = given
        self.numbered = numbers, self.texts
        if self.texts.has_many_new:
            self._drop_unused()

    @override
    def _value(self, row: int) -> str:
        numbers, texts = self.numbered
        return texts[int(numbers[row])]

    def _drop_unused(self) -> None:
        is_used = np.bincount(self.numbers.astype(np.int64) + 1, minlength=len(self.texts) + 1)[1:] > 0
        texts = Texts(self.texts.series.filter(pl.Series(is_used)))
        renumbered = np.append(np.cumsum(is_used) - 1, NO_TEXT).astype(_dtype_for(texts))
        self.numbered = renumbered[self.numbers], texts


def _dtype_for(texts: Texts) -> type[np.int16 | np.int32]:
    """Return the narrowest type that has a number for each text."""
    return np.int16 if len(texts) <= np.iinfo(np.int16).max else np.int32


class SetColumn(Column):
    """Sets of texts.

    labels  the different texts
    """

    labels: Texts

    @abstractmethod
    def rows_with(self, text: str) -> Bitmap:
        """Return the rows whose sets have the text."""

    @abstractmethod
    def rows_with_any(self, is_wanted: NDArray[np.bool_]) -> Bitmap:
        """Return the rows whose sets have a label with a wanted number."""

    @property
    @abstractmethod
    def sizes(self) -> NDArray[np.int64]:
        """How many texts each set has: (N,)."""


class TextSetColumn(SetColumn):
    """Sets, each kept once, as a text whose characters stand for labels."""

    def __init__(self, rows: int) -> None:
        self.labels = Texts()
        self._sets = TextColumn.empty(rows)
        self._labels_of: tuple[Texts, int, ItemLabels] | None = None
        self.known = self._sets.known

    @classmethod
    def of(cls, values: Sequence[Sequence[str] | None]) -> TextSetColumn:
        """Return the column of these values."""
        column = cls(len(values))
        column.set(np.arange(len(values)), values)
        return column

    @override
    def rows_with(self, text: str) -> Bitmap:
        number = self.labels.number(text)
        if number is None:
            return bitmap.empty(len(self._sets.numbers))
        return self._sets.rows_with(
            np.append(self._sets.texts.series.str.contains(_letter(number), literal=True), False)
        )

    @override
    def rows_with_any(self, is_wanted: NDArray[np.bool_]) -> Bitmap:
        return self._sets.rows_with(sets_with_any(is_wanted, self._labels_of_sets()))

    def by_label(self) -> LabelSnapshot:
        """Return the items as they are now, by the texts of their sets."""
        sets = self._labels_of_sets()
        return LabelSnapshot(self._sets.numbers.copy(), len(sets.ends) - 1, sets)

    @property
    @override
    def sizes(self) -> NDArray[np.int64]:
        sizes: NDArray[np.int64] = np.append(np.diff(self._labels_of_sets().ends), 0)[self._sets.numbers]
        return sizes

    @override
    def _set(self, rows: NDArray[np.int64], values: Sequence[Any]) -> None:
        self._sets.set(rows, [None if value is None else self._encoded(value) for value in values])

    @override
    def _value(self, row: int) -> tuple[str, ...]:
        numbers = _numbers_of(self._sets.texts[int(self._sets.numbers[row])])
        return tuple(self.labels[number] for number in numbers.tolist())

    def _encoded(self, labels: Sequence[str]) -> str:
        numbers = (self.labels.add(label) for label in dict.fromkeys(labels))
        return "".join(_letter(number) for number in numbers if number < LABELS)

    def _labels_of_sets(self) -> ItemLabels:
        """Return the numbers of the labels of each different set."""
        texts, found = self._sets.texts, self._labels_of
        if found is None or found[:2] != (texts, len(texts)):
            sets = texts.series
            ends = np.concatenate([[0], np.cumsum(sets.str.len_chars().to_numpy().astype(np.int64))])
            labels = ItemLabels(_numbers_of(sets.str.join().item() or ""), ends)
            found = self._labels_of = texts, len(texts), labels
        return found[2]


def _letter(number: int) -> str:
    return chr(number if number < SURROGATES.start else number + len(SURROGATES))


def _numbers_of(letters: str) -> NDArray[np.int64]:
    points = np.frombuffer(letters.encode("utf-32-le"), np.uint32).astype(np.int64)
    return points - len(SURROGATES) * (points >= SURROGATES.stop)
