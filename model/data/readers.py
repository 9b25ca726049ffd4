"""Readers of a data directory: its interactions and its items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from model.data.archive_in_pieces import read_archive_in_pieces
from model.data.archived_log import is_archive, read_archive
from model.data.arrays import IN_MEMORY, READING, SORTING, Arrays, OnStage, ignored, shares_of
from model.data.event_columns import EventColumns, NumberedNames, sorted_in_pieces
from model.data.interactions import DataError, Interactions
from model.data.table import POLARS_ERRORS, Table, TableInPieces, find_table, read_table

REQUIRED = ("user_id", "item_id", "timestamp")
OPTIONAL = ("type", "value", "order_id")
YES_OR_NO: Mapping[str, bool] = {
    **dict.fromkeys(
        ("true", "1", "x", "yes", "y", "ja", "j", "oui", "sí", "sì", "si", "wahr", "vrai", "verdadero", "vero", "waar"),
        True,
    ),
    **dict.fromkeys(("false", "0", "no", "n", "nein", "non", "nee", "falsch", "faux", "falso", "onwaar"), False),
}
"""The values of a yes-or-no cell, in lower case: English, German, French, Spanish, Italian and Dutch."""


@dataclass(frozen=True)
class ItemTexts:
    """The titles and categories in a data directory, by item id."""

    titles: dict[str, str]
    categories: dict[str, tuple[str, ...]]


def read_interactions(directory: Path, arrays: Arrays = IN_MEMORY, on_stage: OnStage = ignored) -> Interactions:
    """Read ``interactions.*`` of a data directory, or the events of an archive; raises DataError with file and line.

    arrays    creates the arrays of events; if they are mapped, Parquet is read piece by piece
    on_stage  is called with the current stage, and the share of the rows if they are read piece by piece
    """
    on_stage(READING)
    if arrays is not IN_MEMORY:
        return _read_in_pieces(directory, arrays, on_stage)
    archived = read_archive(directory)
    table = archived or _read_interactions_table(directory)
    _require_rows(table.path, len(table.frame))
    names = NumberedNames()
    events = names.columns(table).sorted()
    return _interactions(names, events, table.sha256, arrays, is_log=archived is not None)


def _read_in_pieces(directory: Path, arrays: Arrays, on_stage: OnStage) -> Interactions:
    if is_archive(directory):
        archived = read_archive_in_pieces(directory, arrays, on_stage)
        _require_rows(directory, len(archived.events.user))
        return _interactions(archived.names, archived.events, archived.sha256, arrays, is_log=True)
    table = TableInPieces(_interactions_file(directory), REQUIRED, OPTIONAL)
    _require_rows(table.path, table.rows)
    names = NumberedNames()
    parts = map(names.columns, _reported(table, arrays.piece, on_stage))
    events = sorted_in_pieces(parts, table.rows, names.users, arrays)
    return _interactions(names, events, table.sha256, arrays)


def _reported(table: TableInPieces, rows: int, on_stage: OnStage) -> Iterator[Table]:
    report = shares_of(READING, on_stage)
    for piece in table.pieces(rows):
        report(piece.first_row / table.rows)
        yield piece
    on_stage(SORTING)


def _interactions(
    names: NumberedNames, events: EventColumns, sha256: str, arrays: Arrays, *, is_log: bool = False
) -> Interactions:
    return Interactions(
        names.users.to_list(),
        names.items.to_list(),
        names.types.to_list(),
        events.user,
        events.item,
        events.type,
        events.timestamp_us,
        events.value,
        _only_counts(events, arrays),
        sha256,
        is_log=is_log,
        order=events.order,
        order_ids=names.orders.to_list(),
        arrays=arrays,
    )


def read_items(directory: Path) -> ItemTexts:
    """Read ``items.*`` of a data directory; without such a file no item has a title. Raises DataError."""
    path = find_table(directory, "items")
    if path is None:
        return ItemTexts({}, {})
    frame = read_item_table(path).frame
    ids = frame["item_id"].to_list()
    empty = pl.repeat("", len(frame), eager=True)
    titles = (frame["title"] if "title" in frame.columns else empty).fill_null("")
    categories = (frame["categories"] if "categories" in frame.columns else empty).fill_null("")
    return ItemTexts(
        dict(zip(ids, titles.to_list(), strict=True)),
        {name: categories_in(text) for name, text in zip(ids, categories.to_list(), strict=True)},
    )


def read_item_table(path: Path, *, has_properties: bool = False) -> Table:
    """Read the columns item_id, title, categories and available of a file as text, if present.

    has_properties  whether to read all other columns, too

    raises DataError, also for an id that appears twice
    """
    table = read_table(path, ("item_id",), ("title", "categories", "available"), has_others=has_properties)
    for name in table.left_out:
        raise DataError(f"{path}: column {name!r} has neither numbers nor texts; convert it, or leave it out")
    table.require_ids("item_id")
    ids = table.frame["item_id"]
    again = ids.is_duplicated() & ~ids.is_first_distinct()
    if again.any():
        first = table.place(int((ids == ids.filter(again)[0]).arg_true()[0]))
        table.refuse(again, f"item_id {{!r}} appears twice, first in {first}", "item_id")
    if "available" in table.frame.columns:
        cells = table.frame["available"]
        bad = ~cells.fill_null("").str.to_lowercase().is_in([*YES_OR_NO, ""])
        table.refuse(bad, "available {!r} is neither yes nor no; write true or false", "available")
    return table


def categories_in(text: str) -> tuple[str, ...]:
    """Split a cell into its distinct categories, without the spaces around them."""
    return tuple(dict.fromkeys(part.strip() for part in text.split("|") if part.strip()))


def is_parquet_of_events(path: Path) -> bool:
    """Return whether the file is a Parquet table with all columns that events need."""
    try:
        return path.suffix == ".parquet" and {*REQUIRED} <= pl.read_parquet_schema(path).keys()
    except (OSError, *POLARS_ERRORS):
        return False


def _read_interactions_table(directory: Path) -> Table:
    return read_table(_interactions_file(directory), REQUIRED, OPTIONAL)


def _interactions_file(directory: Path) -> Path:
    path = find_table(directory, "interactions")
    if path is None:
        raise DataError(f"data directory {str(directory)!r} has no interactions.tsv.gz (or .csv, .jsonl, .parquet)")
    is_linked = path.is_symlink() and path.resolve().suffix == path.suffix == ".parquet"
    return path.resolve() if is_linked else path  # so that errors name the shop's own file


def _require_rows(path: Path, rows: int) -> None:
    if not rows:
        raise DataError(f"{path} has no interactions; it needs a header and at least one line")


def _only_counts(events: EventColumns, arrays: Arrays) -> bool:
    """Return whether every event of a user is one second after the user's previous one."""
    for part in arrays.slices(len(events.user)):
        own = slice(part.start, part.stop + 1)  # and the event that comes next
        user, timestamp_us = events.user[own], events.timestamp_us[own]
        same_user = user[1:] == user[:-1]
        if not np.all(np.diff(timestamp_us)[same_user] == 1_000_000):
            return False
    return True
