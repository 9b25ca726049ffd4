"""What tenants set for their items, the items' trends, and a tenant's tallies and notes, in the embedded store."""

import json
import secrets
import sqlite3
from collections.abc import Mapping, Sequence

from storage.records import ItemChanges, ItemEntry, Tally
from storage.sqlite.log import execute_in_batches
from storage.trends import Trends, added, forgotten_below

PUT_ITEM = """
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

SELECT_TRENDS = "SELECT item_id, trend FROM trends WHERE tenant = ? AND item_id IN ({rows})"

ADD_TALLY = """
INSERT INTO tallies (tenant, name, count) VALUES (?, ?, ?)
ON CONFLICT (tenant, name) DO UPDATE SET count = count + excluded.count
"""

# names of notes
SECRET = "secret"  # noqa: S105, the name of one
EXPERIMENT = "experiment"


def items_version(db: sqlite3.Connection, tenant: str) -> int:
    """Return the version of the tenant's last change of an item; 0 without one."""
    (newest,) = db.execute("SELECT coalesce(max(version), 0) FROM items WHERE tenant = ?", (tenant,)).fetchone()
    return int(newest)


def put_items(db: sqlite3.Connection, tenant: str, entries: Sequence[ItemEntry]) -> None:
    """Set what these entries say of their items; the parts that are None stay as they were."""
    before = items_version(db, tenant)
    db.executemany(
        PUT_ITEM,
        [
            (tenant, entry.item_id, number, entry.title, _encoded(entry.categories), entry.available)
            for number, entry in enumerate(entries, before + 1)
        ],
    )


def item_changes(db: sqlite3.Connection, tenant: str, after: int, limit: int) -> ItemChanges:
    """Return the first `limit` items whose versions are above `after`."""
    entries, newest = [], after
    for newest, item_id, title, categories, available in db.execute(SELECT_CHANGES, (tenant, after, limit)):  # noqa: B007
        known = None if categories is None else tuple(json.loads(categories))
        entries.append(ItemEntry(item_id, title, known, None if available is None else bool(available)))
    return ItemChanges(entries, newest)


def item_tenants(db: sqlite3.Connection) -> list[str]:
    """Return the tenants that have set anything for an item."""
    return [tenant for (tenant,) in db.execute("SELECT DISTINCT tenant FROM items")]


def _encoded(categories: tuple[str, ...] | None) -> str | None:
    return None if categories is None else json.dumps(categories)


def add_trends(db: sqlite3.Connection, tenant: str, trends: Trends) -> None:
    """Add to the items' trends, and delete those that have become negligible."""
    before = dict(execute_in_batches(db, SELECT_TRENDS, [(item_id,) for item_id in trends], before=[tenant]))
    rows = [
        (tenant, item_id, added(before[item_id], trend) if item_id in before else trend)
        for item_id, trend in trends.items()
    ]
    db.executemany("INSERT OR REPLACE INTO trends VALUES (?, ?, ?)", rows)
    db.execute("DELETE FROM trends WHERE tenant = ? AND trend < ?", (tenant, forgotten_below(trends.values())))


def highest_trends(db: sqlite3.Connection, tenant: str, limit: int) -> dict[str, float]:
    """Return the items with the highest trends, highest first."""
    sql = "SELECT item_id, trend FROM trends WHERE tenant = ? ORDER BY trend DESC, item_id LIMIT ?"
    return dict(db.execute(sql, (tenant, limit)).fetchall())


def add_tallies(db: sqlite3.Connection, tenant: str, counts: Mapping[Tally, int]) -> None:
    """Add to the tenant's counters of these names."""
    db.executemany(ADD_TALLY, [(tenant, json.dumps(name), count) for name, count in counts.items()])


def tallies(db: sqlite3.Connection, tenant: str) -> dict[Tally, int]:
    """Return every counter of the tenant by name."""
    rows = db.execute("SELECT name, count FROM tallies WHERE tenant = ?", (tenant,))
    return {tuple(json.loads(name)): count for name, count in rows}


def note(db: sqlite3.Connection, tenant: str, name: str) -> str | None:
    """Return the tenant's note of this name."""
    row = db.execute("SELECT value FROM notes WHERE tenant = ? AND name = ?", (tenant, name)).fetchone()
    return None if row is None else str(row[0])


def set_note(db: sqlite3.Connection, tenant: str, name: str, value: str | None) -> None:
    """Set the tenant's note of this name; None deletes it."""
    db.execute("DELETE FROM notes WHERE tenant = ? AND name = ?", (tenant, name))
    if value is not None:
        db.execute("INSERT INTO notes VALUES (?, ?, ?)", (tenant, name, value))


def secret(db: sqlite3.Connection) -> bytes:
    """Return the 32 random bytes of the file; the first call makes them."""
    made = ("", SECRET, secrets.token_hex(32))
    db.execute("INSERT INTO notes VALUES (?, ?, ?) ON CONFLICT DO NOTHING", made)
    found = note(db, "", SECRET)
    assert found is not None
    return bytes.fromhex(found)
