"""What a tenant has set of items, in columns: nothing of an item is a Python object."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.catalogue.expressions.columns import BooleanColumn, TextColumn
from app.catalogue.expressions.set_columns import TextSetColumn
from app.catalogue.item_properties import ItemProperties
from storage.records import ItemEntry

RECENT_PAGES = 16
ROOM_SHARE = 16  # of the rows there are, one is room for others

Rows = NDArray[np.int64]


class ItemValues:
    """What a tenant has set of N items, by row. One thread at a time changes it, any may read.

    titles       that replace a model's; an empty one does, too
    categories   that replace a model's
    switched_on  whether each item is available, as all are at first
    properties   the others
    """

    def __init__(self, rows: int) -> None:
        self.titles = TextColumn.empty(rows)
        self.categories = TextSetColumn(rows)
        self.switched_on = BooleanColumn.all_true(rows)
        self.properties = ItemProperties(rows)
        self._counts = np.zeros(rows, np.int64)  # the tenant's changes up to each item's last one; 0: nothing is set
        # the rows of the pages put last, and the counts of changes before and after: a change costs no look at all rows
        self._recent: deque[tuple[int, int, Rows]] = deque([(0, 0, np.zeros(0, np.int64))], RECENT_PAGES)

    def has(self, row: int) -> bool:
        """Return whether anything was ever set of the item in this row."""
        return bool(self._counts[row])

    def entry(self, item_id: str, row: int) -> ItemEntry | None:
        """Return what is set of the item in this row, None for nothing."""
        if not self.has(row):
            return None
        categories, is_on = self.categories.value(row), self.switched_on.value(row)
        return ItemEntry(item_id, self.titles.value(row), categories, is_on, self.properties.given(row))

    def put(self, rows: Rows, entries: Sequence[ItemEntry], change_count: int) -> None:
        """Replace all that is set of the items in different rows; these are the changes up to that count."""
        self.titles.set(rows, [entry.title for entry in entries])
        self.categories.set(rows, [entry.categories for entry in entries])
        self.switched_on.set(rows, [entry.available is not False for entry in entries])
        self.properties.set_all(rows, [entry.properties for entry in entries])
        self._note(rows, change_count)

    def copy(self, other: ItemValues, there: Rows, rows: Rows, change_count: int) -> None:
        """Replace all that is set of the items in different rows by what is set in rows of another one."""
        self.titles.copy(other.titles, there, rows)
        self.categories.copy(other.categories, there, rows)
        self.switched_on.copy(other.switched_on, there, rows)
        self.properties.copy(other.properties, there, rows)
        self._note(rows, change_count)

    def changed_since(self, change_count: int) -> Rows:
        """Return the rows that were put since that count of changes."""
        recent = tuple(self._recent)
        if recent[0][0] > change_count:  # there may be changes that are not among the recent ones
            return np.flatnonzero(self._counts > change_count)
        pages = [rows for _, after, rows in recent if after > change_count]
        return pages[0] if len(pages) == 1 else np.unique(np.concatenate([np.zeros(0, np.int64), *pages]))

    def reserve(self, rows: int) -> None:
        """Make room for so many rows."""
        if rows > len(self._counts):
            room = rows + rows // ROOM_SHARE
            for column in (self.titles, self.categories, self.switched_on):
                column.grow(room)
            self.properties.grow(room)
            self._counts = np.concatenate([self._counts, np.zeros(room - len(self._counts), np.int64)])

    def _note(self, rows: Rows, change_count: int) -> None:
        self._counts[rows] = change_count
        self._recent.append((self._recent[-1][1], change_count, rows))
