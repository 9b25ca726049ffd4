"""Columns of sets of texts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from app.catalogue.expressions.columns import NO_TEXT, Column, StoredColumn, TextColumn
from app.catalogue.expressions.labels import LabelSnapshot, rows_of_numbers, sets_with_any
from app.catalogue.expressions.texts import Texts
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.diversity import ItemLabels

SURROGATES = range(0xD800, 0xE000)  # not characters
LABELS = 0x110000 - len(SURROGATES)  # distinct labels that a column of sets can have
NO_LABELS = ItemLabels(np.zeros(0, np.int64), np.zeros(1, np.int64))


class SetColumn(Column):
    """Sets of texts.

    labels  the distinct texts
    """

    labels: Texts

    @abstractmethod
    def rows_with(self, text: str) -> Bitmap:
        """Return the rows whose sets contain the text."""

    @abstractmethod
    def rows_with_any(self, is_wanted: NDArray[np.bool_]) -> Bitmap:
        """Return the rows whose sets contain a label with a wanted number."""

    @property
    @abstractmethod
    def sizes(self) -> NDArray[np.int64]:
        """The number of texts in each set: (N,)."""


class TextSetColumn(SetColumn, StoredColumn):
    """Sets, each stored once as a text whose characters represent labels."""

    def __init__(self, rows: int) -> None:
        self.labels = Texts()
        self._sets = TextColumn.empty(rows)
        self._decoded: tuple[Texts, int, ItemLabels] = self._sets.texts, 0, NO_LABELS
        self.known = self._sets.known

    @classmethod
    def of(cls, values: Sequence[Sequence[str] | None]) -> TextSetColumn:
        """Return the column of these values."""
        column = cls(len(values))
        column.set(np.arange(len(values)), values)
        return column

    @override
    def rows_with(self, text: str) -> Bitmap:
        is_wanted = np.zeros(len(self.labels), np.bool_)
        number = self.labels.number(text)
        if number is None:
            return bitmap.empty(len(self._sets.numbers))
        is_wanted[number] = True
        return self.rows_with_any(is_wanted)

    @override
    def rows_with_any(self, is_wanted: NDArray[np.bool_]) -> Bitmap:
        return self._sets.rows_with(sets_with_any(is_wanted, self._labels_of(self._sets.texts)))

    def rows_with_all(self, labels: NDArray[np.int64]) -> Bitmap:
        """Return the rows whose sets contain each of these distinct labels; thread-safe."""
        numbers, texts = self._sets.numbered
        numbers = numbers.copy()  # before the sets, which others may extend
        sets = self._labels_of(texts)
        found = np.concatenate([[0], np.cumsum(np.isin(sets.labels, labels))])[sets.ends]
        return rows_of_numbers(np.append(np.diff(found) == len(labels), False), numbers)

    def by_label(self, rows: NDArray[np.int64] | None = None) -> LabelSnapshot:
        """Return a snapshot of the items, or those in some rows, by the texts of their sets; thread-safe."""
        numbers, texts = self._sets.numbered
        numbers = numbers.copy() if rows is None else numbers[rows]  # before the sets, which others may extend
        sets = self._labels_of(texts)
        return LabelSnapshot(numbers, len(sets.ends) - 1, sets)

    @property
    @override
    def sizes(self) -> NDArray[np.int64]:
        numbers, texts = self._sets.numbered
        sizes: NDArray[np.int64] = np.append(np.diff(self._labels_of(texts).ends), 0)[numbers]
        return sizes

    @override
    def value(self, row: int) -> tuple[str, ...] | None:
        letters = self._sets.value(row)
        return None if letters is None else self._texts_of(letters)

    def values_at(self, rows: NDArray[np.int64]) -> list[tuple[str, ...] | None]:
        """Return the values of some rows; equal values are the same object."""
        numbers, texts = self._sets.numbered
        wanted = numbers[rows].tolist()
        different = [number for number in set(wanted) if number != NO_TEXT]
        sets = texts.at(np.array(different, np.int64))
        labels = self.labels.at(_numbers_of("".join(sets)))
        ends = accumulate(map(len, sets), initial=0)
        parts = [tuple(labels[begin:end]) for begin, end in pairwise(ends)]
        values: dict[int, tuple[str, ...] | None] = dict(zip(different, parts, strict=True))
        return [values.get(number) for number in wanted]

    @override
    def _set(self, rows: NDArray[np.int64], values: Sequence[Any]) -> bool:
        sets = [None if value is None else tuple(dict.fromkeys(value)) for value in values]
        encoded = self._encoded({value for value in sets if value is not None})
        return self._put(rows, [None if value is None else encoded[value] for value in sets])

    @override
    def _copy(self, other: TextSetColumn, there: NDArray[np.int64], rows: NDArray[np.int64]) -> bool:
        return self._set(rows, other.values_at(there))

    def _put(self, rows: NDArray[np.int64], encoded: Sequence[str | None]) -> bool:
        before = self._sets.changes
        self._sets.set(rows, encoded)
        return self._sets.changes != before

    @override
    def _grow(self, rows: int) -> None:
        self._sets.grow(rows)

    def _texts_of(self, letters: str) -> tuple[str, ...]:
        return tuple(self.labels.at(_numbers_of(letters)))

    def _encoded(self, sets: Collection[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
        """Return the encoding of each set of distinct labels."""
        numbers = self.labels.add_all([*chain.from_iterable(sets)])
        letters = iter([_letter(number) if number < LABELS else "" for number in numbers.tolist()])
        return {labels: "".join(islice(letters, len(labels))) for labels in sets}

    def _labels_of(self, sets: Texts) -> ItemLabels:
        """Return the numbers of the labels of each distinct set; sets decoded before are not decoded again."""
        texts, known, labels = self._decoded
        if texts is not sets:
            known, labels = 0, NO_LABELS
        if known < len(sets):
            new = sets.at(np.arange(known, len(sets)))
            ends = np.cumsum([labels.ends[-1], *map(len, new)])
            joined = np.concatenate([labels.labels, _numbers_of("".join(new))])
            labels = ItemLabels(joined, np.concatenate([labels.ends, ends[1:]]))
            self._decoded = sets, known + len(new), labels
        return labels


def _letter(number: int) -> str:
    return chr(number if number < SURROGATES.start else number + len(SURROGATES))


def _numbers_of(letters: str) -> NDArray[np.int64]:
    points = np.frombuffer(letters.encode("utf-32-le"), np.uint32).astype(np.int64)
    return points - len(SURROGATES) * (points >= SURROGATES.stop)
