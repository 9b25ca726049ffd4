"""What every store says of trends, against counts that are halved in place."""

import asyncio
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.errors import StorageUnavailable
from storage.trends import HALF_LIFE_S, MAX_AGE_HALF_LIVES, count_at, trend_of
from tests.storage.contract.stores import opened
from tests.storage.oracles.random_events import fresh_user, make_generation

GENERATION = make_generation()
NOW_S = 1_763_700_000
DAY_S = 86_400
EVENTS = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(NOW_S - 60 * DAY_S, NOW_S)), max_size=30)


def halved(events: list[tuple[str, int]]) -> dict[str, float]:
    """Of each item, its events at NOW_S, each worth half for every half-life since."""
    counts: dict[str, float] = {}
    for item_id, time_s in events:
        counts[item_id] = counts.get(item_id, 0.0) + 0.5 ** ((NOW_S - time_s) / HALF_LIFE_S)
    return counts


@given(EVENTS, EVENTS)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_several_processes_add_is_the_count_that_halves(
    address: str, first: list[tuple[str, int]], second: list[tuple[str, int]]
) -> None:
    """In whatever order, also after a restart; and each tenant has its own."""

    async def law() -> None:
        tenant = fresh_user()
        async with opened(address, GENERATION, tenant=tenant) as store, opened(address, tenant=tenant) as other:
            for events, process in ((first, store), (second, other)):
                for item_id, time_s in events:
                    await process.add_trends(tenant, {item_id: trend_of(time_s * 1_000_000)})
        async with opened(address, tenant=tenant) as again:
            trends = await again.trends(tenant, 10)
            assert list(trends.values()) == sorted(trends.values(), reverse=True)
            expected = halved(first + second)
            assert {name: count_at(trend, NOW_S * 1_000_000) for name, trend in trends.items()} == pytest.approx(
                expected, rel=1e-7
            )
            assert list(await again.trends(tenant, 2)) == list(trends)[:2]
            assert await again.trends(f"{tenant}-other", 10) == {}

    asyncio.run(law())


def test_many_items_are_added_at_once_and_old_ones_are_let_go(address: str) -> None:
    async def law() -> None:
        async with opened(address, GENERATION) as store:
            old = NOW_S - math.ceil((MAX_AGE_HALF_LIVES + 1) * HALF_LIFE_S)
            await store.add_trends("main", {"old": trend_of(old * 1_000_000)})
            assert list(await store.trends("main", 9)) == ["old"]
            await store.add_trends("main", {f"i{n}": trend_of(NOW_S * 1_000_000, n + 1) for n in range(1200)})
            await store.add_trends("main", {})
            found = await store.trends("main", 5000)
            assert list(found) == [f"i{n}" for n in reversed(range(1200))]
        with pytest.raises(StorageUnavailable):
            await store.add_trends("main", {"a": 1.0})
        with pytest.raises(StorageUnavailable):
            await store.trends("main", 1)

    asyncio.run(law())
