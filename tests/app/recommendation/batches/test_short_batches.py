"""Batch length: short on the event loop while several keys have requests, otherwise long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any

import pytest

from app.recommendation import batching, executor
from app.recommendation.batching import Limits, MicroBatcher, Requester
from app.recommendation.executor import FEW, AdaptiveExecutor, EngineThreads
from app.recommendation.fair_thread import FairThread

LONG, SHORT = 8, 2


async def batch_sizes(flows: Sequence[str]) -> list[int]:
    """Submit one request of each flow at the same time; return the sizes of their batches."""
    sizes = list[int]()

    async def work(batch: list[str]) -> list[str]:
        sizes.append(len(batch))
        await asyncio.sleep(0)
        return batch

    batcher = MicroBatcher[str, str](work, lambda _: 1.0, Limits(LONG, 1_000, short_batch=lambda: SHORT))
    await asyncio.gather(*(batcher.submit([flow], Requester(flow=flow)) for flow in flows))
    return sizes


@pytest.mark.parametrize("flow", ["", "a key"])
def test_batches_of_one_flow_are_long(flow: str) -> None:
    assert asyncio.run(batch_sizes([flow] * 32)) == [LONG] * 4


def test_batches_are_short_while_several_flows_have_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "FEW_BETWEEN", 16)
    sizes = asyncio.run(batch_sizes([*"ab", *"a" * 60]))
    assert sum(sizes) == 62
    short = next(number for number, size in enumerate(sizes) if size > SHORT)
    assert 16 <= sum(sizes[:short]) <= 16 + 2 * SHORT
    assert set(sizes[:short]) == {SHORT}
    assert set(sizes[short:-1]) == {LONG}


@pytest.fixture
def threads() -> Any:
    pools = [ThreadPoolExecutor(1) for _ in range(3)]
    yield EngineThreads(pools[0], pools[1], FairThread(pools[2]))
    for pool in pools:
        pool.shutdown()


@pytest.mark.parametrize("items", [100_000, 1_000_000])
@pytest.mark.parametrize("is_costly", [False, True])
@pytest.mark.parametrize("unit_s", [1e-4, 1e-3])
def test_a_short_batch_runs_on_the_event_loop(
    threads: EngineThreads, unit_s: float, items: int, *, is_costly: bool
) -> None:
    """After measuring the CPU time per cost; a costly batch may take longer than others."""
    now_s = iter(unit_s * number for number in range(1_000))

    def compute(_requests: Sequence[Any], _data: None) -> int:
        return threading.get_ident()

    async def law() -> None:
        adaptive = AdaptiveExecutor[None, int](compute, threads, items)
        assert adaptive.short_batch() == inf  # nothing is known yet
        for _ in range(100 * executor.BATCHES_PER_TIMING):
            await adaptive.run_light([], None, 1.0)
        cost = adaptive.short_batch()
        assert cost == pytest.approx(executor.MAX_ON_LOOP_S / unit_s, rel=0.01)
        run = adaptive.run_light
        if is_costly:
            slowest_s = max(4 * unit_s, 4e-4 + 4e-9 * items)
            run, cost = adaptive.run_costly, executor.MAX_ON_LOOP_S / slowest_s
        assert await run([], None, 0.98 * cost) == threading.get_ident()
        assert await run([], None, 1.02 * cost) != threading.get_ident()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "thread_time", lambda: next(now_s))
        asyncio.run(law())


@pytest.mark.parametrize("items", [100_000, 1_000_000])
def test_costly_batches_run_on_the_event_loop_until_one_is_slow(
    threads: EngineThreads, items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By CPU time; a batch of any duration blocks the loop for a bounded time."""
    fast_s, slow_s, spent_s = 1e-4, 4e-4 + 4e-9 * items, [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: spent_s[0])

    def compute(_requests: Sequence[Any], taken_s: float) -> int:
        spent_s[0] += taken_s
        return threading.get_ident()

    async def law() -> None:
        adaptive = AdaptiveExecutor[float, int](compute, threads, items)

        async def is_on_loop(cost: float, unit_s: float) -> bool:
            return await adaptive.run_costly([], cost * unit_s, cost) == threading.get_ident()

        likely_s = executor.RECENT_MARGIN * fast_s
        cost = 0.98 * min(executor.RARELY_ON_LOOP_S / slow_s, executor.MAX_ON_LOOP_S / likely_s)
        for _ in range(2):
            assert not await is_on_loop(cost, slow_s)
            places = [await is_on_loop(cost, fast_s) for _ in range(300)]
            assert not any(places[:20])
            assert places == sorted(places)  # from one of them on
            assert places[-1]
            assert not await is_on_loop(1.05 * cost, fast_s)
            assert await is_on_loop(cost, slow_s)  # which nobody could know

    asyncio.run(law())


def test_batches_without_a_cost_estimate_do_not_change_the_length(threads: EngineThreads) -> None:
    async def law() -> None:
        adaptive = AdaptiveExecutor[None, int](lambda *_: threading.get_ident(), threads)
        before = adaptive.short_batch()
        for _ in range(100):
            assert await adaptive.run_costly([], None, inf) != threading.get_ident()
        assert adaptive.short_batch() == before
        assert await adaptive.run_costly([], None, 12.0) != threading.get_ident()

    asyncio.run(law())


def test_batches_stay_long_if_few_requests_fit_or_a_gpu_computes(
    threads: EngineThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu, on_gpu = (AdaptiveExecutor[None, None](lambda *_: None, threads, max_running=most) for most in (1, 2))
    for unit_s, expected in ((executor.MAX_ON_LOOP_S / (FEW - 0.1), inf), (executor.MAX_ON_LOOP_S / FEW, FEW)):
        monkeypatch.setattr(on_cpu, "_unit_s", unit_s)
        assert on_cpu.short_batch() == pytest.approx(expected)
    monkeypatch.setattr(on_gpu, "_unit_s", 1e-6)
    assert on_gpu.short_batch() == inf
