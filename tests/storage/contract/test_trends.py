"""Trends in every store, against visits counted individually."""

import asyncio
import random
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.errors import StorageUnavailable
from storage.items.trends import (
    HALF_LIFE_S,
    LISTED_VISITORS,
    MAX_STEP_S,
    VISITOR_BYTES,
    TrendClock,
    Visit,
    with_visitor,
)
from storage.redis.connections.client import RedisServers
from storage.redis.connections.nodes import Command, ReplicaAcks
from storage.redis.layout.keys import Keyspace
from storage.sqlite.database import FILE_NAME
from tests.storage.contract.stores import opened
from tests.storage.oracles.random_events import fresh_user, make_generation
from tests.storage.redis.stores import PATIENT

GENERATION = make_generation()
HOUR_S, YEAR_S = 3_600.0, 365 * 86_400.0
TOLERANCE = 1e-3  # up to a quarter of an hour may pass


class Step(NamedTuple):
    """A step: the clock moves, and a process adds visits."""

    clock_s: float
    visits: list[tuple[str, str]]  # item and user


VISITS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["ada", "bob", "eve"])), max_size=6)
MOVES = st.one_of(
    st.floats(HOUR_S, MAX_STEP_S - HOUR_S),
    st.sampled_from([0.0, 3 * MAX_STEP_S, YEAR_S, 50 * YEAR_S, -YEAR_S, -HOUR_S]),
)
STEPS = st.lists(st.builds(Step, MOVES, VISITS), min_size=1, max_size=12)


class NaiveTrends:
    """All visits with their times; at most a day passes between two steps."""

    def __init__(self) -> None:
        self._now_s = time.time()
        self._counted: list[tuple[str, float]] = []
        self._visitors: defaultdict[str, list[str]] = defaultdict(list)

    def add(self, step: Step) -> None:
        before_s, self._now_s = self._now_s, self._now_s + min(max(step.clock_s, 0), MAX_STEP_S)
        if before_s // HALF_LIFE_S != self._now_s // HALF_LIFE_S:
            self._visitors.clear()
        for item_id, user_id in step.visits:
            if user_id not in self._visitors[item_id]:
                self._visitors[item_id].append(user_id)
                self._counted.append((item_id, self._now_s))

    def counts(self) -> dict[str, float]:
        counts: defaultdict[str, float] = defaultdict(float)
        for item_id, time_s in self._counted:
            counts[item_id] += 0.5 ** ((self._now_s - time_s) / HALF_LIFE_S)
        return counts


def visits_of(pairs: list[tuple[str, str]], weight: float = 1.0) -> list[Visit]:
    return [Visit(item_id, visitor_of(user_id), weight) for item_id, user_id in pairs]


def visitor_of(user_id: str) -> bytes:
    return blake2b(user_id.encode(), digest_size=VISITOR_BYTES).digest()


def count_of(user_ids: Iterable[str]) -> float:
    """Estimated number of visitors of an item, computed in Python."""
    seen, total = b"", 0.0
    for user_id in user_ids:
        found = with_visitor(seen, visitor_of(user_id))
        if found is not None:
            seen, count = found
            total += count
    return total


async def clock_of(address: str, tenant: str, clock: TrendClock | None = None) -> TrendClock | None:
    """Get or set the stored clock; one read a day ago simulates a clock that moved on by a day."""
    kind, _, place = address.partition(":")
    if kind == "sqlite":
        with closing(sqlite3.connect(Path(place) / FILE_NAME, isolation_level=None)) as db:
            of = (tenant, "trend-clock")
            if clock is not None:
                db.execute("UPDATE notes SET value = ? WHERE tenant = ? AND name = ?", (str(clock), *of))
            row = db.execute("SELECT value FROM notes WHERE tenant = ? AND name = ?", of).fetchone()
        return None if row is None else TrendClock.parse(row[0])
    url, prefix, *_ = place.split(" ")
    key = Keyspace(prefix, 1).items(tenant).trend_clock
    servers = RedisServers(url, **PATIENT, acks=ReplicaAcks())
    try:
        await servers.connect()
        if clock is not None:
            await servers.execute_all([Command.of("SET", key, str(clock))])
        (found,) = await servers.execute_all([Command.of("GET", key)])
        return None if found is None else TrendClock.parse(found.decode())
    finally:
        await servers.close()


async def move_clock(address: str, tenant: str, by_s: float) -> None:
    clock = await clock_of(address, tenant)
    if clock is not None:
        await clock_of(address, tenant, TrendClock(clock.position, clock.read_s - by_s))


@given(STEPS)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_counts_of_several_processes_add_up_and_decay(address: str, steps: list[Step]) -> None:
    """For any clock, after a restart, and separately for each tenant."""

    async def law() -> None:
        tenant, naive, has_begun = fresh_user(), NaiveTrends(), False
        async with opened(address, GENERATION, tenant=tenant) as store, opened(address, tenant=tenant) as other:
            for number, step in enumerate(steps):
                await move_clock(address, tenant, step.clock_s)
                await (store, other)[number % 2].add_visits(tenant, visits_of(step.visits))
                if step.visits:  # the clock moves with visits only, and begins with the first
                    naive.add(step if has_begun else step._replace(clock_s=0))
                    has_begun = True
                elif has_begun:
                    await move_clock(address, tenant, -step.clock_s)
        async with opened(address, tenant=tenant) as again:
            trends = await again.trends(tenant, 10)
            assert list(trends.values()) == sorted(trends.values(), reverse=True)
            assert trends == pytest.approx(naive.counts(), rel=TOLERANCE)
            assert list(await again.trends(tenant, 2)) == list(trends)[:2]
            assert await again.trends(f"{tenant}-other", 10) == {}

    asyncio.run(law())


