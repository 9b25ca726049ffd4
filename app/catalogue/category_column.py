"""The categories of items: those of a model, and those that replace them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from app.catalogue.expressions.columns import SetColumn
from app.catalogue.expressions.texts import Texts
from model.artifact.string_table import Labels
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.diversity import ItemLabels

CACHE_BYTES = 1 << 25  # of bitmaps of recently requested categories
NO_ROWS = np.zeros(0, np.int64)


class CategoryColumn(SetColumn):
    """The categories of N items by row. Any thread may read while another one sets some.

    Categories that no model has are numbered after those that it has.
    """

    def __init__(self, of_model: Labels) -> None:
        self.known = ~bitmap.empty(len(of_model))
        self._of_model = of_model
        self._replaced: NDArray[np.int32] = np.zeros(0, np.int32)  # by row, once there are any: a place in
        self._sets: list[tuple[str, ...]] = []  # the different ones
        self._set_numbers: dict[tuple[str, ...], int] = {}
        self._is_replaced = bitmap.empty(len(of_model))  # of these items, the model's categories do not count
        self._replaced_rows: dict[str, NDArray[np.int64]] = {}  # by category
        self._new: dict[str, int] = {}  # categories that the model lacks
        self._labels = Texts()
        self._rows_of_model = lru_cache(max(8, CACHE_BYTES // (len(self.known) * 8 + 1)))(self._build_rows_of_model)

    def __getitem__(self, row: int) -> tuple[str, ...]:
        """Return the categories of one item."""
        if bitmap.has(self._is_replaced, np.array([row]))[0]:
            return self._sets[int(self._replaced[row])]
        return self._of_model[row]

    @property
    def count(self) -> int:
        """The number of different categories, which are numbered from 0."""
        return len(self._of_model.names) + len(self._new)

    def name(self, number: int) -> str:
        """Return the name of the category of that number."""
        of_model = len(self._of_model.names)
        return self._of_model.names[number] if number < of_model else list(self._new)[number - of_model]

    @override
    def rows_with(self, text: str) -> Bitmap:
        """Return the items of the category, none for an unknown one. The bitmap is shared: do not change it."""
        items = self._rows_of_model(text)
        if not self._sets:
            return items
        items = items & ~self._is_replaced
        bitmap.add(items, self._replaced_rows.get(text, NO_ROWS))
        return items

    @override
    def rows_with_any(self, is_wanted: NDArray[np.bool_]) -> Bitmap:
        return self.rows_with_labels(np.flatnonzero(is_wanted))

    def rows_with_labels(self, labels: NDArray[np.int64]) -> Bitmap:
        """Return the items that have at least one of the categories of these numbers."""
        items = bitmap.empty(len(self._of_model))
        for number in labels.tolist():
            items |= self.rows_with(self.name(number))
        return items

    @property
    @override
    def labels(self) -> Texts:  # type: ignore[override]
        if len(self._labels) < self.count:
            self._labels = Texts([*self._of_model.names, *list(self._new)])
        return self._labels

    @property
    @override
    def sizes(self) -> NDArray[np.int64]:
        ends = self._of_model.ends.astype(np.int64)
        sizes = ends[1:] - ends[:-1]
        rows = np.flatnonzero(bitmap.to_mask(self._is_replaced, len(sizes)))
        sizes[rows] = np.array([len(names) for names in self._sets], np.int64)[self._replaced[rows]]
        return sizes

    def of_rows(self, rows: NDArray[np.int64]) -> ItemLabels:
        """Return the numbers of the items' categories."""
        of_model = ItemLabels(*self._of_model.of_rows(rows))
        if not self._sets:
            return of_model
        replaced = bitmap.has(self._is_replaced, rows)
        if not replaced.any():
            return of_model
        parts = np.split(of_model.labels, of_model.ends[1:-1])
        for position in np.flatnonzero(replaced).tolist():
            names = self._sets[self._replaced[rows[position]]]
            parts[position] = np.array([self._number(name) for name in names], np.int64)
        ends = np.cumsum([0, *map(len, parts)])
        return ItemLabels(np.concatenate(parts), ends)

    @override
    def _set(self, rows: NDArray[np.int64], values: Sequence[Any]) -> None:
        for name in chain.from_iterable(values):  # before any thread can look its number up
            if self._of_model.number(name) is None:
                self._new.setdefault(name, self.count)
        removed, added = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
        was_replaced = bitmap.has(self._is_replaced, rows)
        if len(rows) and not self._sets:
            self._replaced = np.zeros(len(self._of_model), np.int32)
        for row, is_known, names in zip(rows.tolist(), was_replaced.tolist(), map(tuple, values), strict=True):
            before = self._sets[self._replaced[row]] if is_known else ()
            for name in set(before).difference(names):
                removed[name].append(row)
            for name in set(names).difference(before):
                added[name].append(row)
            number = self._set_numbers.setdefault(names, len(self._sets))
            if number == len(self._sets):
                self._sets.append(names)
            self._replaced[row] = number
        bitmap.add(self._is_replaced, rows)
        for name in removed.keys() | added.keys():
            kept = np.setdiff1d(self._replaced_rows.get(name, NO_ROWS), _rows(removed[name]), assume_unique=True)
            self._replaced_rows[name] = np.concatenate([kept, _rows(added[name])])

    @override
    def _value(self, row: int) -> tuple[str, ...]:
        return self[row]

    def _number(self, category: str) -> int:
        number = self._of_model.number(category)
        return self._new[category] if number is None else number

    def _build_rows_of_model(self, category: str) -> Bitmap:
        items = bitmap.empty(len(self._of_model))
        bitmap.add(items, self._of_model.items_with(category).astype(np.int64))
        return items


def _rows(rows: Sequence[int]) -> NDArray[np.int64]:
    return np.array(rows, np.int64)
