"""A generation's catalogue with the tenant's changes of items applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from app.catalogue.availability import Availability
from app.catalogue.expressions.columns import NO_TEXT, ItemValue, TextColumn
from app.catalogue.expressions.texts import Texts
from app.catalogue.item_expressions import ItemExpressions
from app.catalogue.item_properties import AVAILABLE, CATEGORIES, TITLE, ItemProperties, stored
from app.catalogue.overrides.item_overrides import ItemOverrides
from app.catalogue.trained_catalogue import NO_ROWS, Rows, TrainedCatalogue
from app.schemas.items import FoundItem, Item
from app.schemas.properties import shown_of_item
from app.schemas.scored_items import ScoredItem
from model.artifact.item_table import ItemTable
from model.artifact.string_table import NO_MATCH, StringTable
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from storage.records import ItemEntry


class LiveCatalogue(TrainedCatalogue):
    """A catalogue that changes while it serves.

    Any thread may read while another one catches up: at any moment each item is as it was before or as it is after.
    """

    def __init__(self, items: ItemTable, overrides: ItemOverrides) -> None:
        self._overrides = overrides
        self._applied_changes = 0
        self._unlearned = Texts()  # ids of items that the model has not learned
        self._unlearned_tables = 0, StringTable.of([]), StringTable.of([])  # their titles and ids after so many changes
        self._retitled = TextColumn.empty(len(items))  # titles that replace the model's
        self.properties = ItemProperties(len(items))
        self.expressions = ItemExpressions(self.properties)
        self._availability = Availability(self.properties)
        super().__init__(items)  # last, as it calls methods that are overridden here
        self.unavailable = self._availability.unavailable
        self.properties.add(TITLE, self._title_column)
        self.properties.add(CATEGORIES, lambda: self._categories)
        self.properties.add(AVAILABLE, lambda: self._availability.switched_on)
        self._availability.update(NO_ROWS)  # compiles it now, not at the first change
        self.catch_up()

    @property
    def switched_on(self) -> Bitmap:
        """The items that the shop has not switched off, whatever their dates are."""
        return self._availability.switched_on.true

    def follow_time(self) -> None:
        """Apply the dates that have passed, from which on items are available or are not."""
        with self.properties.lock:
            self._availability.follow_time()

    def catch_up(self) -> None:
        """Apply all overrides that this process has read so far."""
        change_count = self._overrides.change_count
        pages = self._overrides.changed_since(self._applied_changes)
        for held, entries in chain([(self._overrides.held, [])], pages):
            with self.properties.lock:
                self.properties.hold(held)
                self._apply(entries)
        self._applied_changes = change_count

    def item(self, item_id: str) -> Item | None:
        """Return the item as it is now; None when neither the model nor the tenant knows it."""
        row, entry = self.row_of.get(item_id), self._overrides.entry(item_id)
        if row is not None:
            found = self._item(row)
        elif entry is not None:
            found = _unlearned_item(entry)
        else:
            return None
        return Item(**found.model_dump(), **shown_of_item({} if entry is None else entry.properties))

    def properties_of(self, item_id: str) -> Mapping[str, ItemValue]:
        """Return the properties of an item that have a value; none for an unknown item."""
        row = self.row_of.get(item_id)
        if row is not None:
            (title,) = self._titles_of(np.array([row]))
            named: dict[str, ItemValue] = {TITLE: title} if title else {}
            named |= {CATEGORIES: self._categories[row], AVAILABLE: bool(self._availability.switched_on.value(row))}
            return named | self.properties.values(row)
        entry = self._overrides.entry(item_id)
        return {} if entry is None else _unlearned_properties(entry)

    @override
    def popular_items(self, k: int, excluded: Bitmap | None = None) -> list[ScoredItem]:
        return super().popular_items(k, self.unavailable if excluded is None else excluded | self.unavailable)

    @override
    def search(self, query: str, limit: int) -> list[FoundItem]:
        """Return matching items as the trained catalogue does, then matching items that no model has learned."""
        learned = super().search(query, limit)
        text = query.strip().casefold()
        return learned + (self._search_unlearned(text, limit - len(learned)) if len(learned) < limit else [])

    def _search_unlearned(self, text: str, limit: int) -> list[FoundItem]:
        change_count, titles, ids = self._unlearned_tables
        if change_count != self._applied_changes:
            change_count, ids = self._applied_changes, self._unlearned.packed
            titles = StringTable.of(entry.title or "" for entry in map(self._overrides.entry, ids) if entry)
            self._unlearned_tables = change_count, titles, ids
        levels = np.minimum(titles.match_levels(text), ids.match_levels(text))
        rows = np.flatnonzero(levels < NO_MATCH)
        best = nsmallest(limit, zip(levels[rows].tolist(), ids.at(rows), strict=True))
        return [_unlearned_item(entry) for _, item_id in best if (entry := self._overrides.entry(item_id))]

    @override
    def _title_levels(self, text: str) -> NDArray[np.uint8]:
        levels = super()._title_levels(text)
        numbers, titles = self._retitled.numbered
        rows = np.flatnonzero(numbers != NO_TEXT)
        numbers = numbers[rows]  # before the titles, which may grow meanwhile
        levels[rows] = titles.packed.match_levels(text)[numbers]
        return levels

    def _current_titles_of(self, rows: NDArray[np.integer]) -> list[str]:
        titles = self._titles.at(rows)
        all_numbers, retitled = self._retitled.numbered
        numbers = all_numbers[rows]
        for place in np.flatnonzero(numbers != NO_TEXT).tolist():
            titles[place] = retitled[int(numbers[place])]
        return titles

    @override
    def _item(self, row: int) -> FoundItem:
        item = super()._item(row)
        return item.model_copy(
            update={
                "title": self._titles_of(np.array([row]))[0],
                "available": not bitmap.has(self.unavailable, np.array([row]))[0],
            }
        )

    def _apply(self, entries: Sequence[ItemEntry]) -> None:
        known = [(row, entry) for entry in entries if (row := self.row_of.get(entry.item_id)) is not None]
        if len(known) < len(entries):
            self._unlearned.add_all([entry.item_id for entry in entries if entry.item_id not in self.row_of])
        retitled = {row: entry.title for row, entry in known if entry.title is not None}
        if retitled:
            self._titles_of = self._current_titles_of
        self._retitled.set(_rows(retitled), list(retitled.values()))
        self.properties.set(TITLE, _rows(retitled), [title or None for title in retitled.values()])
        recategorised = {row: entry.categories for row, entry in known if entry.categories is not None}
        self._categories.set(_rows(recategorised), list(recategorised.values()))
        rows = _rows(row for row, _ in known)
        self.properties.set_all(rows, [entry.properties for _, entry in known])
        self._availability.switch(_rows(row for row, entry in known if entry.available is False), is_on=False)
        self._availability.switch(_rows(row for row, entry in known if entry.available), is_on=True)
        self._availability.update(rows)

    def _title_column(self) -> TextColumn:
        return TextColumn.of([title or None for title in self._titles_of(np.arange(len(self)))])


def _rows(rows: Iterable[int]) -> Rows:
    return np.fromiter(rows, np.int64)


def _unlearned_item(entry: ItemEntry) -> FoundItem:
    return FoundItem(
        item_id=entry.item_id,
        title=entry.title or "",
        categories=list(entry.categories or ()),
        available=entry.available is not False,
        known=False,
    )


def _unlearned_properties(entry: ItemEntry) -> dict[str, ItemValue]:
    properties: dict[str, ItemValue] = {name: stored(value) for name, value in entry.properties.items()}
    if entry.title:
        properties[TITLE] = entry.title
    return properties | {CATEGORIES: entry.categories or (), AVAILABLE: entry.available is not False}
