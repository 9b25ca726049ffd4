"""A generation's catalogue with the shop's changes of its items applied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from app.catalogue.item_overrides import ItemOverrides
from app.catalogue.trained_catalogue import NO_ROWS, Rows, TrainedCatalogue
from app.schemas.items import Item
from app.schemas.scored_items import ScoredItem
from model.artifact.item_table import Items
from model.artifact.string_table import NO_MATCH, StringTable
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.diversity import Categories
from storage.records import ItemEntry


class LiveCatalogue(TrainedCatalogue):
    """A catalogue that changes while it serves.

    Any thread may read while another one catches up: at any moment each item is as it was before or as it is after.
    """

    def __init__(self, items: Items, overrides: ItemOverrides) -> None:
        self._overrides = overrides
        self._mark = 0
        self._recategorised: dict[int, tuple[str, ...]] = {}
        self._is_recategorised = bitmap.empty(len(items))  # of these items, the model's categories do not count
        self._recategorised_rows: dict[str, Rows] = {}  # by category
        self._new_labels: dict[str, int] = {}  # categories that the model lacks, numbered after those that it has
        self._unknown: dict[str, ItemEntry] = {}  # items that the model has not learned
        super().__init__(items)  # last, as it calls methods that are overridden here
        bitmap.discard(self.unavailable, NO_ROWS)  # compiles it now, not at the first change
        self.catch_up()

    def catch_up(self) -> None:
        """Apply all changes that were read until now."""
        mark, entries = self._overrides.mark, self._overrides.since(self._mark)
        self._apply(entries)
        self._mark = mark

    def item(self, item_id: str) -> Item | None:
        """Return the item as it is now; None when neither the model nor the shop knows it."""
        row = self.row_of.get(item_id)
        if row is not None:
            return self._item(row)
        entry = self._unknown.get(item_id)
        return None if entry is None else _unknown_item(entry)

    @override
    def in_category(self, category: str) -> Bitmap:
        found = super().in_category(category)
        if not self._recategorised:
            return found
        found = found & ~self._is_recategorised
        bitmap.add(found, self._recategorised_rows.get(category, NO_ROWS))
        return found

    @property
    @override
    def labels(self) -> int:
        return super().labels + len(self._new_labels)

    @override
    def label(self, number: int) -> str:
        learned = super().labels
        return super().label(number) if number < learned else list(self._new_labels)[number - learned]

    @override
    def categories_of(self, rows: Rows) -> Categories:
        of_model = super().categories_of(rows)
        if not self._recategorised:
            return of_model
        changed = bitmap.has(self._is_recategorised, rows)
        if not changed.any():
            return of_model
        parts = np.split(of_model.labels, of_model.ends[1:-1])
        for place in np.flatnonzero(changed).tolist():
            names = self._recategorised.get(int(rows[place]), ())
            parts[place] = np.array([self._number(name) for name in names], np.int64)
        ends = np.cumsum([0, *map(len, parts)])
        return Categories(np.concatenate(parts), ends)

    def _number(self, category: str) -> int:
        number = self._categories.number(category)
        return self._new_labels[category] if number is None else number

    @override
    def popular(self, k: int, excluded: Bitmap | None = None) -> list[ScoredItem]:
        return super().popular(k, self.unavailable if excluded is None else excluded | self.unavailable)

    @override
    def search(self, query: str, limit: int) -> list[Item]:
        """Return matching items as the trained catalogue does, then those that only the shop knows."""
        found = super().search(query, limit)
        wanted = query.strip().casefold()
        unknown = list(self._unknown.values()) if len(found) < limit else []
        close = _closeness([(entry.title or "", entry.item_id) for entry in unknown], wanted).tolist()
        near = [(level, entry.item_id, entry) for level, entry in zip(close, unknown, strict=True)]
        closest = sorted((one for one in near if one[0] < NO_MATCH), key=lambda one: one[:2])
        return found + [_unknown_item(entry) for _, _, entry in closest[: limit - len(found)]]

    @override
    def _closeness(self, wanted: str) -> NDArray[np.uint8]:
        found = super()._closeness(wanted)
        retitled = list(self._retitled.items())
        rows = _rows(row for row, _ in retitled)
        found[rows] = _closeness([(title, self.item_ids[row]) for row, title in retitled], wanted)
        return found

    @override
    def _item(self, row: int) -> Item:
        item = super()._item(row)
        return item.model_copy(
            update={
                "title": self._retitled.get(row, item.title),
                "categories": list(self._recategorised.get(row, item.categories)),
                "available": not bitmap.has(self.unavailable, np.array([row]))[0],
            }
        )

    def _apply(self, entries: Sequence[ItemEntry]) -> None:
        known = [(row, entry) for entry in entries if (row := self.row_of.get(entry.item_id)) is not None]
        if len(known) < len(entries):
            self._unknown.update({entry.item_id: entry for entry in entries if entry.item_id not in self.row_of})
        self._retitled.update({row: entry.title for row, entry in known if entry.title is not None})
        self._categorise({row: entry.categories for row, entry in known if entry.categories is not None})
        bitmap.add(self.unavailable, _rows(row for row, entry in known if entry.available is False))
        bitmap.discard(self.unavailable, _rows(row for row, entry in known if entry.available))

    def _categorise(self, categories: dict[int, tuple[str, ...]]) -> None:
        for name in chain.from_iterable(categories.values()):  # before any thread can look its number up
            if self._categories.number(name) is None:
                self._new_labels.setdefault(name, super().labels + len(self._new_labels))
        left, joined = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
        for row, names in categories.items():
            before = self._recategorised.get(row, ())
            for name in set(before).difference(names):
                left[name].append(row)
            for name in set(names).difference(before):
                joined[name].append(row)
        self._recategorised.update(categories)
        bitmap.add(self._is_recategorised, _rows(categories))
        for name in left.keys() | joined.keys():
            stayed = np.setdiff1d(self._recategorised_rows.get(name, NO_ROWS), _rows(left[name]), assume_unique=True)
            self._recategorised_rows[name] = np.concatenate([stayed, _rows(joined[name])])


def _rows(rows: Iterable[int]) -> Rows:
    return np.fromiter(rows, np.int64)


def _unknown_item(entry: ItemEntry) -> Item:
    return Item(
        item_id=entry.item_id,
        title=entry.title or "",
        categories=list(entry.categories or ()),
        available=entry.available is not False,
        known=False,
    )


def _closeness(titles_and_ids: Sequence[tuple[str, str]], wanted: str) -> NDArray[np.uint8]:
    """Return how close the title or the id comes, whichever is closer."""
    titles, item_ids = (StringTable.of(pair[place] for pair in titles_and_ids) for place in range(2))
    return np.minimum(titles.match_levels(wanted), item_ids.match_levels(wanted))
