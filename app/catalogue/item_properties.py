"""The properties of a catalogue's items, in columns that can change while others read them."""

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
    ItemValue,
    NumberColumn,
    StoredColumn,
    TextColumn,
)
from app.catalogue.expressions.set_columns import TextSetColumn
from app.catalogue.trained_catalogue import Rows
from storage.records import EPOCH, NO_PROPERTIES, HeldProperties, PropertyType, PropertyValue

TITLE, CATEGORIES, AVAILABLE = "title", "categories", "available"
TYPES: Mapping[str, PropertyType] = MappingProxyType(
    {
        TITLE: "text",
        CATEGORIES: "set",
        AVAILABLE: "boolean",
        "available_from": "time",
        "available_until": "time",
        "published_at": "time",
    }
)
"""The properties that every tenant's items have."""

NEW_COLUMN: Mapping[PropertyType, Callable[[int], StoredColumn]] = {
    "text": TextColumn.empty,
    "number": NumberColumn,
    "boolean": BooleanColumn,
    "time": lambda rows: NumberColumn(rows, np.int64),
    "set": TextSetColumn,
}


class ItemProperties:
    """The columns of N items, and the types of their properties.

    types_version  grows with every change of the types
    lock           must be held while changing columns, and while reading a consistent snapshot of all items
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.lock = Lock()
        self.types: Mapping[str, PropertyType] = TYPES
        self.types_version = 0
        self._held = NO_PROPERTIES
        self._columns: dict[str, StoredColumn] = {}
        self._makers: dict[str, Callable[[], Column]] = {}
        self._made: dict[str, Column] = {}

    def add(self, name: str, make: Callable[[], Column]) -> None:
        """Add a property whose column is created on first use."""
        self._makers[name] = make

    def column(self, name: str) -> Column | None:
        """Return the column of a property; None if no item ever had a value."""
        if name not in self._makers:
            return self._columns.get(name)
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def hold(self, held: HeldProperties) -> None:
        """Switch to these declared properties, and drop the columns of removed ones."""
        before, self._held = self._held, held
        for name in held.properties_removed_since(before):
            self._columns.pop(name, None)
        if held != before:
            self.types = {**held.types["item"], **TYPES}
            self.types_version += 1

    def changes(self, name: str) -> int:
        """Return the number of changes of the property."""
        column = self._made.get(name) or self._columns.get(name)
        return -1 if column is None else column.changes

    def set(self, name: str, rows: Rows, values: Sequence[Any]) -> None:
        """Set one property of distinct rows; None removes a value."""
        column = self._columns.get(name)
        if column is None:
            if all(value is None for value in values):
                return
            column = self._columns[name] = NEW_COLUMN[self.types[name]](self.rows)
        is_time = isinstance(column, NumberColumn) and column.values.dtype == np.int64
        column.set(rows, [stored(value) for value in values] if is_time else values)

    def set_all(self, rows: Rows, properties: Sequence[Mapping[str, Any]]) -> None:
        """Replace all properties of distinct rows; properties that are not named are removed."""
        for name in self._columns.keys() | set[str]().union(*properties):
            self.set(name, rows, [one.get(name) for one in properties])

    def copy(self, other: ItemProperties, there: Rows, rows: Rows) -> None:
        """Copy the properties of the rows `there` of another instance to distinct rows; both have the same types."""
        theirs = other.columns
        for name, column in self._columns.items():
            if name not in theirs:
                column.set(rows, [None] * len(rows))
        for name, column in theirs.items():
            if name not in self._columns:
                self._columns[name] = NEW_COLUMN[self.types[name]](self.rows)
            self._columns[name].copy(column, there, rows)

    def grow(self, rows: int) -> None:
        """Extend the columns to this number of rows."""
        self.rows = rows
        for column in self._columns.values():
            column.grow(rows)

    @property
    def columns(self) -> dict[str, StoredColumn]:
        """The current columns by name, except those that are created on first use."""
        return dict(self._columns)

    def values(self, row: int) -> dict[str, ItemValue]:
        """Return the property values of a row, except those whose columns are created on first use."""
        values = {name: column.value(row) for name, column in self.columns.items()}
        return {name: value for name, value in values.items() if value is not None}

    def given(self, row: int) -> dict[str, PropertyValue | None]:
        """Return the result of `values` in the tenant's format, where times are datetimes."""
        values = [(name, column, column.value(row)) for name, column in self.columns.items()]
        return {name: given(column, value) for name, column, value in values if value is not None}


def stored(value: Any) -> Any:
    """Return a value in the format of columns: times as microseconds since the epoch."""
    return (value - EPOCH) // timedelta(microseconds=1) if isinstance(value, datetime) else value


def given(column: Column, value: ItemValue) -> PropertyValue:
    """Return a value of a column in the tenant's format."""
    if isinstance(column, NumberColumn) and column.values.dtype == np.int64:
        return EPOCH + timedelta(microseconds=cast(int, value))
    return value
