"""Tenants' item values, tallies and named values, in the embedded store."""

import json
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from storage.errors import PropertyRefused, VectorRefused
from storage.items.trends import TrendClock
from storage.records import (
    MAX_PAGE_BYTES,
    HeldProperties,
    ItemChanges,
    ItemCodes,
    ItemEntry,
    PropertyOwner,
    PropertyValue,
    Tally,
    TypeChanges,
    properties_from_json,
    properties_to_json,
    types_to_hold,
)
from storage.sqlite.batches import execute_in_batches
from storage.sqlite.items.vectors import put_vectors, refused_vector

PUT_ITEM = """
INSERT INTO items (tenant, item_id, version, title, categories, available, properties)
VALUES (:tenant, :item_id, :version, :title, :categories, :available, nullif(json_patch('{}', :properties), '{}'))
ON CONFLICT (tenant, item_id) DO UPDATE SET
    version = excluded.version,
    title = coalesce(excluded.title, title),
    categories = coalesce(excluded.categories, categories),
    available = coalesce(excluded.available, available),
    properties = nullif(json_patch(coalesce(properties, '{}'), :properties), '{}')
"""

PUT_ITEM_CODES = """
INSERT OR REPLACE INTO item_codes (tenant, item_id, generation, version, evidence, bias, history, target) {rows}
"""

DROPPED_AT_ONCE = 1000  # codes removed in one transaction, so that no writer waits long

# The newest codes stay, because they have the version of the tenant's items.
DROP_ITEM_CODES = """
DELETE FROM item_codes WHERE tenant = :tenant AND version IN (
    SELECT version FROM item_codes WHERE tenant = :tenant AND generation = :tag
    AND version < (SELECT max(version) FROM item_codes WHERE tenant = :tenant) LIMIT :limit
)
"""

SELECT_VERSION = """
SELECT max(
    (SELECT coalesce(max(version), 0) FROM items WHERE tenant = :tenant),
    (SELECT coalesce(max(version), 0) FROM item_codes WHERE tenant = :tenant)
)
"""

SELECT_CHANGES = """
SELECT version, item_id, NULL AS generation, title, categories, available, properties FROM items
WHERE tenant = :tenant AND version > :after
UNION ALL
SELECT version, item_id, generation, evidence, bias, history, target FROM item_codes
WHERE tenant = :tenant AND version > :after
ORDER BY version LIMIT :limit
"""

SELECT_PROPERTIES = "SELECT properties FROM items WHERE tenant = ? AND item_id = ?"

SELECT_TENANTS = """
SELECT tenant FROM items UNION SELECT tenant FROM item_codes UNION SELECT tenant FROM scenarios
UNION SELECT tenant FROM audit UNION SELECT tenant FROM generations UNION SELECT tenant FROM notes WHERE name = ?
"""

ADD_TALLIES = """
INSERT INTO tallies (tenant, name, count) {rows}
ON CONFLICT (tenant, name) DO UPDATE SET count = count + excluded.count
"""

REMOVE_TALLIES = "DELETE FROM tallies WHERE tenant = ? AND name IN ({rows})"

# names of tenants' values
SECRET = "secret"  # noqa: S105, the name of it
EXPERIMENT = "experiment"
PROPERTY_TYPES = "property-types"  # a JSON object, see HeldProperties
SCENARIOS_REVISION = "scenarios-revision"
KEYS_SEEN = "keys-seen"  # a text, see KeysSeen in storage/items/audit.py
TREND_CLOCK = "trend-clock"
ORDER_CLOCK = "order-clock"
ACCEPTED_ARCHIVE = "accepted-archive"  # id of the archive whose entries the log may lack


def items_version(db: sqlite3.Connection, tenant: str) -> int:
    """Return the version of the tenant's last change of an item or its codes; 0 without one."""
    (newest,) = db.execute(SELECT_VERSION, {"tenant": tenant}).fetchone()
    return int(newest)


def put_items(
    db: sqlite3.Connection, tenant: str, entries: Sequence[ItemEntry]
) -> PropertyRefused | VectorRefused | None:
    """Set the values of these items. Return the reason if nothing was set."""
    if (refused_one := refused_vector(db, tenant, entries)) is not None:
        return refused_one
    try:
        types = types_to_hold("item", [entry.properties for entry in entries])
    except PropertyRefused as refused:
        return refused  # raising it would make the other requests of the group run again
    held = hold_types(db, tenant, {"item": types})
    if isinstance(held, PropertyRefused):
        return held
    before = items_version(db, tenant)
    db.executemany(
        PUT_ITEM,
        [
            {
                "tenant": tenant,
                "item_id": entry.item_id,
                "version": number,
                "title": entry.title,
                "categories": None if entry.categories is None else json.dumps(entry.categories),
                "available": entry.available,
                "properties": _patch_of_item(db, tenant, entry, held) if entry.properties else "{}",
            }
            for number, entry in enumerate(entries, before + 1)
        ],
    )
    put_vectors(db, tenant, entries)
    return None


def put_item_codes(db: sqlite3.Connection, tenant: str, codes: Sequence[ItemCodes]) -> None:
    """Set these codes, each for its item and generation."""
    before = items_version(db, tenant)
    rows = [
        (tenant, one.item_id, one.tag, number, one.evidence, one.bias, one.history, one.target)
        for number, one in enumerate(codes, before + 1)
    ]
    execute_in_batches(db, PUT_ITEM_CODES, rows)


