"""Where to fold events: in a Lua script on the Redis server, or in numpy with compare-and-set.

Both log, index, deduplicate and fold the same events of the same users, one request after the other; their states must
be equal. Shown is what an event costs the server, which all replicas share, and the client. Then, for the store as it
is (compare-and-set), how many events and single acknowledgements one process gets.

    python -m benchmarks.redis_fold
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from benchmarks.topology import redis_server
from storage.redis import PARTITIONS, RedisStore
from storage.redis_layout import Entry, Keyspace, Script
from storage.state import ITEM_RING, Generation
from storage.state_event import Event

RATES, CODEBOOKS, CODEWORDS, ITEMS = (0.05, 0.25, 0.8), 8, 32, 3000
BATCHES = (1, 10, 100)
START_US = 1_700_000_000_000_000
TENANT = "main"

# The fold of storage.state in Lua, for clicks of weight 1. A state is read once and written once for each user: what
# changes is gathered in `patch`, by offset, and the new value is cut together at the end.
LUA_FOLD = """
-- KEYS  seq, log; for each user: head, index, state
-- ARGV  empty state; for each user: number of events; for each: id hash, entry, item, codes, timestamp_us, id_time_s
local rates, books, words, id_ring, item_ring, steps = @rates@, @books@, @words@, @id_ring@, @item_ring@, @steps@
local max_age, at = @max_age@, @offsets@
local time = redis.call('TIME')
local id_end = string.format('-%s%03d', time[1], math.floor(time[2] / 1000))
local arg, duplicates = 2, {}

