"""What tenants say of their items, in the embedded store."""

import json
import sqlite3
from collections.abc import Sequence

from storage.records import ItemChanges, ItemEntry

# A column is NULL while its part was never said.
SCHEMA = """
CREATE TABLE items (
    tenant TEXT NOT NULL,
    item_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    title TEXT,
    categories TEXT, -- a JSON array
    available INTEGER,
    PRIMARY KEY (tenant, item_id)
) WITHOUT ROWID;
CREATE UNIQUE INDEX items_by_version ON items (tenant, version);
"""

PUT = """
INSERT INTO items (tenant, item_id, version, title, categories, available) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (tenant, item_id) DO UPDATE SET
    version = excluded.version,
    title = coalesce(excluded.title, title),
    categories = coalesce(excluded.categories, categories),
    available = coalesce(excluded.available, available)
"""

SELECT_CHANGES = """
SELECT version, item_id, title, categories, available FROM items
WHERE tenant = ? AND version > ? ORDER BY version LIMIT ?
"""


def version(db: sqlite3.Connection, tenant: str) -> int:
    (newest,) = db.execute("SELECT coalesce(max(version), 0) FROM items WHERE tenant = ?", (tenant,)).fetchone()
    return int(newest)


def put(db: sqlite3.Connection, tenant: str, entries: Sequence[ItemEntry]) -> None:
    before = version(db, tenant)
    db.executemany(
        PUT,
        [
            (tenant, entry.item_id, number, entry.title, _encoded(entry.categories), entry.available)
            for number, entry in enumerate(entries, before + 1)
        ],
    )


def changes(db: sqlite3.Connection, tenant: str, after: int, limit: int) -> ItemChanges:
    entries, newest = [], after
    for newest, item_id, title, categories, available in db.execute(SELECT_CHANGES, (tenant, after, limit)):  # noqa: B007
        known = None if categories is None else tuple(json.loads(categories))
        entries.append(ItemEntry(item_id, title, known, None if available is None else bool(available)))
    return ItemChanges(entries, newest)


def tenants(db: sqlite3.Connection) -> list[str]:
    return [tenant for (tenant,) in db.execute("SELECT DISTINCT tenant FROM items")]


def _encoded(categories: tuple[str, ...] | None) -> str | None:
    return None if categories is None else json.dumps(categories)
