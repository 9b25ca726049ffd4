"""A tenant's item overrides in columns, without Python objects per item."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from app.catalogue.expressions.columns import BooleanColumn, TextColumn
from app.catalogue.expressions.set_columns import TextSetColumn
from app.catalogue.item_properties import ItemProperties
from app.catalogue.trained_catalogue import Rows
from storage.records import ItemEntry

RECENT_PAGES = 16
ROOM_SHARE = 16  # one spare row is reserved for this many rows


class ItemValues:
    """The overrides of N items by row. One thread at a time may change them while any thread reads.

    titles       replace the model's titles, even if empty
    categories   replace the model's categories
    switched_on  whether each item is available, which is the default
    properties   all other properties
    """

    def __init__(self, rows: int) -> None:
        self.titles = TextColumn.empty(rows)
        self.categories = TextSetColumn(rows)
        self.switched_on = BooleanColumn.all_true(rows)
        self.properties = ItemProperties(rows)
        self._counts = np.zeros(rows, np.int64)  # change count at each item's last change; 0 if nothing is set
        # rows of the newest pages, with the change counts before and after each: finding changes does not scan all rows
        self._recent: deque[tuple[int, int, Rows]] = deque([(0, 0, np.zeros(0, np.int64))], RECENT_PAGES)

    def has(self, row: int) -> bool:
        """Return whether any value of the item in this row was ever set."""
        return bool(self._counts[row])

    def entry(self, item_id: str, row: int) -> ItemEntry | None:
        """Return the overrides of the item in this row; None if there are none."""
        if not self.has(row):
            return None
        categories, is_on = self.categories.value(row), self.switched_on.value(row)
        return ItemEntry(item_id, self.titles.value(row), categories, is_on, self.properties.given(row))

    def put(self, rows: Rows, entries: Sequence[ItemEntry], change_count: int) -> None:
        """Replace all overrides of distinct rows, and set their change count."""
        self.titles.set(rows, [entry.title for entry in entries])
        self.categories.set(rows, [entry.categories for entry in entries])
        self.switched_on.set(rows, [entry.available is not False for entry in entries])
        self.properties.set_all(rows, [entry.properties for entry in entries])
        self._note(rows, change_count)

    def copy(self, other: ItemValues, there: Rows, rows: Rows, change_count: int) -> None:
        """Replace all overrides of distinct rows by those in the rows `there` of another instance, as new as there."""
        self.titles.copy(other.titles, there, rows)
        self.categories.copy(other.categories, there, rows)
        self.switched_on.copy(other.switched_on, there, rows)
        self.properties.copy(other.properties, there, rows)
        self._note(rows, change_count)
        self._counts[rows] = other._counts[there]

    def changed_since(self, change_count: int) -> Rows:
        """Return the rows that changed since that change count."""
        recent = tuple(self._recent)
        if recent[0][0] > change_count:  # older changes may no longer be among the recent pages
            return np.flatnonzero(self._counts > change_count)
        pages = [rows for _, after, rows in recent if after > change_count]
        rows = pages[0] if len(pages) == 1 else np.unique(np.concatenate([np.zeros(0, np.int64), *pages]))
        return rows[self._counts[rows] > change_count]

    def newest_first(self, rows: Rows) -> Rows:
        """Return the rows in the order of their last change, the newest first."""
        return rows[np.argsort(-self._counts[rows], kind="stable")]

    def reserve(self, rows: int) -> None:
        """Extend the columns to at least this number of rows."""
        if rows > len(self._counts):
            room = rows + rows // ROOM_SHARE
            for column in (self.titles, self.categories, self.switched_on):
                column.grow(room)
            self.properties.grow(room)
            self._counts = np.concatenate([self._counts, np.zeros(room - len(self._counts), np.int64)])

    def _note(self, rows: Rows, change_count: int) -> None:
        self._counts[rows] = change_count
        self._recent.append((self._recent[-1][1], change_count, rows))