@given(st.integers(1, 3 * LISTED_VISITORS), st.integers(1, 4), st.integers(1, 500), st.randoms())
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_visitor_counts_once_per_half_life(
    address: str, crowd: int, rounds: int, page: int, chance: random.Random
) -> None:
    """For any number and order of visits, processes and restarts."""

    async def law() -> None:
        tenant, users = fresh_user(), [f"user {number} {chance.random()}" for number in range(crowd)]
        first = [("kettle", user) for user in users]
        again = [one for _ in range(rounds) for one in chance.sample(first, crowd)]
        async with opened(address, tenant=tenant) as store:
            await store.add_visits(tenant, visits_of(first))
            counted = await store.trends(tenant, 1)
        for start in range(0, len(again), page):
            async with opened(address, tenant=tenant) as store:
                await store.add_visits(tenant, visits_of(again[start : start + page]))
        async with opened(address, tenant=tenant) as store:
            assert await store.trends(tenant, 1) == pytest.approx(counted, rel=TOLERANCE)
        if crowd <= LISTED_VISITORS:
            assert counted == pytest.approx({"kettle": crowd}, rel=TOLERANCE)

    asyncio.run(law())


@pytest.mark.parametrize("crowd", [LISTED_VISITORS + 1, 100, 5_000])
def test_all_stores_count_distinct_visitors_alike(address: str, crowd: int) -> None:
    async def law() -> None:
        tenant, users = fresh_user(), [f"user {n}" for n in range(crowd)]
        async with opened(address, tenant=tenant) as store:
            await store.add_visits(tenant, visits_of([("cup", user) for user in users]))
            assert await store.trends(tenant, 1) == pytest.approx({"cup": count_of(users)}, rel=TOLERANCE)
            assert await store.trends(tenant, 1) == pytest.approx({"cup": crowd}, rel=0.25)  # five times the deviation

    asyncio.run(law())


def test_visitor_counts_are_unbiased_and_bounded_per_visitor() -> None:
    sizes, runs = (LISTED_VISITORS, 60, 400, 3_000), 60
    for size in sizes:
        counts = []
        for run in range(runs):
            users = [f"{run} {n}" for n in range(size)]
            counts.append(count_of(users))
            assert counts[-1] - count_of(users[:-1]) <= max(1.0, 0.04 * size)
        deviation = 0.06 / runs**0.5
        assert sum(counts) / runs == pytest.approx(size, rel=4 * deviation)


@pytest.mark.parametrize("ahead_s", [YEAR_S, 1000 * YEAR_S])
def test_a_clock_ahead_leaves_no_trace(address: str, ahead_s: float) -> None:
    """Earlier counts age by a day at most, and later ones count normally."""

    async def law() -> None:
        tenant = fresh_user()
        async with opened(address, tenant=tenant) as store:
            await store.add_visits(tenant, visits_of([("cup", "ada"), ("cup", "bob")]))
            await move_clock(address, tenant, ahead_s)
            await store.add_visits(tenant, visits_of([("pot", "ada")]))
            await move_clock(address, tenant, -ahead_s)
            await store.add_visits(tenant, visits_of([("lid", "ada")]))
            a_day = 0.5 ** (MAX_STEP_S / HALF_LIFE_S)
            expected = {"cup": 2 * a_day, "pot": 1.0, "lid": 1.0}
            assert await store.trends(tenant, 9) == pytest.approx(expected, rel=TOLERANCE)
            await move_clock(address, tenant, MAX_STEP_S)
            faded = {item_id: count * a_day for item_id, count in expected.items()}
            assert await store.trends(tenant, 9) == pytest.approx(faded, rel=TOLERANCE)

    asyncio.run(law())


def test_damaged_trends_are_bounded_and_recover(address: str) -> None:
    """As left by an earlier version with a clock a year ahead."""

    async def law() -> None:
        tenant = fresh_user()
        async with opened(address, tenant=tenant) as store:
            await store.add_visits(tenant, visits_of([("cup", "ada")]))
            clock = await clock_of(address, tenant)
            assert clock is not None
            await clock_of(address, tenant, TrendClock(clock.position - YEAR_S / HALF_LIFE_S, clock.read_s))
            assert await store.trends(tenant, 9) == {}
            await store.add_visits(tenant, visits_of([("cup", "bob"), ("pot", "bob")]))
            assert await store.trends(tenant, 9) == pytest.approx({"cup": 1, "pot": 1}, rel=TOLERANCE)

    asyncio.run(law())


def test_many_visits_are_added_at_once_and_old_ones_deleted(address: str) -> None:
    async def law() -> None:
        tenant = fresh_user()
        async with opened(address, GENERATION, tenant=tenant) as store:
            await store.add_visits(tenant, visits_of([("old", "ada")], weight=2.0**-60))
            assert list(await store.trends(tenant, 9)) == ["old"]
            clock = await clock_of(address, tenant)
            assert clock is not None
            await clock_of(address, tenant, TrendClock(clock.position + 5, clock.read_s))
            pairs = [(f"i{n}", f"u{user}") for n in range(300) for user in range(n % 20 + 1)]
            random.Random(0).shuffle(pairs)
            await store.add_visits(tenant, visits_of(pairs))
            await store.add_visits(tenant, [])
            found = await store.trends(tenant, 5000)
            assert found == pytest.approx({f"i{n}": n % 20 + 1 for n in range(300)}, rel=TOLERANCE)
        with pytest.raises(StorageUnavailable):
            await store.add_visits("main", visits_of([("a", "ada")]))
        with pytest.raises(StorageUnavailable):
            await store.trends("main", 1)

    asyncio.run(law())
