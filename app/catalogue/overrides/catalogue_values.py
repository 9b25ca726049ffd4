"""What a tenant has set of items, in the order of one catalogue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock

import numpy as np

from app.catalogue.expressions.texts import Texts
from app.catalogue.overrides.item_values import ItemValues, Rows
from model.artifact.string_table import StringIndex, StringTable
from storage.records import NO_PROPERTIES, HeldProperties, ItemEntry

ROWS_PER_PAGE = 2_000


class CatalogueValues:
    """What is set of a catalogue's items, by its rows, and of other items, by the numbers of their ids.

    change_count  of the tenant's changes, the last one that this has
    held          the properties that values are of
    """

    def __init__(self, ids: StringTable, row_of: StringIndex) -> None:
        self._ids, self._row_of = ids, row_of
        self.learned = ItemValues(len(ids))
        self.other_ids = Texts()
        self.other_ids.add_all([])  # compiles it now, not at the first change
        self.others = ItemValues(0)
        self.change_count = 0
        self.held = NO_PROPERTIES

    @classmethod
    def of_no_catalogue(cls) -> CatalogueValues:
        """Return values of other items alone."""
        ids = StringTable.of([])
        return cls(ids, StringIndex.of(ids))

    def __contains__(self, item_id: str) -> bool:
        """Return whether the tenant has ever set anything of the item."""
        place = self._find(item_id)
        return place is not None and place[0].has(place[1])

    @property
    def lock(self) -> Lock:
        """Is held by whoever changes this, and by whoever needs every item as it was at one moment."""
        return self.learned.properties.lock

    def entry(self, item_id: str) -> ItemEntry | None:
        """Return what the tenant has set of the item, None for nothing."""
        place = self._find(item_id)
        return None if place is None else place[0].entry(item_id, place[1])

    def hold(self, held: HeldProperties) -> None:
        """Go by these properties; what was taken back has no values any more."""
        if held is not self.held:
            self.held = held
            self.learned.properties.hold(held)
            self.others.properties.hold(held)

    def put(self, entries: Sequence[ItemEntry], change_count: int) -> None:
        """Replace all that is set of different items; these are the changes up to that count."""
        for values, places, rows in self._rows_of([entry.item_id for entry in entries]):
            values.put(rows, [entries[place] for place in places.tolist()], change_count)
        self.change_count = change_count

    def copy(self, source: ItemValues, ids: Sequence[str], there: Rows, change_count: int) -> None:
        """Replace all that is set of different items by what is set in these rows of another catalogue's values."""
        for values, places, rows in self._rows_of(ids):
            values.copy(source, there[places], rows, change_count)

    def changed_since(self, change_count: int) -> Iterator[tuple[ItemValues, list[str], Rows]]:
        """Yield the items that changed since that count, in pages: values, ids, and rows of the values."""
        for values, ids in ((self.learned, self._ids), (self.others, self.other_ids)):
            rows = values.changed_since(change_count)
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
        """Yield the values that have some of the items, the places of these among the ids, and their rows."""
        rows = self._row_of.places_of(item_ids)
        learned, others = np.flatnonzero(rows >= 0), np.flatnonzero(rows < 0)
        if len(learned):
            yield self.learned, learned, rows[learned]
        if len(others):
            self.others.reserve(len(self.other_ids) + len(others))  # first, as others may read by new numbers at once
            yield self.others, others, self.other_ids.add_all([item_ids[place] for place in others.tolist()])
