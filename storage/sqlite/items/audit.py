"""Audit logs of tenants in the embedded store."""

import sqlite3
from collections.abc import Sequence

from typing_extensions import override

from storage.items.audit import AuditEntry, AuditLog, KeysSeen, NumberedEntry
from storage.sqlite.database import Database
from storage.sqlite.items.tenant_values import KEYS_SEEN, named_value, set_named_value

INSERT = """
INSERT INTO audit (tenant, number, entry)
SELECT :tenant, coalesce(max(number), 0) + 1, :entry FROM audit WHERE tenant = :tenant
"""
SELECT = "SELECT number, entry FROM audit WHERE tenant = ? AND number > ? ORDER BY number LIMIT ?"


class SQLiteAudit(AuditLog):
    """The AuditLog in a SQLite file, whose triggers refuse to change or remove an entry."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @override
    async def append(self, tenant: str, entries: Sequence[AuditEntry], keys: KeysSeen | None = None) -> bool:
        return await self._database.write(lambda db: _append(db, tenant, entries, keys))

    @override
    async def entries(self, tenant: str, *, after: int = 0, limit: int = 100) -> list[NumberedEntry]:
        rows = await self._database.read(lambda db: db.execute(SELECT, (tenant, after, limit)).fetchall())
        return [NumberedEntry(number, AuditEntry.from_json(entry)) for number, entry in rows]

    @override
    async def keys_seen(self, tenant: str) -> str:
        return await self._database.read(lambda db: named_value(db, tenant, KEYS_SEEN) or "")


def _append(db: sqlite3.Connection, tenant: str, entries: Sequence[AuditEntry], keys: KeysSeen | None) -> bool:
    if keys is not None:
        if (named_value(db, tenant, KEYS_SEEN) or "") != keys.believed:
            return False
        set_named_value(db, tenant, KEYS_SEEN, keys.now)
    db.executemany(INSERT, [{"tenant": tenant, "entry": entry.to_json()} for entry in entries])
    return True
