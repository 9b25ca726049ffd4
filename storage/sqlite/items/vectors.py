"""Vectors of tenants' items in the embedded store."""

import sqlite3
from collections.abc import Sequence

from typing_extensions import override

from storage.errors import VectorRefused
from storage.items.vectors import NO_VECTOR, VECTORS_PAGE, VectorStore, numbers_in
from storage.records import ItemEntry
from storage.sqlite.batches import execute_in_batches
from storage.sqlite.database import Database

PUT = "INSERT OR REPLACE INTO item_vectors VALUES (?, ?, ?)"
DELETE = "DELETE FROM item_vectors WHERE tenant = ? AND item_id = ?"
SELECT_ONE = "SELECT vector FROM item_vectors WHERE tenant = ? LIMIT 1"
SELECT = "SELECT item_id, vector FROM item_vectors WHERE tenant = ? AND item_id IN ({rows})"


class SQLiteVectors(VectorStore):
    """The VectorStore in a SQLite file."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @override
    async def numbers(self, tenant: str) -> int:
        return await self._database.read(lambda db: _numbers(db, tenant))

    @override
    async def of_items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for begin in range(0, len(item_ids), VECTORS_PAGE):
            rows = [(item_id,) for item_id in item_ids[begin : begin + VECTORS_PAGE]]
            found |= await self._database.read(
                lambda db, rows=rows: dict(execute_in_batches(db, SELECT, rows, before=[tenant]))  # type: ignore[misc]
            )
        return found


def refused_vector(db: sqlite3.Connection, tenant: str, entries: Sequence[ItemEntry]) -> VectorRefused | None:
    """Return why, if the vectors of these entries cannot be set."""
    given = [numbers_in(entry.vector) for entry in entries if entry.vector]
    if not given:
        return None
    held = _numbers(db, tenant) or given[0]
    return next((VectorRefused(one, held) for one in given if one != held), None)


def put_vectors(db: sqlite3.Connection, tenant: str, entries: Sequence[ItemEntry]) -> None:
    """Set the vectors of these entries, one after another."""
    for entry in entries:
        if entry.vector == NO_VECTOR:
            db.execute(DELETE, (tenant, entry.item_id))
        elif entry.vector is not None:
            db.execute(PUT, (tenant, entry.item_id, entry.vector))


def _numbers(db: sqlite3.Connection, tenant: str) -> int:
    row = db.execute(SELECT_ONE, (tenant,)).fetchone()
    return 0 if row is None else numbers_in(row[0])
