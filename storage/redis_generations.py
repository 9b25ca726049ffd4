"""Generations in Redis: what is noted of them, and letting go of their states."""

from collections.abc import Awaitable, Callable
from typing import Any

from storage.redis_layout import Keyspace
from storage.store import KnownGeneration, NamedGeneration

SCANNED_AT_ONCE = 1000  # keys looked at in one command, about half a millisecond in which Redis does nothing else


class RedisGenerations:
    """The GenerationRegistry of a store, which gives it its way to call the server."""

    def __init__(self, call: Callable[..., Awaitable[Any]], keys: Keyspace) -> None:
        self._call = call
        self._keys = keys

    async def announce(self, generation: NamedGeneration, live_for_s: float) -> None:
        await self._call("HSET", self._keys.generations, generation.tag.hex(), generation.name)
        await self._call("SET", self._keys.live(generation.tag), 1, "PX", max(1, round(live_for_s * 1000)))

    async def known(self) -> list[KnownGeneration]:
        names = await self._names()
        if not names:
            return []
        active = await self._call("GET", self._keys.active)
        live = await self._call("MGET", *(self._keys.live(bytes.fromhex(tag)) for tag in names))
        return [
            KnownGeneration(NamedGeneration(name, bytes.fromhex(tag)), active == tag.encode(), is_live is not None)
            for (tag, name), is_live in zip(names.items(), live, strict=True)
        ]

    async def active(self) -> NamedGeneration | None:
        tag = await self._call("GET", self._keys.active)
        name = None if tag is None else await self._call("HGET", self._keys.generations, tag)
        return None if name is None else NamedGeneration(name.decode(), bytes.fromhex(tag.decode()))

    async def activate(self, generation: NamedGeneration) -> None:
        await self._call("HSET", self._keys.generations, generation.tag.hex(), generation.name)
        await self._call("SET", self._keys.active, generation.tag.hex())

    async def forget(self, tag: bytes) -> int:
        total, cursor = 0, None
        while cursor != 0:
            scan = ("SCAN", cursor or 0, "MATCH", self._keys.states_pattern(tag), "COUNT", SCANNED_AT_ONCE)
            cursor, found = await self._call(*scan)
            if found:
                total += await self._call("UNLINK", *found)
        await self._call("HDEL", self._keys.generations, tag.hex())
        return total

    async def _names(self) -> dict[str, str]:
        """Names by tag, in order of names."""
        fields = await self._call("HGETALL", self._keys.generations)
        names = {tag.decode(): name.decode() for tag, name in fields.items()}
        return dict(sorted(names.items(), key=lambda tag_and_name: tag_and_name[::-1]))
