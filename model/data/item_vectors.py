"""Vectors of items that a shop has computed, from the table of items: lists in Parquet, JSON arrays in a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.data.interactions import DataError
from model.data.table import VECTOR, Table, find_table, read_table

MAX_NUMBERS = 1_024
JSON_ARRAY = r"^\s*\[.*\]\s*$"


@dataclass(frozen=True)
class ItemVectors:
    """The vectors of some items, each of length 1.

    rows     by item id
    numbers  (n, d)  float16
    """

    rows: Mapping[str, int]
    numbers: NDArray[np.float16]

    def of(self, item_ids: Sequence[str]) -> NDArray[np.float16]:
        """Return the vectors of these items: (items, d), NaN for those without one."""
        rows = np.array([self.rows.get(item_id, -1) for item_id in item_ids], np.int64)
        found = np.full((len(rows), self.numbers.shape[1]), np.nan, np.float16)
        found[rows >= 0] = self.numbers[rows[rows >= 0]]
        return found


def read_item_vectors(directory: Path) -> ItemVectors | None:
    """Read the column ``vector`` of ``items.*`` of a data directory; None without one. Raises DataError."""
    path = find_table(directory, "items")
    return None if path is None else vectors_in(path)


def vectors_in(path: Path) -> ItemVectors | None:
    """Read the column ``vector`` of a table of items; None without this column, or if all cells are empty.

    raises  DataError  which names the line, when a vector is not a list of finite numbers, is too long, has another
                       length than the first one, or only zeros
    """
    table = read_table(path, ("item_id",), (VECTOR,))
    if VECTOR not in table.frame.columns:
        return None
    has_one = table.frame[VECTOR].is_not_null()
    if table.frame.schema[VECTOR] == pl.String:
        table, has_one = _parsed(table)
    cells = table.frame[VECTOR]
    if not has_one.any():
        return None
    lengths = cells.list.len()
    length = int(lengths.filter(has_one)[0])
    _refuse(
        table, has_one & ~lengths.is_between(1, MAX_NUMBERS), f"the vector does not have 1 to {MAX_NUMBERS:,} numbers"
    )
    _refuse(table, has_one & (lengths != length), f"the vector does not have {length:,} numbers like the first one")
    flat = cells.filter(has_one).explode().fill_null(np.nan).to_numpy().reshape(-1, length)
    largest = np.abs(flat).max(axis=1)
    is_whole = np.isfinite(flat).all(axis=1) & (largest > 0)
    bad = np.zeros(len(cells), bool)
    bad[has_one.to_numpy()] = ~is_whole
    _refuse(table, pl.Series(bad), "the vector must have finite numbers, at least one of them not 0")
    scaled = flat / largest[:, None]  # squares of others could be too large, or too small
    numbers = (scaled / np.linalg.norm(scaled, axis=1, keepdims=True)).astype(np.float16)
    ids = table.frame["item_id"].filter(has_one).to_list()
    return ItemVectors({item_id: row for row, item_id in enumerate(ids)}, numbers)


def _parsed(table: Table) -> tuple[Table, pl.Series]:
    """Return the table with JSON arrays as lists, and which rows have one."""
    cells = table.frame[VECTOR].fill_null("")
    has_one = cells != ""
    _refuse(table, has_one & ~cells.str.contains(JSON_ARRAY), "the vector is not a JSON array of numbers")
    try:
        known = pl.select(pl.when(has_one).then(cells)).to_series()
        parsed = known.str.json_decode(pl.List(pl.Float64))
    except pl.exceptions.PolarsError as exc:
        raise DataError(f"{table.path}: a vector is not a JSON array of numbers: {str(exc)[:200]}") from exc
    return replace(table, frame=table.frame.with_columns(parsed.alias(VECTOR))), has_one


def _refuse(table: Table, bad: pl.Series, reason: str) -> None:
    table.refuse(bad, reason, "item_id")
