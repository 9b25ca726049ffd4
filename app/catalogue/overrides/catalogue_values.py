"""A tenant's item overrides, in the order of one catalogue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock

import numpy as np

from app.catalogue.expressions.texts import Texts
from app.catalogue.overrides.item_values import ItemValues
from app.catalogue.trained_catalogue import Rows
from model.artifact.string_table import StringIndex, StringTable
from storage.records import NO_PROPERTIES, HeldProperties, ItemEntry

ROWS_PER_PAGE = 2_000


class CatalogueValues:
    """The overrides of a catalogue's items, by row, and of other items, by the number of their id.

    change_count  the number of the tenant's changes that are applied
    held          the declared properties of the values
    """

    def __init__(self, ids: StringTable, row_of: StringIndex) -> None:
        self._ids, self._row_of = ids, row_of
        self.learned = ItemValues(len(ids))
        self.other_ids = Texts()
        self.other_ids.add_all([])  # compile now, not at the first change
        self.others = ItemValues(0)
        self.change_count = 0
        self.held = NO_PROPERTIES

    @classmethod
    def of_no_catalogue(cls) -> CatalogueValues:
        """Return values that contain only other items."""
        ids = StringTable.of([])
        return cls(ids, StringIndex.of(ids))

    def __contains__(self, item_id: str) -> bool:
        """Return whether the tenant has ever set a value of the item."""
        place = self._find(item_id)
        return place is not None and place[0].has(place[1])

    @property
    def lock(self) -> Lock:
        """The lock to hold while changing values, and while reading a consistent snapshot of all items."""
        return self.learned.properties.lock

    def entry(self, item_id: str) -> ItemEntry | None:
        """Return the overrides of the item; None if there are none."""
        place = self._find(item_id)
        return None if place is None else place[0].entry(item_id, place[1])

    def hold(self, held: HeldProperties) -> None:
        """Switch to these declared properties, and drop the values of removed ones."""
        if held is not self.held:
            self.held = held
            self.learned.properties.hold(held)
            self.others.properties.hold(held)

    def put(self, entries: Sequence[ItemEntry], change_count: int) -> None:
        """Replace all overrides of distinct items, and set the change count."""
        for values, places, rows in self._rows_of([entry.item_id for entry in entries]):
            values.put(rows, [entries[place] for place in places.tolist()], change_count)
        self.change_count = change_count

    def copy(self, source: ItemValues, ids: Sequence[str], there: Rows, change_count: int) -> None:
        """Replace all overrides of distinct items by those in the rows `there` of another catalogue's values."""
        for values, places, rows in self._rows_of(ids):
            values.copy(source, there[places], rows, change_count)

    def changed_since(
        self, change_count: int, *, newest_first: bool = False
    ) -> Iterator[tuple[ItemValues, list[str], Rows]]:
        """Yield the items that changed since that count, in pages: values, ids, and rows of the values.

        newest_first  begin with the items that changed last
        """
        parts = ((self.learned, self._ids), (self.others, self.other_ids))
        for values, ids in parts[::-1] if newest_first else parts:
            rows = values.changed_since(change_count)
            if newest_first:
                rows = values.newest_first(rows)
            for begin in range(0, len(rows), ROWS_PER_PAGE):
                page = rows[begin : begin + ROWS_PER_PAGE]
                yield values, ids.at(page), page

    def _find(self, item_id: str) -> tuple[ItemValues, int] | None:
        row = self._row_of.get(item_id)
        if row is not None:
            return self.learned, row
        number = self.other_ids.number(item_id)
        return None if number is None else (self.others, number)

    def _rows_of(self, item_ids: Sequence[str]) -> Iterator[tuple[ItemValues, Rows, Rows]]:
        """Yield the values that contain some of the items, the positions of those ids, and their rows."""
        rows = self._row_of.places_of(item_ids)
        learned, others = np.flatnonzero(rows >= 0), np.flatnonzero(rows < 0)
        if len(learned):
            yield self.learned, learned, rows[learned]
        if len(others):
            self.others.reserve(len(self.other_ids) + len(others))  # first, because readers may use new numbers at once
            yield self.others, others, self.other_ids.add_all([item_ids[place] for place in others.tolist()])
