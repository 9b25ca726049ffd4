"""Generations in Redis: what is noted of them, and letting go of their states."""

from collections.abc import Awaitable, Callable
from typing import Any

from storage.records import KnownGeneration, NamedGeneration
from storage.redis_layout import Argument, Keyspace
from storage.redis_servers import Command, RedisServers, failure_of


class RedisGenerations:
    """The GenerationRegistry of one tenant in a store, which gives it the servers once they can be used."""

    def __init__(self, servers: Callable[[], Awaitable[RedisServers]], keys: Keyspace, tenant: str) -> None:
        self._servers = servers
        self._keys = keys
        self._tenant = tenant

    async def announce(self, generation: NamedGeneration, live_for_s: float) -> None:
        await self._call("HSET", self._keys.generations(self._tenant), generation.tag.hex(), generation.name)
        await self._call(
            "SET", self._keys.live(self._tenant, generation.tag), 1, "PX", max(1, round(live_for_s * 1000))
        )

    async def known(self) -> list[KnownGeneration]:
        active = await self.active()
        return [
            KnownGeneration(
                generation,
                is_active=active is not None and active.tag == generation.tag,
                is_live=await self._call("GET", self._keys.live(self._tenant, generation.tag)) is not None,
            )
            for generation in await self._named()
        ]

    async def active(self) -> NamedGeneration | None:
        return named_by(await self._call("GET", self._keys.active(self._tenant)))

    async def activate(self, generation: NamedGeneration) -> None:
        await self._call("HSET", self._keys.generations(self._tenant), generation.tag.hex(), generation.name)
        await self._call("SET", self._keys.active(self._tenant), f"{generation.tag.hex()} {generation.name}")

    async def set_experiment(self, text: str | None) -> None:
        key = self._keys.experiment(self._tenant)
        await (self._call("DEL", key) if text is None else self._call("SET", key, text))

    async def drop(self, tag: bytes) -> int:
        servers = await self._servers()
        total = removed = await self._unlink_states(servers, tag)
        while removed and servers.is_cluster:  # keys may have gone from a node not yet read to one that was
            removed = await self._unlink_states(servers, tag)
            total += removed
        await self._call("HDEL", self._keys.generations(self._tenant), tag.hex())
        return total

    async def _unlink_states(self, servers: RedisServers, tag: bytes) -> int:
        total = 0
        async for keys in servers.scan(self._keys.states_pattern(self._tenant, tag)):
            for reply in await servers.settled([Command.of("UNLINK", key) for key in keys], together=True):
                if isinstance(reply, Exception):
                    raise failure_of(reply) from reply
                total += reply
        return total

    async def _call(self, *command: Argument) -> Any:
        return await (await self._servers()).call(*command)

    async def _named(self) -> list[NamedGeneration]:
        """In order of names."""
        fields = await self._call("HGETALL", self._keys.generations(self._tenant))
        named = [NamedGeneration(name.decode(), bytes.fromhex(tag.decode())) for tag, name in fields.items()]
        return sorted(named, key=lambda generation: (generation.name, generation.tag))


def named_by(pointer: bytes | None) -> NamedGeneration | None:
    """What the value of the pointer's key says."""
    if pointer is None:
        return None
    tag, _, name = pointer.decode().partition(" ")
    return NamedGeneration(name, bytes.fromhex(tag))
