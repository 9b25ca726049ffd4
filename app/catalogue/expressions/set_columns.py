"""Columns of sets of texts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from copy import copy
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from app.catalogue.expressions.columns import NO_TEXT, Column, StoredColumn, TextColumn
from app.catalogue.expressions.labels import LabelSnapshot, rows_of_numbers, sets_with_any
from app.catalogue.expressions.texts import Texts
from model.artifact.string_table import StringTable, ends_of
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.diversity import NO_LABELS, ItemLabels

SURROGATES = range(0xD800, 0xE000)  # not characters
ONE_LETTER = 1 << 20  # labels that one letter represents; each other one takes two, of which the first is none of these


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
    """Sets, each stored once as a text whose characters represent labels.

    Labels that are no longer in use are dropped from time to time, which changes the numbers of all others.
    """

    def __init__(self, rows: int) -> None:
        self._parts = Texts(), TextColumn.empty(rows)  # the labels and the sets, replaced together
        self._decoded: tuple[Texts, int, ItemLabels] = self._sets.texts, 0, NO_LABELS
        self.known = bitmap.empty(rows)  # not that of the sets, which a reader's view keeps

    @classmethod
    def of(cls, values: Sequence[Sequence[str] | None]) -> TextSetColumn:
        """Return the column of these values."""
        column = cls(len(values))
        column.set(np.arange(len(values)), values)
        return column

    @property
    @override
    def labels(self) -> Texts:  # type: ignore[override]
        return self._parts[0]

    @property
    def _sets(self) -> TextColumn:
        return self._parts[1]

    def with_fixed_labels(self) -> TextSetColumn:
        """Return a view of this column for one reader: until labels are dropped, it shows the newest values."""
        self._labels_of(self._sets.texts)  # not once for each reader
        view = copy(self)
        view.known = view._sets.known  # noqa: SLF001 - that of the values which the view shows
        return view

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
        labels, column = self._parts
        letters = column.value(row)
        return None if letters is None else tuple(labels.at(decoded_sets([letters]).labels))

    def values_at(self, rows: NDArray[np.int64]) -> list[tuple[str, ...] | None]:
        """Return the values of some rows; equal values are the same object."""
        labels, column = self._parts
        numbers, texts = column.numbered
        wanted = numbers[rows].tolist()
        different = [number for number in set(wanted) if number != NO_TEXT]
        sets = decoded_sets(texts.at(np.array(different, np.int64)))
        found = labels.at(sets.labels)
        parts = [tuple(found[begin:end]) for begin, end in pairwise(sets.ends.tolist())]
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
        column = self._sets
        before = column.changes
        column.set(rows, encoded)
        if self.labels.has_many_new:
            self._drop_unused()
        return column.changes != before

    @override
    def _grow(self, rows: int) -> None:
        self._sets.grow(rows)

    def _drop_unused(self) -> None:
        """Drop unused labels and sets. Readers may still use the arrays from before, so these stay as they are."""
        labels, column = self._parts
        numbers, texts = column.numbered
        sets = self._labels_of(texts)
        is_set_used = np.bincount(numbers.astype(np.int64) + 1, minlength=len(texts) + 1)[1:] > 0
        used = ItemLabels.gathered(sets.labels, sets.ends[:-1][is_set_used], np.diff(sets.ends)[is_set_used])
        is_used = np.zeros(len(labels), np.bool_)
        is_used[used.labels] = True
        kept = labels.without_unused(is_used)
        if kept is labels:
            return
        encoded = Texts(encoded_sets(ItemLabels((np.cumsum(is_used) - 1)[used.labels], used.ends)))
        self._parts = kept, TextColumn(np.append(np.cumsum(is_set_used) - 1, NO_TEXT)[numbers], encoded)

    def _encoded(self, sets: Collection[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
        """Return the encoding of each set of distinct labels."""
        numbers = self.labels.add_all([*chain.from_iterable(sets)])
        ends = np.cumsum([0, *map(len, sets)])
        return dict(zip(sets, encoded_sets(ItemLabels(numbers, ends)), strict=True))

    def _labels_of(self, sets: Texts) -> ItemLabels:
        """Return the numbers of the labels of each distinct set; sets decoded before are not decoded again."""
        texts, known, labels = self._decoded
        if texts is not sets:
            known, labels = 0, NO_LABELS
        if known < len(sets):
            new = sets.at(np.arange(known, len(sets)))
            labels = labels.followed_by(decoded_sets(new))
            self._decoded = sets, known + len(new), labels
        return labels


def encoded_sets(sets: ItemLabels) -> StringTable:
    """Return the letters of each set's labels, in UTF-8."""
    high, low = np.divmod(sets.labels, ONE_LETTER)
    is_letter = np.array([high > 0, high >= 0]).T
    letters = np.array([ONE_LETTER + high - 1, low]).T[is_letter]
    points = letters + len(SURROGATES) * (letters >= SURROGATES.start)
    buffer = np.frombuffer(points.astype("<u4").tobytes().decode("utf-32-le").encode(), np.uint8)
    sizes = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)  # in bytes
    ends = ends_of(sizes)[ends_of(is_letter.sum(1))[sets.ends]]
    return StringTable(buffer, ends)


def decoded_sets(sets: Sequence[str]) -> ItemLabels:
    """Return the numbers of each encoded set's labels."""
    points = np.frombuffer("".join(sets).encode("utf-32-le"), np.uint32).astype(np.int64)
    numbers, ends = points - len(SURROGATES) * (points >= SURROGATES.stop), np.cumsum([0, *map(len, sets)])
    is_high = numbers >= ONE_LETTER
    if is_high.any():  # very rare
        low = np.flatnonzero(is_high) + 1
        numbers[low] += ONE_LETTER * (numbers[low - 1] - ONE_LETTER + 1)
        numbers, ends = numbers[~is_high], ends - np.append(0, np.cumsum(is_high))[ends]
    return ItemLabels(numbers, ends)
