"""Versions of tenants' scenarios in the embedded store."""

import secrets
import sqlite3

from typing_extensions import override

from storage.protocol import ScenarioStore
from storage.records import MAX_SCENARIO_VERSIONS, Scenarios
from storage.sqlite.database import Database
from storage.sqlite.items.tenant_values import SCENARIOS_REVISION, named_value, set_named_value

INSERT = "INSERT INTO scenarios (tenant, name, version) VALUES (?, ?, ?)"
SELECT_NEWEST = """
SELECT name, version FROM scenarios
WHERE number IN (SELECT max(number) FROM scenarios WHERE tenant = ? GROUP BY name) ORDER BY name
"""
SELECT_VERSIONS = "SELECT version FROM scenarios WHERE tenant = ? AND name = ? ORDER BY number"
DELETE = "DELETE FROM scenarios WHERE tenant = ? AND name = ?"
DELETE_OLDEST = f"""
DELETE FROM scenarios WHERE number IN (
    SELECT number FROM scenarios WHERE tenant = ? AND name = ?
    ORDER BY number DESC LIMIT -1 OFFSET {MAX_SCENARIO_VERSIONS}
)
"""  # noqa: S608, a constant


class SQLiteScenarios(ScenarioStore):
    """The ScenarioStore in a SQLite file."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @override
    async def revision(self, tenant: str) -> str:
        return await self._database.read(lambda db: _revision(db, tenant))

    @override
    async def scenarios(self, tenant: str) -> Scenarios:
        return await self._database.read(lambda db: _scenarios(db, tenant))

    @override
    async def versions(self, tenant: str, name: str) -> list[str]:
        return await self._database.read(
            lambda db: [version for (version,) in db.execute(SELECT_VERSIONS, (tenant, name))]
        )

    @override
    async def add(self, tenant: str, name: str, text: str, *, believed: str, dropped: str | None = None) -> bool:
        return await self._database.write(lambda db: _add(db, tenant, name, text, believed, dropped))


def _revision(db: sqlite3.Connection, tenant: str) -> str:
    return named_value(db, tenant, SCENARIOS_REVISION) or ""


def _scenarios(db: sqlite3.Connection, tenant: str) -> Scenarios:
    revision = _revision(db, tenant)  # before the versions: newer ones are then read again
    return Scenarios(revision, dict(db.execute(SELECT_NEWEST, (tenant,))))


def _add(db: sqlite3.Connection, tenant: str, name: str, text: str, believed: str, dropped: str | None) -> bool:
    if _revision(db, tenant) != believed:
        return False
    db.execute(INSERT, (tenant, name, text))
    db.execute(DELETE_OLDEST, (tenant, name))
    if dropped is not None:
        db.execute(DELETE, (tenant, dropped))
    set_named_value(db, tenant, SCENARIOS_REVISION, secrets.token_hex(8))
    return True
