"""The shop's item data as the items table of a training: the store's values override the archive's file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import polars as pl

from app.serving.store_factory import opened_store
from app.settings import StoreSettings
from model.data.item_vectors import vectors_in
from model.data.readers import read_item_table
from model.data.table import VECTOR, find_table, write_parquet
from storage.items.vectors import decode
from storage.records import ItemChanges

CHANGES_PER_READ = 1_000
SCHEMA: dict[str, Any] = {
    "item_id": pl.String,
    "title": pl.String,
    "categories": pl.String,
    VECTOR: pl.List(pl.Float32),
}

ItemsById: TypeAlias = Mapping[str, dict[str, Any]]
"""The known columns of items, by id."""


async def items_of_store(settings: StoreSettings, item_ids: Collection[str]) -> ItemsById:
    """Return the titles, categories and vectors in the store of these items; raises StorageError."""
    found: dict[str, dict[str, Any]] = {}
    wanted, tenant, changes = frozenset(item_ids), settings.tenant, ItemChanges([], 0)
    async with opened_store(settings) as store:
        while (page := await store.item_changes(tenant, changes.version, CHANGES_PER_READ)).version > changes.version:
            changes = page
            entries = [entry for entry in page.entries if entry.item_id in wanted]
            vectors = await store.vectors.of_items(tenant, [entry.item_id for entry in entries])
            for entry in entries:
                own: dict[str, Any] = {}
                if entry.title is not None:
                    own["title"] = entry.title
                if entry.categories is not None:
                    own["categories"] = "|".join(entry.categories)
                if entry.item_id in vectors:
                    own[VECTOR] = decode([vectors[entry.item_id]])[0].tolist()
                if own:
                    found[entry.item_id] = own
    return found


def put_over_file(directory: Path, of_store: ItemsById) -> None:
    """Write the store's item data over the table of items of a data directory, which may not exist.

    Vectors are those of the store, if it has any, and else those of the file, because all must have the same dimension.

    raises  DataError  when the file is not a table of items
    """
    if not of_store:
        return
    path = find_table(directory, "items")
    known = {} if path is None else _of_file(path, has_vectors=not any(VECTOR in own for own in of_store.values()))
    for item_id, own in of_store.items():
        known[item_id] = known.get(item_id, {}) | own
    if path is not None:
        path.unlink()
    rows = [{"item_id": item_id, **own} for item_id, own in known.items()]
    write_parquet(pl.DataFrame(rows, schema=SCHEMA), directory / "items.parquet")


def _of_file(path: Path, *, has_vectors: bool) -> dict[str, dict[str, Any]]:
    frame = read_item_table(path).frame
    names = [name for name in ("title", "categories") if name in frame.columns]
    known: dict[str, dict[str, Any]] = {}
    for row in frame.iter_rows(named=True):
        known[row["item_id"]] = {name: row[name] for name in names}
    vectors = vectors_in(path) if has_vectors else None
    if vectors is not None:
        for item_id, place in vectors.rows.items():
            known[item_id][VECTOR] = vectors.numbers[place].tolist()
    return known
