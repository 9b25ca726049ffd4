"""Keys and values of the Redis store."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.maintenance.rebuild import rebuild
from storage.records import DAY_S, NamedGeneration
from storage.redis.layout.keys import Keyspace
from tests.storage.oracles.filled_tenants import fill, fill_items
from tests.storage.oracles.random_events import click, make_newer
from tests.storage.redis.overtaken import overtake
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import GENERATION, PREFIX, assert_state_is_fold_of_log, opened

# by which glibc's malloc, of servers without jemalloc, gives more than is asked for: so little would be no block
UNSPLIT_BYTES = 16
FORMATS = Path(__file__).parents[3] / "docs" / "reference" / "byte-formats.md"
PARTS_OF_KEYS = {"PREFIX": PREFIX, "p17": r"p\d+", "TENANT": "main", "TAG": "[0-9a-f]{16}", "USER": ".+", "NAME": ".+"}


def documented_keys() -> dict[str, str]:
    """Patterns of the keys in the table of the reference, with their types as Redis names them."""
    found: dict[str, str] = {}
    for keys, types in re.findall(r"^\| (`PREFIX:.*?`) \| ([a-z, ]+) \|", FORMATS.read_text(), re.MULTILINE):
        first, *others = re.findall(r"`([^`]*)`", keys)
        names = [first, *(first[: first.rindex("}:") + 1] + other for other in others)]
        for number, name in enumerate(names):
            pattern = re.escape(name)
            for part, stands_for in PARTS_OF_KEYS.items():
                pattern = pattern.replace(part, stands_for)
            of_each = types.replace("sorted set", "zset").split(", ")
            found[pattern] = of_each[min(number, len(of_each) - 1)]
    return found


async def test_the_reference_has_each_key_with_its_type(server: RedisServer) -> None:
    async with opened(server.url) as store:
        await fill(store, "main")
        await fill_items(store, "main", 3)
        await store.undo("main", "user-5", "e1")
        await store.erase("main", "user-7")
    kept = {key.decode(): server.client.type(key).decode() for key in server.client.scan_iter()}
    documented, met = documented_keys(), set[str]()
    for key, type_ in kept.items():
        (pattern,) = (one for one in documented if re.fullmatch(one, key))
        assert (key, documented[pattern]) == (key, type_)
        met.add(pattern)
    unfinished = r"erasing|erased|scratch|aside|calls|new"  # corrections, and quotas, which the store does not keep
    assert [one for one in documented.keys() - met if not re.search(unfinished, one)] == []


class TestData:
    @pytest.mark.parametrize("damage", ["gone", "short", "other layout", "not a number", "of the future"])
    def test_a_missing_or_unusable_state_is_folded_again(self, any_server: RedisServer, damage: str) -> None:
        def do_damage() -> None:
            (key,) = any_server.client.keys("*:state:*")
            value = any_server.client.get(key)
            match damage:
                case "gone":
                    any_server.client.delete(key)
                case "short":
                    any_server.client.set(key, value[:-1])
                case "other layout":
                    any_server.client.set(key, value[:16] + b"\x63" + value[17:])
                case "not a number":
                    any_server.client.set(key, b"?" * 16 + value[16:])
                case "of the future":
                    any_server.client.set(key, b"%016d" % 10**9 + value[16:])

        async def law() -> None:
            events = [click(f"e{number}", item=number % 12) for number in range(600)]  # more than a page of the log
            async with opened(any_server.url) as store:
                await store.append("main", events)
                (value,) = await store.states("main", ["u"], GENERATION)
                do_damage()
                assert await store.states("main", ["u"], GENERATION) == [value]
                do_damage()
                await store.append("main", [click("one more")])
                await assert_state_is_fold_of_log(store)

        asyncio.run(law())

    async def test_idle_states_expire_and_are_folded_again(self, any_server: RedisServer) -> None:
        async with opened(any_server.url) as store:
            await store.append("main", [click("e")])
            (key,) = any_server.client.keys("*:state:*")
            assert any_server.client.ttl(key) == -1
        async with opened(any_server.url, state_ttl_days=7) as store:
            await store.append("main", [click("e2")])
            assert 6 * 86_400 < any_server.client.ttl(key) <= 7 * 86_400
            any_server.client.pexpire(key, 1)
            await asyncio.sleep(0.05)
            assert await store.states("main", ["u"], GENERATION, max_missing=0) == [None]
            await assert_state_is_fold_of_log(store)
            assert 6 * 86_400 < any_server.client.ttl(key) <= 7 * 86_400  # what was folded again expires too

    async def test_a_rebuild_keeps_the_expiry_of_idle_users(self, any_server: RedisServer) -> None:
        newer, now_us = make_newer(), time.time_ns() // 1000
        async with opened(any_server.url, state_ttl_days=7) as store:
            for days in (0, 5, 8):
                await store.append("main", [click("e", f"idle{days}", timestamp_us=now_us - days * DAY_S * 1_000_000)])
            await rebuild(store, newer)
            keys = any_server.client.keys(f"*:state:{newer.tag.hex()}:*")
            days_left = {key.decode().rpartition("/")[2]: any_server.client.ttl(key) / DAY_S for key in keys}
            assert days_left == pytest.approx({"idle0": 7, "idle5": 2}, abs=0.1)

    async def test_a_rebuild_sets_the_expiry_of_older_states(self, any_server: RedisServer) -> None:
        now_us = time.time_ns() // 1000
        async with opened(any_server.url) as store:
            for days in (0, 5, 8):
                await store.append("main", [click("e", f"idle{days}", timestamp_us=now_us - days * DAY_S * 1_000_000)])
        async with opened(any_server.url, state_ttl_days=7) as store:
            await rebuild(store, GENERATION)
            keys = any_server.client.keys("*:state:*")
            days_left = {key.decode().rpartition("/")[2]: any_server.client.ttl(key) / DAY_S for key in keys}
            assert days_left == pytest.approx({"idle0": 7, "idle5": 2}, abs=0.1)
            await assert_state_is_fold_of_log(store, user_id="idle8")

    async def test_memory_of_a_state_does_not_grow_with_events(self, server: RedisServer) -> None:
        async with opened(server.url) as store:
            lengths, usage = [], []
            for start, end in ((0, 200), (200, 3000), (3000, 6000)):
                for page in range(start, end, 1000):
                    numbers = range(page, min(page + 1000, end))
                    await store.append("main", [click(f"e{n}", item=n % 12) for n in numbers])
                (key,) = server.client.keys("*:state:*")
                lengths.append(server.client.strlen(key))
                usage.append(server.client.memory_usage(key))
            assert len(set(lengths)) == 1
            assert max(usage) - min(usage) <= UNSPLIT_BYTES
            assert max(usage) < GENERATION.dtype.itemsize + 250  # its key, and what Redis adds

    @given(st.lists(st.tuples(st.text("ab/:%{}@.", min_size=1), st.text("ab/:%{}@.", min_size=1)), unique=True))
    def test_no_two_users_of_any_tenants_share_a_key(self, names: list[tuple[str, str]]) -> None:
        users = [Keyspace(PREFIX, 4).user(*name) for name in names]
        keys = [key for user in users for key in (user.head, user.id_index, *user.states([GENERATION]))]
        assert len(set(keys)) == len(keys)
        hash_tags = [key[key.index("{") + 1 : key.index("}")] for key in keys]
        assert set(hash_tags) <= {"p0", "p1", "p2", "p3"}

    async def test_prefixes_are_isolated(self, any_server: RedisServer) -> None:
        async with opened(f"{any_server.url} one") as one, opened(f"{any_server.url} two") as two:
            await one.append("main", [click("e")])
            assert await two.states("main", ["u"], GENERATION) == [None]
            assert {key.split(b":")[0] for key in any_server.client.scan_iter()} == {b"one", b"two"}


async def test_a_user_id_that_looks_like_a_key_does_not_collide(any_server: RedisServer) -> None:
    other, own = b"no model".hex(), GENERATION.tag.hex()
    users = ["x}:state:y", f"x}}:state:{other}:main/y", f"x}}:state:{own}:main/y", "x}:aside:y", "y"]
    async with opened(any_server.url) as store:
        for user in users:
            await store.append("main", [click(f"e{number}", user) for number in range(3)])
        before = [(await store.events("main", user), await store.states("main", [user], GENERATION)) for user in users]
        assert await store.generations.drop(b"no model") == 0
        states = [state.user_id async for page in store.generations.states(GENERATION.tag) for state in page]
        assert sorted(states) == sorted(users)
        await store.repair()
        assert before == [
            (await store.events("main", user), await store.states("main", [user], GENERATION)) for user in users
        ]
        for user in users:
            (again,) = await store.append("main", [click("e0", user)])
            assert again.duplicate
        assert await store.generations.drop(GENERATION.tag) == len(users)


@pytest.mark.parametrize("command", ["GET", "HDEL", "HSET", "SET"])
async def test_a_generation_activated_while_dropped_keeps_its_name(
    any_server: RedisServer, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    named = NamedGeneration("model", GENERATION.tag)
    async with opened(any_server.url) as store:
        registry = store.generations
        if command in ("GET", "HDEL"):
            overtake(monkeypatch, command, lambda: registry.activate(named))
            await registry.drop(named.tag)
        else:
            overtake(monkeypatch, command, lambda: registry.drop(named.tag))
            await registry.activate(named)
        assert [known.named for known in await registry.known()] == [named]
