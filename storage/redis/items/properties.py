"""Properties in Redis: the types that tenants hold, and how scripts take values."""

import json
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from storage.errors import PropertyRefused
from storage.protocol import PropertyStore
from storage.records import (
    MAX_PROPERTIES,
    PropertyTypes,
    PropertyValue,
    parse_property_types,
    property_from_json,
    property_to_json,
)
from storage.redis.layout.keys import ITEMS_FIELD
from storage.redis.layout.stream_entries import compact_json
from storage.redis.nodes import Argument
from storage.redis.scripts.items import DECLARE_TYPES
from storage.redis.session.redis_session import RedisSession


class RedisProperties(PropertyStore):
    """The types of all tenants' properties. Those of a tenant are one value, beside its items."""

    def __init__(self, session: RedisSession) -> None:
        self._session = session

    @override
    async def types(self, tenant: str) -> PropertyTypes:
        await self._session.require_open()
        return parse_property_types(await self._session.call("GET", self._session.keys.items(tenant).property_types))

    @override
    async def declare(self, tenant: str, types: PropertyTypes) -> None:
        await register_tenant(self._session, tenant)
        keys = [self._session.keys.items(tenant).property_types]
        args: list[Argument] = [compact_json(types), MAX_PROPERTIES]
        require_held(types, await self._session.write(DECLARE_TYPES, keys, args, wait_for_replicas=True))


async def register_tenant(session: RedisSession, tenant: str) -> None:
    """Note, before its first item or property, that the tenant has some."""
    await session.require_open()
    await session.note(f"{ITEMS_FIELD}{tenant}", "1")


def require_held(types: PropertyTypes, reply: Any) -> None:
    """Raise PropertyRefused where a script has replied that it could not hold one of the types."""
    if isinstance(reply, list):
        name, held = (part.decode() for part in reply)
        given = {of_owner[name] for of_owner in types.values() if name in of_owner} - {held}
        raise PropertyRefused(name, given.pop(), held or None)


def properties_to_texts(properties: Mapping[str, PropertyValue | None]) -> str:
    """Return the JSON object of properties that PUT_ITEMS takes."""
    texts = {
        name: None if value is None else json.dumps(property_to_json(value), ensure_ascii=False)
        for name, value in properties.items()
    }
    return json.dumps(texts, ensure_ascii=False)


def properties_from_texts(stored: bytes) -> dict[str, PropertyValue]:
    """Return the properties in the JSON object that is stored."""
    return {name: property_from_json(json.loads(text)) for name, text in json.loads(stored).items()}
