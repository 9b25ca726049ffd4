"""The types of tenants' properties, and users' properties, in the embedded store."""

import sqlite3
from collections.abc import AsyncIterator, Mapping

from typing_extensions import override

from storage.errors import PropertyRefused, StorageBusy
from storage.protocol import PropertyStore
from storage.records import (
    USERS_PAGE,
    PropertyTypes,
    PropertyValue,
    properties_from_json,
    properties_to_json,
    types_to_hold,
)
from storage.sqlite.append import BEING_ERASED
from storage.sqlite.database import Database
from storage.sqlite.items.tenant_values import hold_types, property_types
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
    async def types(self, tenant: str) -> PropertyTypes:
        return await self._database.read(lambda db: property_types(db, tenant))

    @override
    async def declare(self, tenant: str, types: PropertyTypes) -> None:
        await self._database.write(lambda db: hold_types(db, tenant, types))

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
                yield tenant, user_id, properties_from_json(properties)
                last = (tenant, user_id)


def _put(
    db: sqlite3.Connection,
    tenant: str,
    user_id: str,
    properties: Mapping[str, PropertyValue | None],
    types: PropertyTypes,
) -> PropertyRefused | StorageBusy | None:
    """Set a user's properties; return why nothing is set, if it is not."""
    target = resolve_alias(db, tenant, user_id)
    if target == ERASED:
        return StorageBusy(BEING_ERASED)
    if (refusal := hold_types(db, tenant, types)) is not None:
        return refusal
    db.execute(PUT, {"tenant": tenant, "user_id": target, "properties": properties_to_json(properties)})
    db.execute(DELETE_EMPTY, (tenant, target))
    return None


def _of_user(db: sqlite3.Connection, tenant: str, user_id: str) -> dict[str, PropertyValue]:
    row = db.execute(SELECT, (tenant, resolve_alias(db, tenant, user_id))).fetchone()
    return {} if row is None else properties_from_json(row[0])


def _page(db: sqlite3.Connection, tenant: str, user_id: str) -> list[tuple[str, str, str]]:
    return db.execute(SELECT_PAGE, (tenant, user_id, USERS_PAGE)).fetchall()
