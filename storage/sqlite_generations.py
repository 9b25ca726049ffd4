"""Generations in the embedded store: what is noted of them, and letting go of their states."""

import sqlite3
import time

from storage.store import KnownGeneration, NamedGeneration

STATES_AT_ONCE = 1000  # removed in one transaction, so that no writer waits long

SCHEMA = """
CREATE TABLE generations (
    tag BLOB PRIMARY KEY,
    name TEXT NOT NULL,
    live_until REAL NOT NULL, -- Unix seconds
    is_active INTEGER NOT NULL DEFAULT 0
);
"""

ANNOUNCE = """
INSERT INTO generations (tag, name, live_until) VALUES (?, ?, ?)
ON CONFLICT (tag) DO UPDATE SET name = excluded.name, live_until = max(live_until, excluded.live_until)
"""

FORGET_STATES = """
DELETE FROM states WHERE rowid IN (SELECT rowid FROM states WHERE rowid > ? AND generation = ? ORDER BY rowid LIMIT ?)
RETURNING rowid
"""


def announce(db: sqlite3.Connection, generation: NamedGeneration, live_for_s: float) -> None:
    db.execute(ANNOUNCE, (generation.tag, generation.name, time.time() + live_for_s))


def activate(db: sqlite3.Connection, generation: NamedGeneration) -> None:
    announce(db, generation, 0)
    db.execute("UPDATE generations SET is_active = (tag = ?)", (generation.tag,))


def active(db: sqlite3.Connection) -> NamedGeneration | None:
    row = db.execute("SELECT name, tag FROM generations WHERE is_active").fetchone()
    return None if row is None else NamedGeneration(*row)


def known(db: sqlite3.Connection) -> list[KnownGeneration]:
    rows = db.execute("SELECT name, tag, is_active, live_until FROM generations ORDER BY name, tag").fetchall()
    now = time.time()
    return [
        KnownGeneration(NamedGeneration(name, tag), bool(is_active), live_until > now)
        for name, tag, is_active, live_until in rows
    ]


def forget_states(db: sqlite3.Connection, tag: bytes, after: int) -> list[int]:
    """Remove some of the generation's states behind that row; returns their rows, none when all are gone."""
    return [row for (row,) in db.execute(FORGET_STATES, (after, tag, STATES_AT_ONCE))]


def forget_name(db: sqlite3.Connection, tag: bytes) -> None:
    db.execute("DELETE FROM generations WHERE tag = ? AND NOT is_active", (tag,))


def forget_idle(db: sqlite3.Connection, before_day: int) -> int:
    """Remove some states that were last written before that day; returns how many."""
    sql = "DELETE FROM states WHERE rowid IN (SELECT rowid FROM states WHERE written_day < ? LIMIT ?)"
    return db.execute(sql, (before_day, STATES_AT_ONCE)).rowcount
