"""The properties of a catalogue's items, as columns that change while they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from threading import Lock
from types import MappingProxyType
from typing import Any

import numpy as np

from app.catalogue.expressions.columns import (
    BooleanColumn,
    Column,
    ItemType,
    ItemValue,
    NumberColumn,
    TextColumn,
    TextSetColumn,
)
from app.catalogue.trained_catalogue import Rows
from storage.records import EPOCH, NO_PROPERTIES, HeldProperties

TITLE, CATEGORIES, AVAILABLE = "title", "categories", "available"
TYPES: Mapping[str, ItemType] = MappingProxyType(
    {
        TITLE: "text",
        CATEGORIES: "set",
        AVAILABLE: "boolean",
        "available_from": "time",
        "available_until": "time",
        "published_at": "time",
    }
)
"""The properties of every tenant's items."""

NEW_COLUMN: Mapping[ItemType, Callable[[int], Column]] = {
    "text": TextColumn.empty,
    "number": NumberColumn,
    "boolean": BooleanColumn,
    "time": lambda rows: NumberColumn(rows, np.int64),
    "set": TextSetColumn,
}


class ItemProperties:
    """The columns of N items, and what each property's type is.

    types_version  grows with every change of the types
    lock           is held by whoever changes columns, and by whoever needs every item as it was at one moment
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.lock = Lock()
        self.types: Mapping[str, ItemType] = TYPES
        self.types_version = 0
        self._held = NO_PROPERTIES
        self._columns: dict[str, Column] = {}
        self._made: dict[str, Callable[[], Column]] = {}

    def add(self, name: str, make: Callable[[], Column]) -> None:
        """Add a property whose column is made when it is first read."""
        self._made[name] = make

    def column(self, name: str) -> Column | None:
        """Return the column of a property; None while no item ever had it."""
        column = self._columns.get(name)
        if column is None and (make := self._made.get(name)) is not None:
            column = self._columns[name] = make()
        return column

    def hold(self, held: HeldProperties) -> None:
        """Go by these properties; what was taken back loses its column."""
        before, self._held = self._held, held
        for name in held.taken_back_since(before):
            self._columns.pop(name, None)
        if held != before:
            self.types = {**held.types["item"], **TYPES}
            self.types_version += 1

    def changes(self, name: str) -> int:
        """Return how often the property was changed."""
        column = self._columns.get(name)
        return -1 if column is None else column.changes

    def set(self, name: str, rows: Rows, values: Sequence[Any]) -> None:
        """Give different rows new values of one property; None takes a value away."""
        column = self._columns.get(name)
        if column is None:
            if name in self._made or all(value is None for value in values):
                return  # what is made when it is first read has these values then
            column = self._columns[name] = NEW_COLUMN[self.types[name]](self.rows)
        column.set(rows, [stored(value) for value in values])

    def set_all(self, rows: Rows, properties: Sequence[Mapping[str, Any]]) -> None:
        """Give different rows these properties; what is not named is taken away."""
        for name in (self._columns.keys() - self._made.keys()).union(*properties):
            self.set(name, rows, [one.get(name) for one in properties])

    def values(self, row: int) -> dict[str, ItemValue]:
        """Return what the item of a row has, but for properties whose columns are made when they are first read."""
        columns = [*self._columns.items()]  # others may be dropped meanwhile
        values = {name: column.value(row) for name, column in columns if name not in self._made}
        return {name: value for name, value in values.items() if value is not None}


def stored(value: Any) -> Any:
    """Return a value as columns have it: a time as microseconds since the epoch."""
    return (value - EPOCH) // timedelta(microseconds=1) if isinstance(value, datetime) else value
