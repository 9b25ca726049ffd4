"""A generation's catalogue with the tenant's item changes applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from app.catalogue.category_column import CategoryColumn
from app.catalogue.expressions.columns import NO_TEXT, ItemValue, TextColumn
from app.catalogue.filter_expressions import ItemExpressions
from app.catalogue.item_properties import AVAILABLE, CATEGORIES, TITLE, stored
from app.catalogue.overrides.availability import Availability
from app.catalogue.overrides.catalogue_values import CatalogueValues
from app.catalogue.overrides.item_overrides import ItemOverrides
from app.catalogue.trained_catalogue import NO_ROWS, TrainedCatalogue
from app.schemas.items import FoundItem, Item
from app.schemas.properties import shown_of_item
from app.schemas.scored_items import ScoredItem
from model.artifact.item_table import ItemTable
from model.artifact.string_table import EXACT, NO_MATCH, TYPO
from model.artifact.word_index import Levels, Search, closest
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from storage.records import ItemEntry


class LiveCatalogue(TrainedCatalogue):
    """A catalogue that changes while it serves.

    Any thread may read during `catch_up`: each item appears either as it was before or as it is after the change.
    """

    def __init__(self, items: ItemTable, overrides: ItemOverrides) -> None:
        self.values = CatalogueValues(items.ids, items.rows)
        self.properties = self.values.learned.properties
        self.expressions = ItemExpressions(self.properties)
        self._overrides = overrides
        self._applied_changes = 0
        self._availability = Availability(self.values.learned)
        self._all_titles: TextColumn | None = None  # includes the model's titles, once an expression needs them
        # called last, because it calls methods that are overridden here
        super().__init__(items, CategoryColumn(items.categories, self.values.learned.categories))
        self.unavailable = self._availability.unavailable
        self._retitled = self.values.learned.titles
        self.properties.add(TITLE, self._title_column)
        self.properties.add(CATEGORIES, lambda: self._categories)
        self.properties.add(AVAILABLE, lambda: self._availability.switched_on)
        self._availability.update(NO_ROWS)  # compile now, not at the first change
        self.catch_up()

    @property
    def is_complete(self) -> bool:
        """Whether this process has read all values of items that the tenant has set."""
        return self._overrides.is_complete

    @property
    def switched_on(self) -> Bitmap:
        """The items that the shop has not switched off, regardless of their dates."""
        return self._availability.switched_on.true

    @property
    def searched_items(self) -> int:
        """The number of items that a search covers, including unlearned ones."""
        return len(self) + len(self.values.other_ids)

    def follow_time(self) -> None:
        """Apply the availability dates that have passed."""
        with self.properties.lock:
            self._availability.follow_time()

    def catch_up(self) -> None:
        """Apply all overrides that this process has read."""
        self._overrides.bring_up_to_date(self.values)
        change_count, learned = self.values.change_count, self.values.learned
        rows = learned.changed_since(self._applied_changes)
        with self.properties.lock:
            if learned.titles.changes and self._titles_of != self._current_titles_of:
                self._titles_of = self._current_titles_of
                self._kept = -1, {}  # a title of the model may just have been cached
            if self._all_titles is not None:
                self._all_titles.set(rows, [title or None for title in self._titles_of(rows)])
            self._availability.update(rows)
        self._applied_changes = change_count

    def item(self, item_id: str) -> Item | None:
        """Return the item as it is now; None if neither the model nor the tenant has it."""
        row, entry = self.row_of.get(item_id), self.values.entry(item_id)
        if row is not None:
            (found,) = self._items(np.array([row]))
        elif entry is not None:
            (found,) = self._unlearned_items(np.array([self.values.other_ids.number(item_id)]))
        else:
            return None
        return cast("Item", {**found, **shown_of_item({} if entry is None else entry.properties)})

    def properties_of(self, item_id: str) -> Mapping[str, ItemValue]:
        """Return the item's property values; none for an unknown item."""
        row = self.row_of.get(item_id)
        if row is not None:
            (title,) = self._titles_of(np.array([row]))
            named: dict[str, ItemValue] = {TITLE: title} if title else {}
            named |= {CATEGORIES: self._categories.value(row), AVAILABLE: self._is_on(row)}
            return named | self.properties.values(row)
        entry = self.values.entry(item_id)
        return {} if entry is None else _unlearned_properties(entry)

    @override
    def popular_items(self, k: int, excluded: Bitmap | None = None) -> list[ScoredItem]:
        return super().popular_items(k, self.unavailable if excluded is None else excluded | self.unavailable)

    def available_unlearned(self, search: Search, limit: int) -> list[FoundItem]:
        """Return available, unlearned items that match, closest first."""
        found = self._find_unlearned(search, limit, with_typos=False, available=True)
        if search.may_have_typos and len(found) < limit:
            found += self._find_unlearned(search, limit - len(found), with_typos=True, available=True)
        return found

    @override
    def _find(self, search: Search, limit: int) -> list[FoundItem]:
        """Return matching items of the trained catalogue, followed by matching unlearned items."""
        learned = super()._find(search, limit)
        rest = limit - len(learned)
        return learned + self._find_unlearned(search, rest, with_typos=False) if rest else learned

    @override
    def _find_with_typos(self, search: Search, limit: int) -> list[FoundItem]:
        learned = super()._find_with_typos(search, limit)
        rest = limit - len(learned)
        return learned + self._find_unlearned(search, rest, with_typos=True) if rest else learned

    def _find_unlearned(
        self, search: Search, limit: int, *, with_typos: bool, available: bool = False
    ) -> list[FoundItem]:
        by_id = self.values.other_ids.sorted_numbers  # first, because items may be added meanwhile
        levels = self._unlearned_levels(search, len(by_id), with_typos=with_typos)
        if available:
            matching = np.flatnonzero(levels != NO_MATCH)
            levels[matching[~Availability(self.values.others).allows(matching)]] = NO_MATCH
        wanted = range(TYPO, NO_MATCH) if with_typos else range(TYPO)
        return self._unlearned_items(closest(levels, by_id, wanted, limit))

    def _unlearned_items(self, numbers: NDArray[np.integer]) -> list[FoundItem]:
        """Return unlearned items by the numbers of their ids, without those that are just being added."""
        others, rows = self.values.others, numbers.astype(np.int64)
        found = zip(self.values.other_ids.at(rows), rows.tolist(), Availability(others).allows(rows), strict=True)
        return [
            _unlearned_item(entry, is_available=bool(is_available))
            for item_id, row, is_available in found
            if (entry := others.entry(item_id, row))
        ]

    def _unlearned_levels(self, search: Search, count: int, *, with_typos: bool) -> Levels:
        """Return how well each of the first `count` unlearned items matches."""
        if not search.text:
            return np.full(count, EXACT, np.uint8)
        levels = self.values.other_ids.folded.match_levels_folded(search.text)[:count]
        titled, of_titles = self.values.others.titles.match_levels(search, with_typos=with_typos)
        are_there = titled < count
        titled, of_titles = titled[are_there], of_titles[are_there]
        levels[titled] = np.minimum(levels[titled], of_titles)
        return levels

    @override
    def _title_levels(self, search: Search, *, with_typos: bool) -> Levels:
        levels, titles = super()._title_levels(search, with_typos=with_typos), self.values.learned.titles
        if titles.changes:
            retitled, of_titles = titles.match_levels(search, with_typos=with_typos)
            levels[retitled] = of_titles
        return levels

    def _current_titles_of(self, rows: NDArray[np.integer]) -> list[str]:
        titles = self._titles.at(rows)
        all_numbers, retitled = self.values.learned.titles.numbered
        numbers = all_numbers[rows]
        for place in np.flatnonzero(numbers != NO_TEXT).tolist():
            titles[place] = retitled[int(numbers[place])]
        return titles

    @override
    def _items(self, rows: NDArray[np.signedinteger]) -> list[FoundItem]:
        items = super()._items(rows)
        for place in np.flatnonzero(bitmap.has(self.unavailable, rows)).tolist():
            items[place]["available"] = False
        return items

    def _is_on(self, row: int) -> bool:
        return bool(self._availability.switched_on.value(row))

    def _title_column(self) -> TextColumn:
        self._all_titles = TextColumn.of([title or None for title in self._titles_of(np.arange(len(self)))])
        return self._all_titles


def _unlearned_item(entry: ItemEntry, *, is_available: bool) -> FoundItem:
    return FoundItem(
        item_id=entry.item_id,
        title=entry.title or "",
        categories=list(entry.categories or ()),
        available=is_available,
        known=False,
    )


def _unlearned_properties(entry: ItemEntry) -> dict[str, ItemValue]:
    properties: dict[str, ItemValue] = {name: stored(value) for name, value in entry.properties.items()}
    if entry.title:
        properties[TITLE] = entry.title
    return properties | {CATEGORIES: entry.categories or (), AVAILABLE: entry.available is not False}
