"""What is counted of a tenant, and what is noted once, in the embedded store."""

import secrets
import sqlite3
from collections.abc import Mapping

SCHEMA = """
CREATE TABLE tallies (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (tenant, name)
) WITHOUT ROWID;
CREATE TABLE notes (
    tenant TEXT NOT NULL, -- empty for what is everybody's
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (tenant, name)
) WITHOUT ROWID;
"""

ADD = """
INSERT INTO tallies (tenant, name, count) VALUES (?, ?, ?)
ON CONFLICT (tenant, name) DO UPDATE SET count = count + excluded.count
"""
SECRET = "secret"  # noqa: S105, the name of one
EXPERIMENT = "experiment"


def add(db: sqlite3.Connection, tenant: str, counts: Mapping[str, int]) -> None:
    db.executemany(ADD, [(tenant, name, count) for name, count in counts.items()])


def tallies(db: sqlite3.Connection, tenant: str) -> dict[str, int]:
    return dict(db.execute("SELECT name, count FROM tallies WHERE tenant = ?", (tenant,)).fetchall())


def secret(db: sqlite3.Connection) -> bytes:
    """Made by whoever asks first."""
    made = ("", SECRET, secrets.token_hex(32))
    db.execute("INSERT INTO notes VALUES (?, ?, ?) ON CONFLICT DO NOTHING", made)
    found = note(db, "", SECRET)
    assert found is not None
    return bytes.fromhex(found)


def note(db: sqlite3.Connection, tenant: str, name: str) -> str | None:
    row = db.execute("SELECT value FROM notes WHERE tenant = ? AND name = ?", (tenant, name)).fetchone()
    return None if row is None else str(row[0])


def set_note(db: sqlite3.Connection, tenant: str, name: str, value: str | None) -> None:
    db.execute("DELETE FROM notes WHERE tenant = ? AND name = ?", (tenant, name))
    if value is not None:
        db.execute("INSERT INTO notes VALUES (?, ?, ?)", (tenant, name, value))
