"""A generation's catalogue with the tenant's changes of items applied."""

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
from model.artifact.item_table import ItemTable
from model.artifact.string_table import NO_MATCH, StringTable
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.diversity import Categories
from storage.records import ItemEntry


class LiveCatalogue(TrainedCatalogue):
    """A catalogue that changes while it serves.

    Any thread may read while another one catches up: at any moment each item is as it was before or as it is after.
    """

    def __init__(self, items: ItemTable, overrides: ItemOverrides) -> None:
        self._overrides = overrides
        self._applied_changes = 0
        self._recategorised: dict[int, tuple[str, ...]] = {}
        self._is_recategorised = bitmap.empty(len(items))  # of these items, the model's categories do not count
        self._recategorised_rows: dict[str, Rows] = {}  # by category
        self._new_categories: dict[str, int] = {}  # categories that the model lacks, numbered after those that it has
        self._unlearned: dict[str, ItemEntry] = {}  # items that the model has not learned
        super().__init__(items)  # last, as it calls methods that are overridden here
        bitmap.discard(self.unavailable, NO_ROWS)  # compiles it now, not at the first change
        self.catch_up()

    def catch_up(self) -> None:
        """Apply all overrides that this process has read so far."""
        change_count, entries = self._overrides.change_count, self._overrides.changed_since(self._applied_changes)
        self._apply(entries)
        self._applied_changes = change_count

    def item(self, item_id: str) -> Item | None:
        """Return the item as it is now; None when neither the model nor the tenant knows it."""
        row = self.row_of.get(item_id)
        if row is not None:
            return self._item(row)
        entry = self._unlearned.get(item_id)
        return None if entry is None else _unlearned_item(entry)

    @override
    def in_category(self, category: str) -> Bitmap:
        items = super().in_category(category)
        if not self._recategorised:
            return items
        items = items & ~self._is_recategorised
        bitmap.add(items, self._recategorised_rows.get(category, NO_ROWS))
        return items

    @property
    @override
    def category_count(self) -> int:
        return super().category_count + len(self._new_categories)

    @override
    def category_name(self, number: int) -> str:
        learned = super().category_count
        return super().category_name(number) if number < learned else list(self._new_categories)[number - learned]

    @override
    def categories_of(self, rows: Rows) -> Categories:
        of_model = super().categories_of(rows)
        if not self._recategorised:
            return of_model
        changed = bitmap.has(self._is_recategorised, rows)
        if not changed.any():
            return of_model
        parts = np.split(of_model.labels, of_model.ends[1:-1])
        for position in np.flatnonzero(changed).tolist():
            names = self._recategorised.get(int(rows[position]), ())
            parts[position] = np.array([self._category_number(name) for name in names], np.int64)
        ends = np.cumsum([0, *map(len, parts)])
        return Categories(np.concatenate(parts), ends)

    def _category_number(self, category: str) -> int:
        number = self._categories.number(category)
        return self._new_categories[category] if number is None else number

    @override
    def popular_items(self, k: int, excluded: Bitmap | None = None) -> list[ScoredItem]:
        return super().popular_items(k, self.unavailable if excluded is None else excluded | self.unavailable)

    @override
    def search(self, query: str, limit: int) -> list[Item]:
        """Return matching items as the trained catalogue does, then matching items that no model has learned."""
        learned = super().search(query, limit)
        text = query.strip().casefold()
        unlearned = list(self._unlearned.values()) if len(learned) < limit else []
        levels = _match_levels([(entry.title or "", entry.item_id) for entry in unlearned], text).tolist()
        matches = [(level, entry.item_id, entry) for level, entry in zip(levels, unlearned, strict=True)]
        best = sorted((match for match in matches if match[0] < NO_MATCH), key=lambda match: match[:2])
        return learned + [_unlearned_item(entry) for _, _, entry in best[: limit - len(learned)]]

    @override
    def _match_levels(self, text: str) -> NDArray[np.uint8]:
        levels = super()._match_levels(text)
        retitled = list(self._retitled.items())
        rows = _rows(row for row, _ in retitled)
        levels[rows] = _match_levels([(title, self.item_ids[row]) for row, title in retitled], text)
        return levels

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
            self._unlearned.update({entry.item_id: entry for entry in entries if entry.item_id not in self.row_of})
        self._retitled.update({row: entry.title for row, entry in known if entry.title is not None})
        self._apply_categories({row: entry.categories for row, entry in known if entry.categories is not None})
        bitmap.add(self.unavailable, _rows(row for row, entry in known if entry.available is False))
        bitmap.discard(self.unavailable, _rows(row for row, entry in known if entry.available))

    def _apply_categories(self, categories: dict[int, tuple[str, ...]]) -> None:
        for name in chain.from_iterable(categories.values()):  # before any thread can look its number up
            if self._categories.number(name) is None:
                self._new_categories.setdefault(name, super().category_count + len(self._new_categories))
        removed, added = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
        for row, names in categories.items():
            before = self._recategorised.get(row, ())
            for name in set(before).difference(names):
                removed[name].append(row)
            for name in set(names).difference(before):
                added[name].append(row)
        self._recategorised.update(categories)
        bitmap.add(self._is_recategorised, _rows(categories))
        for name in removed.keys() | added.keys():
            kept = np.setdiff1d(self._recategorised_rows.get(name, NO_ROWS), _rows(removed[name]), assume_unique=True)
            self._recategorised_rows[name] = np.concatenate([kept, _rows(added[name])])


def _rows(rows: Iterable[int]) -> Rows:
    return np.fromiter(rows, np.int64)


def _unlearned_item(entry: ItemEntry) -> Item:
    return Item(
        item_id=entry.item_id,
        title=entry.title or "",
        categories=list(entry.categories or ()),
        available=entry.available is not False,
        known=False,
    )


def _match_levels(titles_and_ids: Sequence[tuple[str, str]], text: str) -> NDArray[np.uint8]:
    """Return how well the title or the id matches, whichever matches better."""
    titles, item_ids = (StringTable.of(pair[n] for pair in titles_and_ids) for n in range(2))
    return np.minimum(titles.match_levels(text), item_ids.match_levels(text))
