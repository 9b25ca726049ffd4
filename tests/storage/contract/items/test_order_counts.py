"""Counts of items bought together in every store, against plain sums; and the newest entries of a log."""

import asyncio
import sqlite3
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.errors import StorageUnavailable
from storage.items.trends import HALF_LIFE_S, MAX_STEP_S, TrendClock, Visit
from storage.records import MAX_ORDER_COUNTS
from storage.redis.connections.client import RedisServers
from storage.redis.connections.nodes import ReplicaAcks
from storage.redis.layout.keys import Keyspace
from storage.sqlite.database import FILE_NAME
from storage.sqlite.items.tenant_values import ORDER_CLOCK
from tests.storage.contract.stores import ARCHIVED, opened
from tests.storage.oracles.random_events import click, fresh_user, make_generation
from tests.storage.redis.stores import PATIENT

GENERATION = make_generation()
TOLERANCE = 1e-3  # up to a quarter of an hour may pass
NAMES = ["", "a", "b", "a b", "a:b@c.d_e-f g"]
COUNTS = st.dictionaries(st.sampled_from(NAMES), st.floats(0.01, 5), max_size=len(NAMES))


def set_back(clock: str, by_s: float) -> str:
    """The stored clock, moved back by this time."""
    parsed = TrendClock.parse(clock)
    return str(TrendClock(parsed.position, parsed.read_s - by_s))


async def set_clock_back(address: str, tenant: str, by_s: float) -> None:
    """Age the tenant's counts by this time."""
    kind, _, place = address.partition(":")
    if kind == "sqlite":
        with closing(sqlite3.connect(Path(place) / FILE_NAME, isolation_level=None)) as db:
            of = (tenant, ORDER_CLOCK)
            (text,) = db.execute("SELECT value FROM notes WHERE tenant = ? AND name = ?", of).fetchone()
            db.execute("UPDATE notes SET value = ? WHERE tenant = ? AND name = ?", (set_back(text, by_s), *of))
        return
    url, prefix, *_ = place.split(" ")
    key = Keyspace(prefix, 1).items(tenant).order_clock
    servers = RedisServers(url, **PATIENT, acks=ReplicaAcks())
    try:
        await servers.connect()
        await servers.call("SET", key, set_back((await servers.call("GET", key)).decode(), by_s))
    finally:
        await servers.close()


@given(st.lists(COUNTS, max_size=6))
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_counts_of_several_processes_add_up(address: str, added: list[dict[str, float]]) -> None:
    """Also after a restart, and separately for each tenant."""

    async def law() -> None:
        tenant, expected = fresh_user(), defaultdict[str, float](float)
        async with opened(address, GENERATION, tenant=tenant) as store, opened(address, tenant=tenant) as other:
            for number, counts in enumerate(added):
                await (store, other)[number % 2].orders.add(tenant, counts)
                for name, count in counts.items():
                    expected[name] += count
        async with opened(address, tenant=tenant) as again:
            assert await again.orders.counts(tenant) == pytest.approx(dict(expected), rel=TOLERANCE)
            assert await again.orders.counts(f"{tenant}-other") == {}

    asyncio.run(law())


def test_counts_decay_and_a_clock_error_ages_them_by_at_most_a_day(address: str) -> None:
    async def law() -> None:
        tenant, a_day = fresh_user(), 0.5 ** (MAX_STEP_S / HALF_LIFE_S)
        async with opened(address, GENERATION, tenant=tenant) as store:
            await store.orders.add(tenant, {"a": 4, "b": 1})
            for days, expected in ((1, a_day), (300, a_day**2), (-300, a_day**2)):
                await set_clock_back(address, tenant, days * MAX_STEP_S)
                await store.orders.add(tenant, {"b": 1e-9})
                counts = await store.orders.counts(tenant)
                assert counts == pytest.approx({"a": 4 * expected, "b": expected}, rel=TOLERANCE)

    asyncio.run(law())


def test_the_largest_counts_are_kept(address: str) -> None:
    async def law() -> None:
        tenant, more = fresh_user(), 40
        counts = {f"item-{n}": float(n + 1) for n in range(MAX_ORDER_COUNTS + more)}
        async with opened(address, GENERATION, tenant=tenant) as store:
            await store.orders.add(tenant, counts)
            kept = {name: count for name, count in counts.items() if count > more}
            assert await store.orders.counts(tenant) == pytest.approx(kept, rel=TOLERANCE)
        with pytest.raises(StorageUnavailable):
            await store.orders.counts(tenant)
        with pytest.raises(StorageUnavailable):
            await store.orders.add(tenant, {"a": 1})

    asyncio.run(law())


def test_the_newest_entries_include_those_of_merged_visitors(address: str) -> None:
    """As far as the store has them; archived entries may be missing."""

    async def law() -> None:
        async with opened(address, GENERATION) as store:
            bought = [replace(click(f"e{n}", "u", n), type="buy", order_id=f"o{n // 2}") for n in range(20)]
            await store.append("main", [*bought, *(click(f"v{n}", "visitor", n) for n in range(3))])
            assert await store.undo("main", "u", "e3")
            assert await store.merge("main", "u", "visitor")
            log = [entry.record for entry in await store.events("main", "u")]
            assert len(log) == 24
            for limit in (1, 7, 100):
                newest = await store.orders.newest("main", "visitor", limit)
                if address.startswith(ARCHIVED):
                    assert newest == log[::-1][: len(newest)]
                else:
                    assert newest == log[::-1][:limit]
            assert await store.orders.newest("main", "nobody", 9) == []
            await store.erase("main", "u")
            assert await store.orders.newest("main", "u", 9) == []
        with pytest.raises(StorageUnavailable):
            await store.orders.newest("main", "u", 9)

    asyncio.run(law())


def test_dropping_item_counts_drops_trends_and_restarts_both(address: str) -> None:
    async def law() -> None:
        tenant, neighbour = fresh_user(), fresh_user()
        counts = {"": 9.0, "a": 5.0, "a\nb": 4.0, "ab": 3.0, "b": 2.0, "ab\nb": 1.0, "c\na": 1.0}
        visits = [Visit(item_id, bytes([user] * 4), 1.0) for item_id in ("a", "ab", "b") for user in range(3)]
        async with opened(address, GENERATION, tenant=tenant) as store:
            for one in (tenant, neighbour):
                await store.orders.add(one, counts)
                await store.add_visits(one, visits)
            for dropped in ({"a", "c"}, set[str]()):
                assert await store.orders.drop_counts(tenant, ["a", "unknown", "", "c"]) == dropped
            left = {"": 9.0, "ab": 3.0, "b": 2.0, "ab\nb": 1.0}
            assert await store.orders.counts(tenant) == pytest.approx(left, rel=TOLERANCE)
            assert await store.trends(tenant, 9) == pytest.approx({"ab": 3, "b": 3}, rel=TOLERANCE)
            assert await store.orders.counts(neighbour) == pytest.approx(counts, rel=TOLERANCE)
            await store.add_visits(tenant, visits[:2])  # of visitors who counted before
            assert await store.trends(tenant, 9) == pytest.approx({"a": 2, "ab": 3, "b": 3}, rel=TOLERANCE)

    asyncio.run(law())
