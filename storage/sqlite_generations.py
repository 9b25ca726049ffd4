"""Generations in the embedded store: what is noted of them, and letting go of their states."""

import sqlite3
import time

from storage.records import MAIN_TENANT, KnownGeneration, NamedGeneration

STATES_AT_ONCE = 1000  # removed in one transaction, so that no writer waits long

SCHEMA = """
CREATE TABLE generations (
    tag BLOB PRIMARY KEY,
    name TEXT NOT NULL,
    live_until REAL NOT NULL, -- Unix seconds
    is_active INTEGER NOT NULL DEFAULT 0
);
"""

# Until then all generations were those of `main`.
TENANTS_SCHEMA = f"""
CREATE TABLE generations_of_tenants (
    tenant TEXT NOT NULL,
    tag BLOB NOT NULL,
    name TEXT NOT NULL,
    live_until REAL NOT NULL, -- Unix seconds
    is_active INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant, tag)
);
INSERT INTO generations_of_tenants SELECT '{MAIN_TENANT}', tag, name, live_until, is_active FROM generations;
DROP TABLE generations;
ALTER TABLE generations_of_tenants RENAME TO generations;
"""  # noqa: S608, the name is a constant

ANNOUNCE = """
INSERT INTO generations (tenant, tag, name, live_until) VALUES (?, ?, ?, ?)
ON CONFLICT (tenant, tag) DO UPDATE SET name = excluded.name, live_until = max(live_until, excluded.live_until)
"""

FORGET_STATES = """
DELETE FROM states
WHERE rowid IN (SELECT rowid FROM states WHERE rowid > ? AND tenant = ? AND generation = ? ORDER BY rowid LIMIT ?)
RETURNING rowid
"""


def announce(db: sqlite3.Connection, tenant: str, generation: NamedGeneration, live_for_s: float) -> None:
    db.execute(ANNOUNCE, (tenant, generation.tag, generation.name, time.time() + live_for_s))


def activate(db: sqlite3.Connection, tenant: str, generation: NamedGeneration) -> None:
    announce(db, tenant, generation, 0)
    db.execute("UPDATE generations SET is_active = (tag = ?) WHERE tenant = ?", (generation.tag, tenant))


def active(db: sqlite3.Connection, tenant: str) -> NamedGeneration | None:
    row = db.execute("SELECT name, tag FROM generations WHERE tenant = ? AND is_active", (tenant,)).fetchone()
    return None if row is None else NamedGeneration(*row)


def known(db: sqlite3.Connection, tenant: str) -> list[KnownGeneration]:
    sql = "SELECT name, tag, is_active, live_until FROM generations WHERE tenant = ? ORDER BY name, tag"
    rows = db.execute(sql, (tenant,)).fetchall()
    now = time.time()
    return [
        KnownGeneration(NamedGeneration(name, tag), bool(is_active), live_until > now)
        for name, tag, is_active, live_until in rows
    ]


def forget_states(db: sqlite3.Connection, tenant: str, tag: bytes, after: int) -> list[int]:
    """Remove some of the tenant's states of the generation behind that row; returns their rows, none at the end."""
    return [row for (row,) in db.execute(FORGET_STATES, (after, tenant, tag, STATES_AT_ONCE))]


def forget_name(db: sqlite3.Connection, tenant: str, tag: bytes) -> None:
    db.execute("DELETE FROM generations WHERE tenant = ? AND tag = ? AND NOT is_active", (tenant, tag))


def drop_idle_states(db: sqlite3.Connection, before_day: int) -> int:
    """Remove some states that were last written before that day; returns how many."""
    sql = "DELETE FROM states WHERE rowid IN (SELECT rowid FROM states WHERE written_day < ? LIMIT ?)"
    return db.execute(sql, (before_day, STATES_AT_ONCE)).rowcount
