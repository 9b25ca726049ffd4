"""Generations in Redis: what is noted of them, and letting go of their states."""

from collections.abc import Awaitable, Callable
from typing import Any

from storage.redis_layout import Keyspace
from storage.store import KnownGeneration, NamedGeneration

SCANNED_AT_ONCE = 1000  # keys looked at in one command, about half a millisecond in which Redis does nothing else


class RedisGenerations:
    """The GenerationRegistry of one tenant in a store, which gives it its way to call the server."""

    def __init__(self, call: Callable[..., Awaitable[Any]], keys: Keyspace, tenant: str) -> None:
        self._call = call
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
        pointer = await self._call("GET", self._keys.active(self._tenant))
        if pointer is None:
            return None
        tag, _, name = pointer.decode().partition(" ")
        return NamedGeneration(name, bytes.fromhex(tag))

    async def activate(self, generation: NamedGeneration) -> None:
        await self._call("HSET", self._keys.generations(self._tenant), generation.tag.hex(), generation.name)
        await self._call("SET", self._keys.active(self._tenant), f"{generation.tag.hex()} {generation.name}")

    async def forget(self, tag: bytes) -> int:
        total, cursor = 0, None
        while cursor != 0:
            scan = (
                "SCAN",
                cursor or 0,
                "MATCH",
                self._keys.states_pattern(self._tenant, tag),
                "COUNT",
                SCANNED_AT_ONCE,
            )
            cursor, found = await self._call(*scan)
            if found:
                total += await self._call("UNLINK", *found)
        await self._call("HDEL", self._keys.generations(self._tenant), tag.hex())
        return total

    async def _named(self) -> list[NamedGeneration]:
        """In order of names."""
        fields = await self._call("HGETALL", self._keys.generations(self._tenant))
        named = [NamedGeneration(name.decode(), bytes.fromhex(tag.decode())) for tag, name in fields.items()]
        return sorted(named, key=lambda generation: (generation.name, generation.tag))
