"""The properties of a catalogue's items, as columns that change while they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from threading import Lock
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from app.catalogue.expressions.columns import (
    BooleanColumn,
    Column,
    ItemType,
    ItemValue,
    NumberColumn,
    StoredColumn,
    TextColumn,
)
from app.catalogue.expressions.set_columns import TextSetColumn
from app.catalogue.trained_catalogue import Rows
from storage.records import EPOCH, NO_PROPERTIES, HeldProperties, PropertyValue

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

NEW_COLUMN: Mapping[ItemType, Callable[[int], StoredColumn]] = {
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
        self._columns: dict[str, StoredColumn] = {}
        self._makers: dict[str, Callable[[], Column]] = {}
        self._made: dict[str, Column] = {}

    def add(self, name: str, make: Callable[[], Column]) -> None:
        """Add a property whose column is made when it is first read."""
        self._makers[name] = make

    def column(self, name: str) -> Column | None:
        """Return the column of a property; None while no item ever had it."""
        if name not in self._makers:
            return self._columns.get(name)
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

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
        column = self._made.get(name) or self._columns.get(name)
        return -1 if column is None else column.changes

    def set(self, name: str, rows: Rows, values: Sequence[Any]) -> None:
        """Give different rows new values of one property; None takes a value away."""
        column = self._columns.get(name)
        if column is None:
            if all(value is None for value in values):
                return
            column = self._columns[name] = NEW_COLUMN[self.types[name]](self.rows)
        is_time = isinstance(column, NumberColumn) and column.values.dtype == np.int64
        column.set(rows, [stored(value) for value in values] if is_time else values)

    def set_all(self, rows: Rows, properties: Sequence[Mapping[str, Any]]) -> None:
        """Give different rows these properties; what is not named is taken away."""
        for name in self._columns.keys() | set[str]().union(*properties):
            self.set(name, rows, [one.get(name) for one in properties])

    def copy(self, other: ItemProperties, there: Rows, rows: Rows) -> None:
        """Give different rows the properties of rows of another one, which holds the same."""
        theirs = other.columns
        for name, column in self._columns.items():
            if name not in theirs:
                column.set(rows, [None] * len(rows))
        for name, column in theirs.items():
            if name not in self._columns:
                self._columns[name] = NEW_COLUMN[self.types[name]](self.rows)
            self._columns[name].copy(column, there, rows)

    def grow(self, rows: int) -> None:
        """Make room for so many rows."""
        self.rows = rows
        for column in self._columns.values():
            column.grow(rows)

    @property
    def columns(self) -> dict[str, StoredColumn]:
        """The columns by name as they are now, but for those that are made when they are first read."""
        return dict(self._columns)

    def values(self, row: int) -> dict[str, ItemValue]:
        """Return what the item of a row has, but for properties whose columns are made when they are first read."""
        values = {name: column.value(row) for name, column in self.columns.items()}
        return {name: value for name, value in values.items() if value is not None}

    def given(self, row: int) -> dict[str, PropertyValue | None]:
        """Return what `values` returns, as the tenant gave it: times are times."""
        values = [(name, column, column.value(row)) for name, column in self.columns.items()]
        return {name: given(column, value) for name, column, value in values if value is not None}


def stored(value: Any) -> Any:
    """Return a value as columns have it: a time as microseconds since the epoch."""
    return (value - EPOCH) // timedelta(microseconds=1) if isinstance(value, datetime) else value


def given(column: Column, value: ItemValue) -> PropertyValue:
    """Return a value of a column as the tenant gave it."""
    if isinstance(column, NumberColumn) and column.values.dtype == np.int64:
        return EPOCH + timedelta(microseconds=cast(int, value))
    return value
