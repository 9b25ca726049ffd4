"""The columns of a table of events as numbers, sorted by user and time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.data.arrays import Arrays
from model.data.interactions import starts_of
from model.data.table import Table

MAX_ORDER_ID_CHARS = 128


class EventColumns(NamedTuple):
    """Events in the order of the table, or sorted; the columns are those of ``Interactions``."""

    user: NDArray[np.int32]
    item: NDArray[np.int32]
    type: NDArray[np.int32]
    timestamp_us: NDArray[np.int64]
    value: NDArray[np.float64]
    order: NDArray[np.int32] | None

    def sorted(self) -> EventColumns:
        """Return the events by user and time; equal times keep their order."""
        return self.part(np.lexsort((self.timestamp_us, self.user)))

    def part(self, rows: slice | NDArray[np.int64]) -> EventColumns:
        """Return some of the events."""
        return EventColumns(*(None if column is None else column[rows] for column in self))  # type: ignore[arg-type]


class Names:
    """Numbers names in the order of their first appearance."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def numbers(self, column: pl.Series) -> NDArray[np.int32]:
        """Return the number of the name in each row; new names get the next ones."""
        names, known = column.unique(maintain_order=True), self._numbers
        numbers = [known.setdefault(name, len(known)) for name in names.to_list()]
        index = pl.DataFrame({"name": names, "index": np.array(numbers, np.int32)})
        joined = pl.DataFrame({"name": column}).join(index, on="name", how="left", maintain_order="left")
        return joined["index"].to_numpy().astype(np.int32)

    def number(self, name: str) -> int:
        """Return the number of a name, -1 if it has none."""
        return self._numbers.get(name, -1)

    def renumber(self, in_turn: NDArray[np.integer]) -> None:
        """Number the names in another order, which is given by their present numbers."""
        names = self.to_list()
        self._numbers = {names[old]: new for new, old in enumerate(in_turn.tolist())}

    def to_list(self) -> list[str]:
        """Return the names by number."""
        return list(self._numbers)


class NumberedNames:
    """Numbers the users, items, types and orders of a table, which may come in pieces."""

    def __init__(self) -> None:
        self.users, self.items, self.types, self.orders = Names(), Names(), Names(), Names()

    def columns(self, table: Table) -> EventColumns:
        """Check and number a table, or the next piece of it; raises DataError."""
        frame = table.frame
        table.require_ids("user_id", "item_id")
        timestamp_us = table.timestamps_us()
        kind = frame["type"] if "type" in frame.columns else pl.repeat("click", len(frame), eager=True)
        if "type" in frame.columns:
            table.require_ids("type")
        value = table.numbers("value") if "value" in frame.columns else np.full(len(frame), np.nan)
        user, item, type_ = (
            names.numbers(column)
            for names, column in ((self.users, frame["user_id"]), (self.items, frame["item_id"]), (self.types, kind))
        )
        return EventColumns(user, item, type_, timestamp_us, value, self._order_numbers(table))

    def _order_numbers(self, table: Table) -> NDArray[np.int32] | None:
        """Number the orders, -1 where a cell is empty; None without a column of orders. Raises DataError."""
        if "order_id" not in table.frame.columns:
            return None
        cells = table.frame["order_id"].fill_null("")
        table.refuse(
            cells.str.len_chars() > MAX_ORDER_ID_CHARS,
            f"order_id {{!r}} has more than {MAX_ORDER_ID_CHARS} characters",
            "order_id",
        )
        table.require_exact_ids("order_id")
        return np.where((cells == "").to_numpy(), -1, self.orders.numbers(cells)).astype(np.int32)


def sorted_in_pieces(parts: Iterable[EventColumns], rows: int, users: Names, arrays: Arrays) -> EventColumns:
    """Sort events that come in pieces by user and time; equal times keep their order.

    They are grouped into buckets of users, each of which is sorted separately.

    rows   the number of events
    users  the numbering of users, complete once the last piece was read
    """
    unsorted = EventColumns(*arrays.stored(parts, rows))
    made = EventColumns(*by_user(unsorted, len(users), arrays))
    for bucket in user_buckets(made, len(users), arrays):
        move(bucket.sorted(), bucket)
    return made


def by_user(columns: Sequence[NDArray[Any] | None], users: int, arrays: Arrays) -> list[Any]:
    """Return columns, the first of which is the user, grouped into buckets of users whose events fit into a piece."""
    user = columns[0]
    assert user is not None
    starts = starts_of(arrays.counted(user, users))
    readers = [(column.__getitem__, column.dtype) for column in columns if column is not None]
    found = iter(arrays.bucketed(readers, user, starts, [*arrays.groups(starts)]))
    return [None if column is None else next(found) for column in columns]


def user_buckets(events: EventColumns, users: int, arrays: Arrays) -> Iterator[EventColumns]:
    """Iterate over the buckets of `by_user`."""
    starts = starts_of(arrays.counted(events.user, users))
    for one in arrays.groups(starts):
        yield events.part(slice(int(starts[one.start]), int(starts[one.stop])))


def move(columns: Iterable[NDArray[Any] | None], into: Iterable[NDArray[Any] | None]) -> None:
    """Write columns over others."""
    for before, after in zip(columns, into, strict=True):
        if before is not None and after is not None:
            after[:] = before
