"""Properties in Redis: the types that tenants declare, users' properties, and the values passed to scripts."""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from typing_extensions import override

from storage.errors import PropertyRefused, StorageError, StorageUnavailable
from storage.protocol import PropertyStore
from storage.records import (
    MAX_PROPERTIES,
    USERS_PAGE,
    HeldProperties,
    PropertyValue,
    TypeChanges,
    property_from_json,
    property_to_json,
    types_to_hold,
)
from storage.redis.connections.nodes import Argument
from storage.redis.corrections.undo_and_merge import CONTENTION, RETRY_FOR_S, RedisCorrections
from storage.redis.layout.head import Head
from storage.redis.layout.keys import ITEMS_FIELD, User
from storage.redis.layout.stream_entries import compact_json
from storage.redis.scripts.items import DECLARE_TYPES
from storage.redis.scripts.user_properties import PUT_USER_PROPERTIES, READ_USER_PROPERTIES, put_properties_keys
from storage.redis.session.redis_session import RedisSession

VALUE_BYTES = 32  # for a small property's name and value


class RedisProperties(PropertyStore):
    """The property types of all tenants, one value per tenant next to its items, and users' properties."""

    def __init__(self, session: RedisSession, corrections: RedisCorrections) -> None:
        self._session = session
        self._corrections = corrections

    @override
    async def held(self, tenant: str) -> HeldProperties:
        await self._session.require_open()
        return HeldProperties.parse(await self._session.call("GET", self._session.keys.items(tenant).property_types))

    @override
    async def declare(self, tenant: str, types: TypeChanges) -> None:
        await self._hold(tenant, types)

    async def _hold(self, tenant: str, types: TypeChanges) -> HeldProperties:
        await register_tenant(self._session, tenant)
        keys = [self._session.keys.items(tenant).property_types]
        args: list[Argument] = [compact_json(types), MAX_PROPERTIES]
        reply = await self._session.write(DECLARE_TYPES, keys, args, wait_for_replicas=True)
        require_accepted_types(types, reply)
        return HeldProperties.parse(reply)

    @override
    async def put_of_user(self, tenant: str, user_id: str, properties: Mapping[str, PropertyValue | None]) -> None:
        types = types_to_hold("user", [properties])
        user = self._session.keys.user(tenant, user_id)
        _encoded(properties)  # first, to not declare a type for a value that cannot be stored
        held = await (self._hold(tenant, {"user": types}) if types else self.held(tenant))
        live_keys = compact_json(held.names["user"] if held.removals else {})
        patch: list[Argument] = [_encoded(held.by_key("user", properties)), 0, live_keys, held.removals]
        give_up_s = time.monotonic() + RETRY_FOR_S
        while not await self._put(user, patch):
            if time.monotonic() > give_up_s:
                raise StorageUnavailable(CONTENTION, "contention")

    async def _put(self, user: User, patch: Sequence[Argument]) -> bool:
        """Set properties of the user, or of the user's merge target; return False if that changes meanwhile.

        An erasure removes the heads that lead to other users, and then advances the numbers of the others' partitions.
        So if the user still leads to the target after the target was read, the target is erased afterwards or nothing
        is set.
        """
        await self._session.require_open()
        chain = await self._corrections.merge_chain(user)
        target = chain[-1]
        believed: list[Argument] = []
        if target != user:
            seq, value = await self._session.call("MGET", target.seq, target.head)
            if await self._corrections.merge_chain(user) != chain:
                return False
            believed = [value or b"", seq or b"0"]
        await self._corrections.require_whole(*chain)
        arguments = [target.name, *patch, *believed]
        keys = put_properties_keys(target)
        return bool(await self._session.write(PUT_USER_PROPERTIES, keys, arguments, wait_for_replicas=True))

    @override
    async def of_user(self, tenant: str, user_id: str) -> dict[str, PropertyValue]:
        await self._session.require_open()
        user = self._session.keys.user(tenant, user_id)
        while True:
            head, stored = await self._session.run(READ_USER_PROPERTIES, [user.head, user.properties], [user.name])
            if Head.of(head).merge is None:
                await self._session.trust.require_whole(user.log)
                return dict((await self.held(tenant)).by_name("user", properties_from_texts(stored or b"{}")))
            user = await self._corrections.resolve(user)

    @override
    async def of_users(self) -> AsyncIterator[tuple[str, str, dict[str, PropertyValue]]]:
        await self._session.require_open()
        for number in range(self._session.keys.partitions):
            partition, cursor = self._session.keys.partition(number), 0
            while True:
                key = User(partition, "").properties
                cursor, found = await self._session.call("HSCAN", key, cursor, "COUNT", USERS_PAGE)
                users = {User(partition, name.decode()): stored for name, stored in found.items()}
                held = {tenant: await self.held(tenant) for tenant in {user.tenant for user in users}}
                for user, stored in users.items():
                    if properties := held[user.tenant].by_name("user", properties_from_texts(stored)):
                        yield user.tenant, user.user_id, dict(properties)
                if not cursor:
                    break


def _encoded(properties: Mapping[str, PropertyValue | None]) -> bytes:
    try:
        return properties_to_texts(properties).encode()
    except UnicodeEncodeError as exc:
        raise StorageError(f"properties cannot be stored: {exc}") from exc


async def register_tenant(session: RedisSession, tenant: str) -> None:
    """Register the tenant before its first generation, item, property, scenario or audited action is stored."""
    await session.require_open()
    await session.note(f"{ITEMS_FIELD}{tenant}", "1")


def require_accepted_types(types: TypeChanges, reply: Any) -> None:
    """Raise PropertyRefused if a script has replied that it rejects one of the types."""
    if isinstance(reply, list):
        name, held = (part.decode() for part in reply)
        given = {of_owner[name] for of_owner in types.values() if name in of_owner} - {held}
        raise PropertyRefused(name, given.pop() or "", held or None)


def properties_to_texts(properties: Mapping[str, PropertyValue | None]) -> str:
    """Return the JSON object of properties for PUT_ITEMS."""
    return json.dumps(_texts(properties), ensure_ascii=False)


def with_properties(stored: bytes, properties: Mapping[str, PropertyValue | None]) -> str:
    """Return the stored JSON object after these properties are set, while none was ever removed from the catalogue."""
    texts = json.loads(stored) | _texts(properties)
    return json.dumps({name: text for name, text in texts.items() if text is not None}, ensure_ascii=False)


def _texts(properties: Mapping[str, PropertyValue | None]) -> dict[str, str | None]:
    return {
        name: None if value is None else json.dumps(property_to_json(value), ensure_ascii=False)
        for name, value in properties.items()
    }


def properties_from_texts(stored: str | bytes) -> dict[str, PropertyValue]:
    """Return the properties in a stored JSON object."""
    return {name: property_from_json(json.loads(text)) for name, text in json.loads(stored).items()}
