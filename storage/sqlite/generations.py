"""The registry of generations in the embedded store."""

import sqlite3
import time
from collections.abc import AsyncIterator
from functools import partial

from typing_extensions import override

from storage.protocol import GenerationRegistry
from storage.records import MAX_LIVE_S, FoldedState, KnownGeneration, NamedGeneration, tallies_of_dropped
from storage.sqlite.database import Database
from storage.sqlite.items.tenant_values import EXPERIMENT, drop_item_codes, remove_tallies, set_named_value, tallies
from storage.sqlite.states import drop_generation, saved_states

ANNOUNCE = """
INSERT INTO generations (tenant, tag, name, live_until) VALUES (?, ?, ?, ?)
ON CONFLICT (tenant, tag) DO UPDATE SET
    name = excluded.name,
    live_until = CASE WHEN live_until > ? THEN excluded.live_until ELSE max(live_until, excluded.live_until) END
"""


class SQLiteGenerations(GenerationRegistry):
    """The GenerationRegistry of one tenant in a SQLite file."""

    def __init__(self, database: Database, tenant: str) -> None:
        self._database = database
        self._tenant = tenant

    @override
    async def announce(self, generation: NamedGeneration, live_for_s: float) -> None:
        await self._database.write(lambda db: _announce(db, self._tenant, generation, live_for_s))

    @override
    async def known(self) -> list[KnownGeneration]:
        return await self._database.read(lambda db: _known(db, self._tenant))

    @override
    async def active(self) -> NamedGeneration | None:
        return await self._database.read(lambda db: active(db, self._tenant))

    @override
    async def activate(self, generation: NamedGeneration) -> None:
        await self._database.write(lambda db: _activate(db, self._tenant, generation))

    @override
    async def set_experiment(self, text: str | None) -> None:
        await self._database.write(lambda db: set_named_value(db, self._tenant, EXPERIMENT, text))

    @override
    async def drop(self, tag: bytes) -> int:
        total, row = 0, 0
        while rows := await self._database.write(lambda db, row=row: drop_generation(db, self._tenant, tag, row)):  # type: ignore[misc]
            total, row = total + len(rows), max(rows)
        while await self._database.write(lambda db: drop_item_codes(db, self._tenant, tag)):
            pass
        await self._database.write(lambda db: _drop_name(db, self._tenant, tag))
        return total

    @override
    async def states(self, tag: bytes) -> AsyncIterator[list[FoldedState]]:
        row: int | None = 0
        while row is not None:
            page = partial(saved_states, tenant=self._tenant, tag=tag, after_row=row)
            states, row = await self._database.read_page(page)
            yield states


def active(db: sqlite3.Connection, tenant: str) -> NamedGeneration | None:
    """Return the tenant's active generation; None before the first activation."""
    row = db.execute("SELECT name, tag FROM generations WHERE tenant = ? AND is_active", (tenant,)).fetchone()
    return None if row is None else NamedGeneration(*row)


def _announce(db: sqlite3.Connection, tenant: str, generation: NamedGeneration, live_for_s: float) -> None:
    now_s = time.time()
    db.execute(ANNOUNCE, (tenant, generation.tag, generation.name, now_s + live_for_s, now_s + MAX_LIVE_S))


def _activate(db: sqlite3.Connection, tenant: str, generation: NamedGeneration) -> None:
    _announce(db, tenant, generation, 0)
    db.execute("UPDATE generations SET is_active = (tag = ?) WHERE tenant = ?", (generation.tag, tenant))


def _known(db: sqlite3.Connection, tenant: str) -> list[KnownGeneration]:
    sql = "SELECT name, tag, is_active, live_until FROM generations WHERE tenant = ? ORDER BY name, tag"
    rows = db.execute(sql, (tenant,)).fetchall()
    now_s = time.time()
    return [
        KnownGeneration(NamedGeneration(name, tag), bool(is_active), now_s < live_until <= now_s + MAX_LIVE_S)
        for name, tag, is_active, live_until in rows
    ]


def _drop_name(db: sqlite3.Connection, tenant: str, tag: bytes) -> None:
    named = [one.named for one in _known(db, tenant)]
    dropped = db.execute("DELETE FROM generations WHERE tenant = ? AND tag = ? AND NOT is_active", (tenant, tag))
    if dropped.rowcount:
        remove_tallies(db, tenant, tallies_of_dropped(tallies(db, tenant), tag, named))
