"""A generation's catalogue with the tenant's changes of items applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from app.catalogue.availability import Availability
from app.catalogue.expressions.columns import ItemValue, TextColumn
from app.catalogue.item_expressions import ItemExpressions
from app.catalogue.item_overrides import ItemOverrides
from app.catalogue.item_properties import AVAILABLE, CATEGORIES, TITLE, ItemProperties, stored
from app.catalogue.trained_catalogue import NO_ROWS, Rows, TrainedCatalogue
from app.schemas.items import FoundItem, Item
from app.schemas.properties import shown_of_item
from app.schemas.scored_items import ScoredItem
from model.artifact.item_table import ItemTable
from model.artifact.string_table import NO_MATCH, StringTable
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from storage.records import ItemEntry, PropertyValue


class LiveCatalogue(TrainedCatalogue):
    """A catalogue that changes while it serves.

    Any thread may read while another one catches up: at any moment each item is as it was before or as it is after.
    """

    def __init__(self, items: ItemTable, overrides: ItemOverrides) -> None:
        self._overrides = overrides
        self._applied_changes = 0
        self._unlearned: dict[str, ItemEntry] = {}  # items that the model has not learned
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
        held = None
        while held is not self._overrides.held:  # which the event loop may change meanwhile
            held, change_count = self._overrides.held, self._overrides.change_count
            entries = self._overrides.changed_since(self._applied_changes)
        with self.properties.lock:
            self.properties.hold(held)
            self._apply(entries)
        self._applied_changes = change_count

    def item(self, item_id: str) -> Item | None:
        """Return the item as it is now; None when neither the model nor the tenant knows it."""
        row = self.row_of.get(item_id)
        if row is not None:
            found = self._item(row)
        elif (entry := self._unlearned.get(item_id)) is not None:
            found = _unlearned_item(entry)
        else:
            return None
        return Item(**found.model_dump(), **shown_of_item(self._overrides.properties(item_id)))

    def properties_of(self, item_id: str) -> Mapping[str, ItemValue]:
        """Return the properties of an item that have a value; none for an unknown item."""
        row = self.row_of.get(item_id)
        if row is not None:
            (title,) = self._titles_of(np.array([row]))
            named: dict[str, ItemValue] = {TITLE: title} if title else {}
            named |= {CATEGORIES: self._categories[row], AVAILABLE: bool(self._availability.switched_on.value(row))}
            return named | self.properties.values(row)
        entry = self._unlearned.get(item_id)
        return {} if entry is None else _unlearned_properties(entry, self._overrides.properties(item_id))

    @override
    def popular_items(self, k: int, excluded: Bitmap | None = None) -> list[ScoredItem]:
        return super().popular_items(k, self.unavailable if excluded is None else excluded | self.unavailable)

    @override
    def search(self, query: str, limit: int) -> list[FoundItem]:
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
    def _item(self, row: int) -> FoundItem:
        item = super()._item(row)
        return item.model_copy(
            update={
                "title": self._retitled.get(row, item.title),
                "available": not bitmap.has(self.unavailable, np.array([row]))[0],
            }
        )

    def _apply(self, entries: Sequence[ItemEntry]) -> None:
        known = [(row, entry) for entry in entries if (row := self.row_of.get(entry.item_id)) is not None]
        if len(known) < len(entries):
            self._unlearned.update({entry.item_id: entry for entry in entries if entry.item_id not in self.row_of})
        retitled = {row: entry.title for row, entry in known if entry.title is not None}
        self._retitled.update(retitled)
        self.properties.set(TITLE, _rows(retitled), [title or None for title in retitled.values()])
        recategorised = {row: entry.categories for row, entry in known if entry.categories is not None}
        self._categories.set(_rows(recategorised), list(recategorised.values()))
        rows = _rows(row for row, _ in known)
        self.properties.set_all(rows, [entry.properties for _, entry in known])
        self._availability.switch(_rows(row for row, entry in known if entry.available is False), is_on=False)
        self._availability.switch(_rows(row for row, entry in known if entry.available), is_on=True)
        self._availability.update(rows)

    def _title_column(self) -> TextColumn:
        titles = list(self._titles)
        for row, title in self._retitled.items():
            titles[row] = title
        return TextColumn.of([title or None for title in titles])


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


def _unlearned_properties(entry: ItemEntry, values: Mapping[str, PropertyValue | None]) -> dict[str, ItemValue]:
    properties: dict[str, ItemValue] = {name: stored(value) for name, value in values.items()}
    if entry.title:
        properties[TITLE] = entry.title
    return properties | {CATEGORIES: entry.categories or (), AVAILABLE: entry.available is not False}


def _match_levels(titles_and_ids: Sequence[tuple[str, str]], text: str) -> NDArray[np.uint8]:
    """Return how well the title or the id matches, whichever matches better."""
    titles, item_ids = (StringTable.of(pair[n] for pair in titles_and_ids) for n in range(2))
    return np.minimum(titles.match_levels(text), item_ids.match_levels(text))
