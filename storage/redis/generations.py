"""The registry of a tenant's generations in Redis, and the deletion of their states."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from typing_extensions import override

from storage.protocol import GenerationRegistry
from storage.records import (
    MAX_LIVE_S,
    FoldedState,
    HeldProperties,
    KnownGeneration,
    NamedGeneration,
    TenantPointers,
    tallies_of_dropped,
)
from storage.redis.connections.nodes import Argument, Command, storage_error
from storage.redis.items.properties import register_tenant
from storage.redis.layout.head import SEQ_DIGITS
from storage.redis.layout.keys import states_of, user_of
from storage.redis.layout.stream_entries import compact_json
from storage.redis.session.redis_session import RedisSession

READ_AT_ONCE = 64  # states, about 250 kB
REMOVED_AT_ONCE = 1_000  # tallies, or codes of items


class RedisGenerations(GenerationRegistry):
    """The generations of one tenant."""

    def __init__(self, session: RedisSession, tenant: str) -> None:
        self._session = session
        self._keys = session.keys
        self._tenant = tenant

    @override
    async def announce(self, generation: NamedGeneration, live_for_s: float) -> None:
        await self._set_name(generation)
        live_for_ms = round(live_for_s * 1000)
        if live_for_ms:  # else a process that serves it would be live no longer
            await self._call("SET", self._keys.live(self._tenant, generation.tag), 1, "PX", live_for_ms)

    @override
    async def known(self) -> list[KnownGeneration]:
        active = await self.active()
        return [
            KnownGeneration(
                generation,
                is_active=active is not None and active.tag == generation.tag,
                is_live=0
                <= await self._call("PTTL", self._keys.live(self._tenant, generation.tag))
                <= MAX_LIVE_S * 1000,
            )
            for generation in await self._named()
        ]

    @override
    async def active(self) -> NamedGeneration | None:
        return _parse_pointer(await self._call("GET", self._keys.active(self._tenant)))

    @override
    async def activate(self, generation: NamedGeneration) -> None:
        key = self._keys.active(self._tenant)
        await self._session.require_open()
        await self._session.trust.require(key)
        # before the name: a drop at the same time looks here after it has removed the name
        await self._call("SET", key, f"{generation.tag.hex()} {generation.name}")
        await self._set_name(generation)

    @override
    async def set_experiment(self, text: str | None) -> None:
        key = self._keys.experiment(self._tenant)
        await self._session.require_open()
        await self._session.trust.require(key)
        await (self._call("DEL", key) if text is None else self._call("SET", key, text))

    @override
    async def drop(self, tag: bytes) -> int:
        await self._session.require_open()
        total = deleted = await self._delete_states(tag)
        while deleted and self._session.servers.slots.is_cluster:  # keys may have moved to a scanned node
            deleted = await self._delete_states(tag)
            total += deleted
        # while its name is known, so that a drop that was cut off can be repeated
        await self._remove_item_codes(tag)
        await self._remove_tallies(tag)
        await self._call("HDEL", self._keys.generations(self._tenant), tag.hex())
        active = await self.active()
        if active is not None and active.tag == tag:
            await self._set_name(active)
        return total

    async def _remove_item_codes(self, tag: bytes) -> None:
        """Remove the codes of the generation, except newest ones: they have the version of the tenant's items."""
        keys, cursor, end_of_member = self._keys.items(self._tenant), 0, f',"{tag.hex()}"]'.encode()
        newest = int(await self._call("GET", keys.version) or 0)
        while True:
            cursor, found = await self._call("ZSCAN", keys.code_changes, cursor, "COUNT", REMOVED_AT_ONCE)
            old = [member for member, version in found if member.endswith(end_of_member) and version != newest]
            if old:
                removals = [Command.of("ZREM", keys.code_changes, *old), Command.of("HDEL", keys.codes, *old)]
                await self._session.servers.call_all(removals, in_transaction=True)
            if cursor == 0:
                return

    async def _remove_tallies(self, tag: bytes) -> None:
        key = self._keys.items(self._tenant).tallies
        counted = [tuple(json.loads(name)) for name in await self._call("HKEYS", key)]
        dropped = tallies_of_dropped(counted, tag, await self._named())
        for start in range(0, len(dropped), REMOVED_AT_ONCE):
            await self._call("HDEL", key, *map(compact_json, dropped[start : start + REMOVED_AT_ONCE]))

    @override
    async def states(self, tag: bytes) -> AsyncIterator[list[FoldedState]]:
        await self._session.require_open()
        async for keys in self._session.partition_keys(states_of(self._tenant, tag)):
            for start in range(0, len(keys), READ_AT_ONCE):
                yield await self._read_states(keys[start : start + READ_AT_ONCE])

    async def _read_states(self, keys: Sequence[str]) -> list[FoldedState]:
        states = []
        for key, found in zip(keys, await self._session.servers.read([[key] for key in keys]), strict=True):
            if isinstance(found, Exception):
                raise storage_error(found) from found
            (stored,) = found
            if stored is not None and stored[:SEQ_DIGITS].isdigit():  # otherwise it has expired, or is damaged
                through_seq = int(stored[:SEQ_DIGITS])
                states.append(FoldedState(self._tenant, user_of(key).user_id, through_seq, stored[SEQ_DIGITS:]))
        return states

    async def pointers(self) -> TenantPointers:
        """Return the values that every process polls, in one round trip."""
        await self._session.require_open()
        keys = [
            self._keys.active(self._tenant),
            self._keys.items(self._tenant).version,
            self._keys.experiment(self._tenant),
            self._keys.items(self._tenant).property_types,
        ]
        values: list[bytes | None] = []
        for found in await self._session.servers.read([[key] for key in keys]):
            if isinstance(found, Exception):
                raise storage_error(found) from found
            values += found
        active, version, experiment, held = values
        return TenantPointers(
            _parse_pointer(active),
            int(version or 0),
            None if experiment is None else experiment.decode(),
            HeldProperties.parse(held),
        )

    async def _delete_states(self, tag: bytes) -> int:
        """Delete all states of the generation that a scan finds; return their number."""
        total = 0
        async for keys in self._session.partition_keys(states_of(self._tenant, tag)):
            commands = [Command.of("UNLINK", key) for key in keys]
            total += sum(await self._session.servers.call_all(commands, in_transaction=True))
        return total

    async def _call(self, *command: Argument) -> Any:
        await self._session.require_open()
        return await self._session.call(*command)

    async def _set_name(self, generation: NamedGeneration) -> None:
        await register_tenant(self._session, self._tenant)
        await self._call("HSET", self._keys.generations(self._tenant), generation.tag.hex(), generation.name)

    async def _named(self) -> list[NamedGeneration]:
        """Return the generations in order of names."""
        fields = await self._call("HGETALL", self._keys.generations(self._tenant))
        named = [NamedGeneration(name.decode(), bytes.fromhex(tag.decode())) for tag, name in fields.items()]
        return sorted(named, key=lambda generation: (generation.name, generation.tag))


def _parse_pointer(value: bytes | None) -> NamedGeneration | None:
    if value is None:
        return None
    tag, _, name = value.decode().partition(" ")
    return NamedGeneration(name, bytes.fromhex(tag))
