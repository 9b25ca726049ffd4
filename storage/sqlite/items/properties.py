"""The types of tenants' properties, in the embedded store."""

from typing_extensions import override

from storage.protocol import PropertyStore
from storage.records import PropertyTypes
from storage.sqlite.database import Database
from storage.sqlite.items.tenant_values import hold_types, property_types


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
