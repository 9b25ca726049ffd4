"""What tenants say of their items, in Redis: keys of one tenant share a slot, so each step is one script."""

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from storage.errors import StorageError
from storage.records import ItemChanges, ItemEntry
from storage.redis_layout import Argument, Keyspace, Script

REGISTERED = "items:"  # begins a field of PREFIX:meta

# What was said begins with "="; an argument that is empty was not.
PUT_ITEMS = Script("""
-- KEYS  version, changes, title, categories, available
-- ARGV  of each item: id, title, categories, available
for arg = 1, #ARGV, 4 do
    redis.call('ZADD', KEYS[2], redis.call('INCR', KEYS[1]), ARGV[arg])
    for part = 1, 3 do
        local said = ARGV[arg + part]
        if said ~= '' then redis.call('HSET', KEYS[part + 2], ARGV[arg], string.sub(said, 2)) end
    end
end
return 1
""")

# Returns ids, scores, and what was said of each.
READ_ITEMS = Script("""
-- KEYS  changes, title, categories, available
-- ARGV  after, limit
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2])
if #found == 0 then return {} end
local ids, scores = {}, {}
for i = 1, #found, 2 do
    ids[#ids + 1], scores[#scores + 1] = found[i], found[i + 1]
end
local answer = {ids, scores}
for part = 2, 4 do answer[part + 1] = redis.call('HMGET', KEYS[part], unpack(ids)) end
return answer
""")
AT_ONCE = 1000  # of a script's arguments Lua takes 8,000


class RedisItems:
    """The items of all tenants in a store, which lends its ways to send a command and to run a script."""

    def __init__(self, call: Callable[..., Awaitable[Any]], run: Callable[..., Awaitable[Any]], keys: Keyspace) -> None:
        self._call = call
        self._run = run
        self._keys = keys
        self._registered: set[str] = set()

    async def put(self, tenant: str, entries: Sequence[ItemEntry]) -> None:
        """As the contract says; raises StorageError when a text is not Unicode."""
        if tenant not in self._registered:
            await self._call("HSETNX", self._keys.meta, f"{REGISTERED}{tenant}", 1)
            self._registered.add(tenant)
        args: list[Argument] = []
        for entry in entries:
            args += _arguments(entry)
        keys = self._keys.items(tenant)
        await self._run(PUT_ITEMS, [keys.version, keys.changes, *keys.parts], args, copied=True)

    async def changes(self, tenant: str, after: int, limit: int) -> ItemChanges:
        keys = self._keys.items(tenant)
        found = await self._run(READ_ITEMS, [keys.changes, *keys.parts], [after, min(limit, AT_ONCE)])
        if not found:
            return ItemChanges([], after)
        ids, scores, *parts = found
        return ItemChanges([_entry(*said) for said in zip(ids, *parts, strict=True)], int(scores[-1]))

    async def tenants(self) -> list[str]:
        fields = await self._call("HKEYS", self._keys.meta)
        return [field.decode().removeprefix(REGISTERED) for field in fields if field.startswith(REGISTERED.encode())]


def _arguments(entry: ItemEntry) -> list[Argument]:
    said = (
        entry.item_id,
        "" if entry.title is None else f"={entry.title}",
        "" if entry.categories is None else f"={json.dumps(entry.categories)}",
        "" if entry.available is None else f"={entry.available:d}",
    )
    try:
        return [text.encode() for text in said]
    except UnicodeEncodeError as exc:
        raise StorageError(f"an item cannot be stored: {exc}") from exc


def _entry(item_id: bytes, title: bytes | None, categories: bytes | None, available: bytes | None) -> ItemEntry:
    return ItemEntry(
        item_id.decode(),
        None if title is None else title.decode(),
        None if categories is None else tuple(json.loads(categories)),
        None if available is None else available == b"1",
    )
