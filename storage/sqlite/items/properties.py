"""The types of tenants' properties, and users' properties, in the embedded store."""

import sqlite3
from collections.abc import AsyncIterator, Mapping

from typing_extensions import override

from storage.errors import PropertyRefused, StorageBusy
from storage.protocol import PropertyStore
from storage.records import (
    USERS_PAGE,
    HeldProperties,
    PropertyValue,
    TypeChanges,
    properties_from_json,
    types_to_hold,
)
from storage.sqlite.append import BEING_ERASED
from storage.sqlite.database import Database
from storage.sqlite.items.tenant_values import held_properties, hold_types, patch_of
from storage.sqlite.log import ERASED, resolve_alias

PUT = """
INSERT INTO user_properties (tenant, user_id, properties) VALUES (:tenant, :user_id, json_patch('{}', :properties))
ON CONFLICT DO UPDATE SET properties = json_patch(properties, :properties)
"""
DELETE_EMPTY = "DELETE FROM user_properties WHERE tenant = ? AND user_id = ? AND properties = '{}'"
SELECT = "SELECT properties FROM user_properties WHERE tenant = ? AND user_id = ?"
SELECT_PAGE = """
SELECT tenant, user_id, properties FROM user_properties WHERE (tenant, user_id) > (?, ?)
ORDER BY tenant, user_id LIMIT ?
"""


class SQLiteProperties(PropertyStore):
    """The PropertyStore in a SQLite file."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @override
    async def held(self, tenant: str) -> HeldProperties:
        return await self._database.read(lambda db: held_properties(db, tenant))

    @override
    async def declare(self, tenant: str, types: TypeChanges) -> None:
        await self._database.write(lambda db: _declare(db, tenant, types))

    @override
    async def put_of_user(self, tenant: str, user_id: str, properties: Mapping[str, PropertyValue | None]) -> None:
        types = types_to_hold("user", [properties])
        await self._database.write(lambda db: _put(db, tenant, user_id, properties, {"user": types}))

    @override
    async def of_user(self, tenant: str, user_id: str) -> dict[str, PropertyValue]:
        return await self._database.read(lambda db: _of_user(db, tenant, user_id))

    @override
    async def of_users(self) -> AsyncIterator[tuple[str, str, dict[str, PropertyValue]]]:
        last = ("", "")
        while rows := await self._database.read_page(lambda db, last=last: _page(db, *last)):  # type: ignore[misc]
            for tenant, user_id, properties in rows:
                last = (tenant, user_id)
                if properties:
                    yield tenant, user_id, properties


def _declare(db: sqlite3.Connection, tenant: str, types: TypeChanges) -> PropertyRefused | None:
    """Declare these types; return why, if they are refused."""
    held = hold_types(db, tenant, types)
    return held if isinstance(held, PropertyRefused) else None


def _put(
    db: sqlite3.Connection,
    tenant: str,
    user_id: str,
    properties: Mapping[str, PropertyValue | None],
    types: TypeChanges,
) -> PropertyRefused | StorageBusy | None:
    """Set a user's properties; return why, if nothing was set."""
    target = resolve_alias(db, tenant, user_id)
    if target == ERASED:
        return StorageBusy(BEING_ERASED)
    held = hold_types(db, tenant, types)
    if isinstance(held, PropertyRefused):
        return held
    stored = db.execute(SELECT, (tenant, target)).fetchone() if held.removals else None
    patch = patch_of(held, "user", properties, None if stored is None else stored[0])
    db.execute(PUT, {"tenant": tenant, "user_id": target, "properties": patch})
    db.execute(DELETE_EMPTY, (tenant, target))
    return None


def _of_user(db: sqlite3.Connection, tenant: str, user_id: str) -> dict[str, PropertyValue]:
    held = held_properties(db, tenant)
    row = db.execute(SELECT, (tenant, resolve_alias(db, tenant, user_id))).fetchone()
    return {} if row is None else dict(held.by_name("user", properties_from_json(row[0])))


def _page(db: sqlite3.Connection, tenant: str, user_id: str) -> list[tuple[str, str, dict[str, PropertyValue]]]:
    rows = db.execute(SELECT_PAGE, (tenant, user_id, USERS_PAGE)).fetchall()
    held = {tenant: held_properties(db, tenant) for tenant in {tenant for tenant, _, _ in rows}}
    return [
        (tenant, user_id, dict(held[tenant].by_name("user", properties_from_json(properties))))
        for tenant, user_id, properties in rows
    ]