def drop_item_codes(db: sqlite3.Connection, tenant: str, tag: bytes) -> int:
    """Remove some codes of the generation; return how many, 0 at the end."""
    return db.execute(DROP_ITEM_CODES, {"tenant": tenant, "tag": tag, "limit": DROPPED_AT_ONCE}).rowcount


def item_changes(db: sqlite3.Connection, tenant: str, after: int, limit: int) -> ItemChanges:
    """Return the first changes whose versions are above `after`, at most `limit`."""
    db.execute("BEGIN")  # so that no property is removed, and no change missed, between the two statements
    try:
        held = held_properties(db, tenant)
        rows = db.execute(SELECT_CHANGES, {"tenant": tenant, "after": after, "limit": limit})
        changes = ((version, _changed(held, *columns)) for version, *columns in _of_a_page(rows))
        return ItemChanges.of(changes, after, held)
    finally:
        db.execute("ROLLBACK")  # nothing was written


def _of_a_page(rows: sqlite3.Cursor) -> Iterator[Sequence[Any]]:
    """Yield rows until their last columns have MAX_PAGE_BYTES."""
    size = 0
    for row in rows:
        yield row
        size += len(row[-1] or "")
        if size >= MAX_PAGE_BYTES:
            return


def tenants(db: sqlite3.Connection) -> list[str]:
    """Return the tenants with generations, items or their codes, types of properties, scenarios or an audit log."""
    return [tenant for (tenant,) in db.execute(SELECT_TENANTS, (PROPERTY_TYPES,))]


def held_properties(db: sqlite3.Connection, tenant: str) -> HeldProperties:
    """Return the properties of the tenant."""
    return HeldProperties.parse(named_value(db, tenant, PROPERTY_TYPES))


def hold_types(db: sqlite3.Connection, tenant: str, types: TypeChanges) -> HeldProperties | PropertyRefused:
    """Declare these types of properties; return all properties, or why these are refused."""
    held = held_properties(db, tenant)
    try:
        holding = held.holding(types)
    except PropertyRefused as refusal:
        return refusal
    if holding != held:
        set_named_value(db, tenant, PROPERTY_TYPES, holding.to_json())
    return holding


def patch_of(
    held: HeldProperties, owner: PropertyOwner, properties: Mapping[str, PropertyValue | None], stored: str | None
) -> str:
    """Return the JSON patch that sets these properties, and removes the dead ones that are stored."""
    dead = json.loads(stored or "{}").keys() - held.names[owner].keys() if held.removals else ()
    return properties_to_json({**dict.fromkeys(dead), **held.by_key(owner, properties)})


def _patch_of_item(db: sqlite3.Connection, tenant: str, entry: ItemEntry, held: HeldProperties) -> str:
    row = db.execute(SELECT_PROPERTIES, (tenant, entry.item_id)).fetchone() if held.removals else None
    return patch_of(held, "item", entry.properties, None if row is None else row[0])


def _changed(held: HeldProperties, item_id: str, generation: bytes | None, *columns: Any) -> ItemEntry | ItemCodes:
    if generation is not None:
        return ItemCodes(item_id, generation, *columns)
    title, categories, available, properties = columns
    known = None if categories is None else tuple(json.loads(categories))
    is_available = None if available is None else bool(available)
    stored = properties_from_json(properties) if properties else {}
    return ItemEntry(item_id, title, known, is_available, held.by_name("item", stored))


def add_tallies(db: sqlite3.Connection, tenant: str, counts: Mapping[Tally, float]) -> None:
    """Add to the tenant's counters of these names."""
    execute_in_batches(db, ADD_TALLIES, [(tenant, json.dumps(name), count) for name, count in counts.items()])


def tallies(db: sqlite3.Connection, tenant: str) -> dict[Tally, float]:
    """Return every counter of the tenant by name."""
    rows = db.execute("SELECT name, count FROM tallies WHERE tenant = ?", (tenant,))
    return {tuple(json.loads(name)): count for name, count in rows}


def remove_tallies(db: sqlite3.Connection, tenant: str, names: Iterable[Tally]) -> None:
    """Remove the tenant's counters of these names."""
    execute_in_batches(db, REMOVE_TALLIES, [(json.dumps(name),) for name in names], before=[tenant])


def named_value(db: sqlite3.Connection, tenant: str, name: str) -> str | None:
    """Return the tenant's value of this name."""
    row = db.execute("SELECT value FROM notes WHERE tenant = ? AND name = ?", (tenant, name)).fetchone()
    return None if row is None else str(row[0])


def set_named_value(db: sqlite3.Connection, tenant: str, name: str, value: str | None) -> None:
    """Set the tenant's value of this name; None deletes it."""
    db.execute("DELETE FROM notes WHERE tenant = ? AND name = ?", (tenant, name))
    if value is not None:
        db.execute("INSERT INTO notes VALUES (?, ?, ?)", (tenant, name, value))


def trend_clock(db: sqlite3.Connection, tenant: str, name: str) -> TrendClock | None:
    """Return the tenant's clock of this name; None before the first visit or order."""
    text = named_value(db, tenant, name)
    return None if text is None else TrendClock.parse(text)


def secret(db: sqlite3.Connection) -> bytes:
    """Return the 32 random bytes of the file; the first call makes them."""
    made = ("", SECRET, secrets.token_hex(32))
    db.execute("INSERT INTO notes VALUES (?, ?, ?) ON CONFLICT DO NOTHING", made)
    secret_hex = named_value(db, "", SECRET)
    assert secret_hex is not None
    return bytes.fromhex(secret_hex)
