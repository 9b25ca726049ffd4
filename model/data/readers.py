"""Readers of a data directory: its interactions and its items."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.data.archived_log import read_archive
from model.data.interactions import DataError, Interactions
from model.data.table import Table, find_table, read_table

REQUIRED = ("user_id", "item_id", "timestamp")
OPTIONAL = ("type", "value", "order_id")
MAX_ORDER_ID_CHARS = 128
AVAILABLE = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class ItemTexts:
    """Titles and categories by item id, as far as the data directory has them."""

    titles: dict[str, str]
    categories: dict[str, tuple[str, ...]]


def read_interactions(directory: Path) -> Interactions:
    """Read ``interactions.*`` of a data directory, or the events of an archive; raises DataError with file and line."""
    archived = read_archive(directory)
    table = archived or _read_interactions_table(directory)
    frame = table.frame
    if frame.is_empty():
        raise DataError(f"{table.path} has no interactions; it needs a header and at least one line")
    table.require_ids("user_id", "item_id")
    timestamp_us = table.timestamps_us()
    kind = frame["type"] if "type" in frame.columns else pl.repeat("click", len(frame), eager=True)
    if "type" in frame.columns:
        table.require_ids("type")
    value = table.numbers("value") if "value" in frame.columns else np.full(len(frame), np.nan)
    user, user_ids = _indices(frame["user_id"])
    item, item_ids = _indices(frame["item_id"])
    type_, type_names = _indices(kind)
    order_of, order_ids = _order_numbers(table)
    order = np.lexsort((timestamp_us, user))  # stable: equal times keep the order of the file
    user, timestamp_us = user[order], timestamp_us[order]
    return Interactions(
        user_ids,
        item_ids,
        type_names,
        user,
        item[order],
        type_[order],
        timestamp_us,
        value[order],
        _only_counts(user, timestamp_us),
        table.sha256,
        is_log=archived is not None,
        order=None if order_of is None else order_of[order],
        order_ids=order_ids,
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
    """Read the columns item_id, title, categories and available of a file as text, as far as it has them.

    has_properties  whether to read all other columns, too

    raises DataError, also for an id that stands there twice
    """
    table = read_table(path, ("item_id",), ("title", "categories", "available"), has_others=has_properties)
    table.require_ids("item_id")
    ids = table.frame["item_id"]
    again = ids.is_duplicated() & ~ids.is_first_distinct()
    if again.any():
        first = table.place(int((ids == ids.filter(again)[0]).arg_true()[0]))
        table.refuse(again, f"item_id {{!r}} stands here a second time, and first in {first}", "item_id")
    if "available" in table.frame.columns:
        cells = table.frame["available"]
        bad = ~cells.fill_null("").str.to_lowercase().is_in([*AVAILABLE, ""])
        table.refuse(bad, "available {!r} is none of true, false, 1, 0", "available")
    return table


def categories_in(text: str) -> tuple[str, ...]:
    """Split a cell into its distinct categories."""
    return tuple(dict.fromkeys(part for part in text.split("|") if part))


def _read_interactions_table(directory: Path) -> Table:
    path = find_table(directory, "interactions")
    if path is None:
        raise DataError(f"data directory {str(directory)!r} has no interactions.tsv.gz (or .tsv, .csv, .parquet)")
    return read_table(path, REQUIRED, OPTIONAL)


def _order_numbers(table: Table) -> tuple[NDArray[np.int32] | None, list[str]]:
    """Number the orders, -1 where a cell is empty; return the numbers and what they number. Raises DataError.

    Without a column of orders there are no numbers.
    """
    if "order_id" not in table.frame.columns:
        return None, []
    cells = table.frame["order_id"].fill_null("")
    table.refuse(
        cells.str.len_chars() > MAX_ORDER_ID_CHARS,
        f"order_id {{!r}} has more than {MAX_ORDER_ID_CHARS} letters",
        "order_id",
    )
    numbers, order_ids = _indices(cells)
    return np.where((cells == "").to_numpy(), -1, numbers).astype(np.int32), order_ids


def _indices(column: pl.Series) -> tuple[NDArray[np.int32], list[str]]:
    """Number the names in order of their first appearance: the index of each row, and the distinct names."""
    names = column.unique(maintain_order=True)
    index = pl.DataFrame({"name": names, "index": np.arange(len(names), dtype=np.int32)})
    joined = pl.DataFrame({"name": column}).join(index, on="name", how="left", maintain_order="left")
    return joined["index"].to_numpy().astype(np.int32), names.to_list()


def _only_counts(user: NDArray[np.int32], timestamp_us: NDArray[np.int64]) -> bool:
    """Tell whether every event of a user stands one second after the one before."""
    same_user = user[1:] == user[:-1]
    return bool(np.all(np.diff(timestamp_us)[same_user] == 1_000_000))
