"""Reads the events of an archive piece by piece, with the same result as `model.data.archived_log` at once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.data.archived_log import ARCHIVE_COLUMNS, ARCHIVE_COLUMNS_AS_TEXT, Corrections, with_archived_files
from model.data.arrays import READING, SORTING, Arrays, OnStage, shares_of
from model.data.event_columns import EventColumns, Names, NumberedNames, by_user, move, user_buckets
from model.data.table import Table


class ArchivedEvents(NamedTuple):
    """The effective events, sorted by user and time, the names behind their numbers, and the digest of their text."""

    events: EventColumns
    names: NumberedNames
    sha256: str


def read_archive_in_pieces(directory: Path, arrays: Arrays, on_stage: OnStage) -> ArchivedEvents:
    """Read the events of an archive, or of one of its tenants; raises DataError."""

    def read(paths: list[Path]) -> ArchivedEvents:
        names = NumberedNames()
        rows = sum(int(pl.scan_parquet(path).select(pl.len()).collect().item()) for path in paths)
        report = shares_of(READING, on_stage)
        pieces = _numbered(directory, paths, names, arrays, lambda done: report(done / rows))
        stored = arrays.stored(pieces, rows) or _none()
        on_stage(SORTING)
        _sort_names(names.users, stored[0], arrays)
        *columns, seq = by_user(stored, len(names.users), arrays)
        events = EventColumns(*columns)
        end = 0
        for bucket in user_buckets(events, len(names.users), arrays):
            begin, end = end, end + len(bucket.user)
            move(bucket.part(np.lexsort((seq[begin:end], bucket.user))), bucket)
        for of_column, column in ((names.items, events.item), (names.types, events.type), (names.orders, events.order)):
            assert column is not None
            _number_by_appearance(of_column, column, arrays)
        sha256 = _digest(events, names, arrays)
        for bucket in user_buckets(events, len(names.users), arrays):
            move(bucket.sorted(), bucket)
        return ArchivedEvents(events, names, sha256)

    return with_archived_files(directory, read)


def _numbered(
    directory: Path, paths: list[Path], names: NumberedNames, arrays: Arrays, on_rows: Callable[[int], None]
) -> Iterator[tuple[NDArray[Any] | None, ...]]:
    """Iterate over the columns of the effective events, and their sequence numbers in the log.

    on_rows  is called with the number of rows that are read
    """
    corrections = Corrections.of(pl.scan_parquet(paths))
    before = 0
    for path in paths:
        log = pl.scan_parquet(path).select(ARCHIVE_COLUMNS)
        rows = int(log.select(pl.len()).collect().item())
        for part in arrays.slices(rows):
            on_rows(before + part.start)
            piece = corrections.effective(log.slice(part.start, part.stop - part.start).collect())
            texts = Table(directory, piece.select(**ARCHIVE_COLUMNS_AS_TEXT), "", part.start)
            yield (*names.columns(texts), piece["seq"].to_numpy().astype(np.int64))
        before += rows


def _none() -> list[NDArray[Any]]:
    kinds = (np.int32, np.int32, np.int32, np.int64, np.float64, np.int32, np.int64)
    return [np.empty(0, kind) for kind in kinds]


def _sort_names(names: Names, column: NDArray[np.int32], arrays: Arrays) -> None:
    """Number names in alphabetical order."""
    by_name = pl.Series(names.to_list(), dtype=pl.String).arg_sort().to_numpy()
    _renumber(names, column, by_name, arrays)


def _number_by_appearance(names: Names, column: NDArray[np.int32], arrays: Arrays) -> None:
    """Number names in the order of their first appearance in the column, where -1 stands for an empty cell."""
    first = np.full(len(names), len(column), np.int64)
    for part in arrays.slices(len(column)):
        found, place = np.unique(column[part], return_index=True)
        found = np.where(found < 0, names.number(""), found)
        is_new = first[found] == len(column)
        first[found[is_new]] = part.start + place[is_new]
    _renumber(names, column, np.argsort(first, kind="stable"), arrays)


def _renumber(names: Names, column: NDArray[np.int32], in_turn: NDArray[np.integer], arrays: Arrays) -> None:
    """Number names in another order, also in the column, where -1 stays unchanged."""
    number = np.full(len(in_turn) + 1, -1, np.int32)
    number[in_turn] = np.arange(len(in_turn))
    names.renumber(in_turn)
    for part in arrays.slices(len(column)):
        column[part] = number[column[part]]


def _digest(events: EventColumns, names: NumberedNames, arrays: Arrays) -> str:
    """Return the digest of the events as a text, whose lines are in the order of each user's log."""
    digest = hashlib.sha256()
    users, items, types, orders = (
        pl.Series(of.to_list(), dtype=pl.String) for of in (names.users, names.items, names.types, names.orders)
    )
    for part in [*arrays.slices(len(events.user))] or [slice(0)]:
        own = events.part(part)
        assert own.order is not None
        frame = pl.DataFrame(
            {
                "user_id": users[own.user],
                "item_id": items[own.item],
                "timestamp_us": own.timestamp_us,
                "type": types[own.type],
                "value": pl.Series(own.value).fill_nan(None),
                "order_id": pl.select(
                    pl.when(pl.Series(own.order >= 0)).then(orders[np.maximum(own.order, 0)])
                ).to_series(),
            }
        )
        text = frame.select(**ARCHIVE_COLUMNS_AS_TEXT).write_csv(separator="\t", include_header=part.start in (0, None))
        digest.update(text.encode())
    return digest.hexdigest()
