"""The categories of items: those of a model, and those that replace them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from app.catalogue.expressions.columns import pack
from app.catalogue.expressions.labels import sets_with_any
from app.catalogue.expressions.set_columns import SetColumn, TextSetColumn
from app.catalogue.expressions.texts import Texts
from model.artifact.string_table import Labels
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.diversity import ItemLabels

FEW_LABELS = 64  # up to here, adding the items of each label is faster than a pass over the labels of all items
CACHE_BYTES, MAX_CACHED = 1 << 25, 1_024  # for bitmaps of recently requested categories
CACHED_NAMES = 20  # longer lists are rarely requested again


class CategoryColumn(SetColumn):
    """The categories of N items by row. Any thread may read while another one replaces some.

    Categories that the model lacks are numbered after the model's own.
    """

    def __init__(self, of_model: Labels, replaced: TextSetColumn) -> None:
        self.known = ~bitmap.empty(len(of_model))
        self._of_model = of_model
        self._replaced = replaced  # replaces the model's categories of the items that it contains
        self._sets = ItemLabels(of_model.codes, of_model.ends)  # type: ignore[arg-type]
        sets_with_any(
            np.zeros(1, np.bool_), ItemLabels(self._sets.labels[:0], self._sets.ends[:1])
        )  # compiles the loop
        # this column's number of each label in `replaced`, and its labels by number; both of that table of labels
        self._numbers: tuple[Texts, NDArray[np.int64]] = replaced.labels, np.zeros(0, np.int64)
        self._labels: tuple[Texts, Texts] | None = None
        kept = min(max(8, CACHE_BYTES // 3 // (len(self.known) * 8 + 1)), MAX_CACHED)
        self._rows_with = lru_cache(kept)(self._build_rows_with)
        self._rows_with_all = lru_cache(kept)(self._build_rows_with_all)
        self._rows_of_model = lru_cache(kept)(self._build_rows_of_model)

    @property
    @override
    def changes(self) -> int:  # type: ignore[override]
        return self._replaced.changes

    def with_fixed_labels(self) -> CategoryColumn:
        """Return a view of this column whose numbers of categories do not change, for one reader."""
        self._numbering()  # not once for each reader
        column = copy(self)
        column._replaced = self._replaced.with_fixed_labels()  # noqa: SLF001
        return column

    @override
    def value(self, row: int) -> tuple[str, ...]:
        replaced = self._replaced.value(row)
        return self._of_model[row] if replaced is None else replaced

    def values_at(self, rows: NDArray[np.int64]) -> list[tuple[str, ...]]:
        """Return the categories of some items."""
        of_model, replaced = self._of_model.at(rows), self._replaced.values_at(rows)
        return [own if new is None else new for own, new in zip(of_model, replaced, strict=True)]

    @override
    def rows_with(self, text: str) -> Bitmap:
        return self.rows_with_names([text])

    def rows_with_names(self, names: Sequence[str]) -> Bitmap:
        """Return the items that have at least one of the categories. The bitmap is shared: do not change it."""
        if len(names) > CACHED_NAMES:
            return self._build_rows_with(names, 0)
        return self._rows_with(tuple(names), self._replaced.changes)

    def rows_with_all_names(self, names: Sequence[str]) -> Bitmap:
        """Return the items that have all of these distinct categories, at least one; the bitmap is shared, too."""
        if len(names) > CACHED_NAMES:
            return self._build_rows_with_all(names, 0)
        return self._rows_with_all(tuple(names), self._replaced.changes)

    @override
    def rows_with_any(self, is_wanted: NDArray[np.bool_]) -> Bitmap:
        return self.rows_with_labels(np.flatnonzero(is_wanted))

    def rows_with_labels(self, labels: NDArray[np.int64]) -> Bitmap:
        """Return the items that have at least one of the categories with these numbers."""
        of_model = labels[labels < len(self._of_model.names)]
        items = self._with_few(of_model) if len(of_model) <= FEW_LABELS else self._with_many(of_model)
        if not self._replaced.changes:
            return items
        own = np.flatnonzero(np.isin(self._numbering(), labels))
        is_replaced = self._replaced.known.copy()
        items &= ~is_replaced
        if len(own):
            items |= self._replaced.by_label().rows_with_labels(own) & is_replaced
        return items

    def _with_few(self, of_model: NDArray[np.int64]) -> Bitmap:
        items = bitmap.empty(len(self._of_model))
        for number in of_model.tolist():
            rows = self._of_model.items_of(number)
            if len(rows) > len(items):  # adding a bitmap that is kept takes an operation per word
                items |= self._rows_of_model(number)
            else:
                bitmap.add(items, rows.astype(np.int64))
        return items

    def _with_many(self, of_model: NDArray[np.int64]) -> Bitmap:
        is_wanted = np.zeros(len(self._of_model.names), np.bool_)
        is_wanted[of_model] = True
        return pack(sets_with_any(is_wanted, self._sets)[:-1])

    def rows_with_all_labels(self, labels: NDArray[np.int64]) -> Bitmap:
        """Return the items that have all of the categories with these distinct numbers, at least one."""
        items = bitmap.empty(len(self._of_model))
        if labels.max() < len(self._of_model.names):
            items = np.bitwise_and.reduce([self._rows_of_model(number) for number in labels.tolist()])
        if not self._replaced.changes:
            return items
        is_replaced = self._replaced.known.copy()
        items &= ~is_replaced
        own = np.flatnonzero(np.isin(self._numbering(), labels))
        if len(own) == len(labels):
            items |= self._replaced.rows_with_all(own) & is_replaced
        return items

    @property
    @override
    def labels(self) -> Texts:  # type: ignore[override]
        numbers, replaced = self._numbering(), self._replaced.labels
        if self._labels is None or self._labels[0] is not replaced:
            self._labels = replaced, Texts(self._of_model.names)
        labels = self._labels[1]
        labels.add_all(replaced.at(np.flatnonzero(numbers >= len(labels))))
        return labels

    @property
    @override
    def sizes(self) -> NDArray[np.int64]:
        ends = self._of_model.ends.astype(np.int64)
        is_replaced = bitmap.to_mask(self._replaced.known, len(self._of_model))
        return np.where(is_replaced, self._replaced.sizes, np.diff(ends))

    def of_rows(self, rows: NDArray[np.int64]) -> ItemLabels:
        """Return the numbers of the items' categories."""
        of_model = ItemLabels(*self._of_model.of_rows(rows))
        if not self._replaced.changes:
            return of_model
        places = np.flatnonzero(bitmap.has(self._replaced.known, rows))
        if not len(places):
            return of_model
        replaced = self._replaced.by_label(rows[places]).of_rows(np.arange(len(places)))
        begins, sizes = of_model.ends[:-1].copy(), np.diff(of_model.ends)
        begins[places] = len(of_model.labels) + replaced.ends[:-1]
        sizes[places] = np.diff(replaced.ends)
        labels = np.concatenate([of_model.labels, self._numbering()[replaced.labels]])
        return ItemLabels.gathered(labels, begins, sizes)

    def _numbering(self) -> NDArray[np.int64]:
        """Return this column's number of each label in `replaced`."""
        labels = self._replaced.labels
        numbered, numbers = self._numbers
        if numbered is not labels:
            numbers = numbers[:0]
        if len(numbers) < len(labels):
            added = labels.at(np.arange(len(numbers), len(labels)))
            own = [self._of_model.number(label) for label in added]
            new = np.array([-1 if number is None else number for number in own], np.int64)
            is_new = new < 0
            new[is_new] = max(len(self._of_model.names), numbers.max(initial=-1) + 1) + np.arange(is_new.sum())
            numbers = np.concatenate([numbers, new])
            self._numbers = labels, numbers
        return numbers

    def _build_rows_of_model(self, number: int) -> Bitmap:
        """Return the items that have the category in the model, including those whose categories were replaced."""
        items = bitmap.empty(len(self._of_model))
        bitmap.add(items, self._of_model.items_of(number).astype(np.int64))
        return items

    def _build_rows_with(self, names: Sequence[str], _changes: int) -> Bitmap:
        column = self.with_fixed_labels()
        return column.rows_with_labels(column.numbers_of(names))

    def _build_rows_with_all(self, names: Sequence[str], _changes: int) -> Bitmap:
        column = self.with_fixed_labels()
        labels = column.numbers_of(names)
        return column.rows_with_all_labels(labels) if len(labels) == len(names) else bitmap.empty(len(self._of_model))

    def numbers_of(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Return the numbers of the known categories among these names, in order."""
        numbers = [self._number_of(name) for name in names]
        return np.array([number for number in numbers if number is not None], np.int64)

    def _number_of(self, name: str) -> int | None:
        number, own = self._of_model.number(name), self._replaced.labels.number(name)
        if number is not None or own is None:
            return number
        numbers = self._numbering()
        return int(numbers[own]) if own < len(numbers) else None  # it is just being added