local function fold_user(key)
    local value = redis.call('GET', KEYS[key + 2])
    value = value and string.sub(value, 17) or ARGV[1]
    local patch = {}
    local function get(format, offset)
        return (struct.unpack(format, patch[offset] or string.sub(value, offset + 1, offset + 8)))
    end
    local function put(format, offset, number)
        patch[offset] = struct.pack(format, number)
    end
    local n, anchor = get('<I8', at.n), get('<I8', at.anchor)
    local events, items = get('<I8', at.event_count), get('<I8', at.item_count)
    local last, low_water = get('<i8', at.last_timestamp_us), get('<I4', at.low_water_s)
    local seq
    local count = tonumber(ARGV[arg])
    arg = arg + 1
    for _ = 1, count do
        local hash, entry, item, codes = ARGV[arg], ARGV[arg + 1], tonumber(ARGV[arg + 2]), ARGV[arg + 3]
        local timestamp, id_time = tonumber(ARGV[arg + 4]), tonumber(ARGV[arg + 5])
        arg = arg + 6
        if redis.call('ZSCORE', KEYS[key + 1], hash) then
            duplicates[#duplicates + 1] = hash
        else
            seq = redis.call('INCR', KEYS[1])
            redis.call('XADD', KEYS[2], string.format('%.0f', seq) .. id_end, 'e', entry)
            redis.call('ZADD', KEYS[key + 1], seq, hash)
            local slot = events % id_ring
            low_water = math.max(low_water, get('<I4', at.recent_id_times_s + 4 * slot))
            put('<I4', at.recent_id_times_s + 4 * slot, id_time)
            patch[at.recent_event_ids + 8 * slot] = hash
            events = events + 1
            if item >= 0 then
                put('<i4', at.recent_items + 4 * (items % item_ring), item)
                items, n = items + 1, n + 1
                local age = n - anchor
                if age >= max_age then
                    for row = 0, #rates * books - 1 do
                        local decay = math.exp(-rates[math.floor(row / books) + 1] * age)
                        for word = 0, words - 1 do
                            local offset = at.bins + 4 * (row * words + word)
                            local bin = get('<f', offset) * decay
                            put('<f', offset, bin < 1e-20 and 0 or bin)
                        end
                    end
                    anchor, age = n, 0
                end
                for rate = 0, #rates - 1 do
                    local growth = math.exp(rates[rate + 1] * age)
                    for book = 1, books do
                        local offset = at.bins + 4 * ((rate * books + book - 1) * words + string.byte(codes, book))
                        put('<f', offset, get('<f', offset) + growth)
                    end
                end
                local first = timestamp < last and 1 or 0
                for place = steps - 1, first + 1, -1 do
                    put('<i4', at.stepped_items + 4 * place, get('<i4', at.stepped_items + 4 * (place - 1)))
                end
                if first < steps then put('<i4', at.stepped_items + 4 * first, item) end
                if timestamp >= last then
                    last = timestamp
                    put('<i4', at.last_item, item)
                    patch[at.last_codes] = codes
                end
            end
        end
    end
    if not seq then return end
    put('<I8', at.n, n)
    put('<I8', at.anchor, anchor)
    put('<I8', at.event_count, events)
    put('<I8', at.item_count, items)
    put('<i8', at.last_timestamp_us, last)
    put('<I4', at.low_water_s, low_water)
    local offsets = {}
    for offset in pairs(patch) do offsets[#offsets + 1] = offset end
    table.sort(offsets)
    local head = string.format('%016.0f', seq)
    local pieces, from = {head}, 1
    for _, offset in ipairs(offsets) do
        pieces[#pieces + 1] = string.sub(value, from, offset)
        pieces[#pieces + 1] = patch[offset]
        from = offset + #patch[offset] + 1
    end
    pieces[#pieces + 1] = string.sub(value, from)
    redis.call('SET', KEYS[key], head)
    redis.call('SET', KEYS[key + 2], table.concat(pieces))
end

for key = 3, #KEYS, 3 do fold_user(key) end
return duplicates
"""

console = Console()


def lua_fold(generation: Generation) -> Script:
    offsets = {name: field[1] for name, field in (generation.dtype.fields or {}).items()}
    values = {
        "rates": "{" + ", ".join(map(str, generation.decay_rates)) + "}",
        "books": generation.codes.shape[1],
        "words": generation.codewords,
        "id_ring": generation.id_ring,
        "item_ring": ITEM_RING,
        "steps": generation.stepped_items,
        "max_age": len(generation.growth),
        "offsets": "{" + ", ".join(f"{name}={offset}" for name, offset in offsets.items()) + "}",
    }
    text = LUA_FOLD
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return Script(text)


class LuaFold:
    """Appends events by the script; the keys are those of the store, so that the store can read the states."""

    def __init__(self, redis: Redis, prefix: str, generation: Generation) -> None:
        self._redis = redis
        self._keys = Keyspace(prefix, PARTITIONS)
        self._generation = generation
        self._script = lua_fold(generation)
        self._empty = generation.encode(generation.empty())

    async def append(self, tenant: str, events: Sequence[Event]) -> None:
        users: dict[str, dict[Any, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        for event in events:
            user = self._keys.user(tenant, event.user_id)
            users[user.partition][user].append(Entry.of(tenant, event))
        async with self._redis.pipeline(transaction=len(users) > 1) as pipe:
            for partition, entries in users.items():
                keys: list[str] = [f"{partition}:seq", f"{partition}:log"]
                args: list[Any] = [self._empty]
                for user, own in entries.items():
                    keys += [user.head, user.index, *user.states([self._generation])]
                    args.append(len(own))
                    for entry in own:
                        args += self._arguments(entry)
                pipe.execute_command("EVALSHA", self._script.sha, len(keys), *keys, *args)
            await pipe.execute()

    async def load(self) -> None:
        await self._redis.script_load(self._script.text)

    def _arguments(self, entry: Entry) -> list[Any]:
        item = self._generation.item_index.get(entry.event.item_id, -1)
        codes = self._generation.codes[item].tobytes() if item >= 0 else b""
        id_time_s = -(-(entry.event.id_time_us or 0) // 1_000_000)
        return [entry.member, entry.encoded, item, codes, entry.event.timestamp_us, id_time_s]


@dataclass(frozen=True)
class Cost:
    """Of one event, in microseconds."""

    server_us: float
    client_us: float
    events_per_s: float


Append = Callable[[str, Sequence[Event]], Awaitable[object]]


async def measure(redis: Redis, append: Append, events: Sequence[Event], batch: int, at_once: int = 1) -> Cost:
    batches = iter([events[start : start + batch] for start in range(0, len(events), batch)])

    async def work() -> None:
        for request in batches:
            await append(TENANT, request)

    server_s, client_s, started_s = await server_cpu_s(redis), time.process_time(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(at_once)))
    elapsed_s, client_s = time.perf_counter() - started_s, time.process_time() - client_s
    server_s = await server_cpu_s(redis) - server_s
    return Cost(server_s / len(events) * 1e6, client_s / len(events) * 1e6, len(events) / elapsed_s)


async def server_cpu_s(redis: Redis) -> float:
    used = await redis.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


def make_generation() -> Generation:
    codes = np.random.default_rng(0).integers(0, CODEWORDS, (ITEMS, CODEBOOKS), dtype=np.uint8)
    return Generation(b"redisfol", RATES, CODEWORDS, {str(row): row for row in range(ITEMS)}, codes, {"click": 1.0})


def make_events(count: int, users: int, seed: int) -> list[Event]:
    random = np.random.default_rng(seed)
    columns = zip(random.integers(0, users, count), random.integers(0, ITEMS, count), strict=True)
    return [
        Event(f"{seed}-{n}", f"user{user}", str(item), "click", time_us, time_us)
        for n, (user, item) in enumerate(columns)
        for time_us in [START_US + n * 1000]
    ]


async def compare(url: str, generation: Generation, count: int, users: int) -> None:
    redis = Redis.from_url(url)
    store = await RedisStore.open(url, [generation], prefix="cas")
    lua_reader = await RedisStore.open(url, [generation], prefix="lua")
    lua = LuaFold(redis, "lua", generation)
    await lua.load()
    table = Table(
        "events in a request", "fold", "server us/event", "client us/event", "events/s", title="one at a time"
    )
    sides: dict[str, Append] = {"Lua": lua.append, "compare-and-set": store.append}
    for append in sides.values():  # every user has a state
        await measure(redis, append, make_events(2 * users, users, seed=0), batch=100)
    for batch in BATCHES:
        events = make_events(max(count * batch // 100, 300), users, seed=batch)
        for name, append in sides.items():
            cost = await measure(redis, append, events, batch)
            table.add_row(str(batch), name, *(f"{n:,.0f}" for n in (cost.server_us, cost.client_us, cost.events_per_s)))
    await check_equal(store, lua_reader, generation, users)
    console.print(table)

    table = Table(
        "requests at once", "events in each", "server us/event", "client us/event", "events/s", title="the store"
    )
    for at_once, batch in ((1, 1), (64, 1), (256, 1), (1, 100), (4, 100), (4, 1000)):
        events = make_events(count if at_once * batch > 1 else 300, users, seed=1000 * at_once + batch)
        cost = await measure(redis, store.append, events, batch, at_once)
        shown = (cost.server_us, cost.client_us, cost.events_per_s)
        table.add_row(str(at_once), str(batch), *(f"{number:,.0f}" for number in shown))
    console.print(table)
    for closing in (store.close(), lua_reader.close(), redis.aclose()):
        await closing


async def check_equal(one: RedisStore, other: RedisStore, generation: Generation, users: int) -> None:
    ids = [f"user{number}" for number in range(users)]
    pairs = zip(await one.states(TENANT, ids, generation), await other.states(TENANT, ids, generation), strict=True)
    for folded, by_lua in ((generation.decode(a), generation.decode(b)) for a, b in pairs if a and b):
        assert np.allclose(folded["bins"], by_lua["bins"], rtol=1e-4)
        for name in set(generation.dtype.names or ()) - {"bins"}:
            assert np.array_equal(folded[name], by_lua[name]), name


def main(
    events: Annotated[int, typer.Option(help="Events in the measurement with batches of 100.")] = 20_000,
    users: Annotated[int, typer.Option(help="Users that they are spread over.")] = 2000,
) -> None:
    with TemporaryDirectory() as directory, redis_server(Path(directory)) as url:
        asyncio.run(compare(url, make_generation(), events, users))


if __name__ == "__main__":
    typer.run(main)
