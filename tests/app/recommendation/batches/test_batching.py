"""Micro-batching: batches form while one runs, and every caller gets its answer or an error."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from app.errors import Overloaded
from app.recommendation.batching import Limits, MicroBatcher, MicroBatcherByLane, Requester
from app.recommendation.executor import AdaptiveExecutor, EngineThreads
from app.recommendation.fair_thread import FairThread
from tests.waiting import PATIENCE_S

MAX_BATCH = 4
MAX_WAITING = 10


class Work:
    """Returns ten times each request once the batch is released."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.may_go = asyncio.Event()
        self.at_work = 0

    async def __call__(self, asks: list[int]) -> list[int]:
        self.batches.append(asks)
        self.at_work += 1
        assert self.at_work == 1
        await self.may_go.wait()
        self.at_work -= 1
        if -1 in asks:
            raise ZeroDivisionError
        return [10 * ask for ask in asks]


async def begun(answers: asyncio.Future[Any], turns: int = 2) -> asyncio.Future[Any]:
    for _ in range(turns):
        await asyncio.sleep(0)
    return answers


def one_each(_: int) -> float:
    return 1.0


def new_batcher() -> tuple[Work, MicroBatcher[int, int]]:
    work = Work()
    return work, MicroBatcher(work, one_each, Limits(MAX_BATCH, MAX_WAITING))


async def test_requests_during_a_batch_form_the_next_one() -> None:
    work, batcher = new_batcher()
    asked = [await begun(batcher.submit([number])) for number in range(1 + MAX_BATCH + 2)]
    work.may_go.set()
    assert await asyncio.gather(*asked) == [[10 * number] for number in range(len(asked))]
    assert work.batches == [[0], [1, 2, 3, 4], [5, 6]]
    await asyncio.gather(*[await begun(batcher.submit([number]), turns=1) for number in range(6)])
    assert work.batches[3:] == [[0, 1, 2, 3], [4, 5]]  # a batch waits for what the next turn of the loop brings


@given(callers=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), max_size=12))
def test_callers_get_their_own_answers_in_order(callers: list[list[int]]) -> None:
    async def law() -> None:
        work = Work()
        batcher = MicroBatcher(work, one_each, Limits(MAX_BATCH, 1_000))
        asked = [await begun(batcher.submit(asks)) for asks in callers]
        work.may_go.set()
        assert await asyncio.gather(*asked) == [[10 * ask for ask in asks] for asks in callers]
        assert [*chain(*work.batches)] == [*chain(*callers)]

    asyncio.run(law())


async def test_a_failed_batch_fails_its_callers_and_the_next_one_runs() -> None:
    work, batcher = new_batcher()
    asked = [await begun(batcher.submit([ask])) for ask in (0, 1, -1, 2, 3, 4)]
    work.may_go.set()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [found[0], found[5]] == [[0], [40]]
    assert all(isinstance(one, ZeroDivisionError) for one in found[1:5])


async def test_requests_beyond_the_queue_limit_are_refused() -> None:
    work, batcher = new_batcher()
    asked = [await begun(batcher.submit([number])) for number in range(1 + MAX_WAITING)]
    with pytest.raises(Overloaded):
        await batcher.submit([99])
    work.may_go.set()
    await asyncio.gather(*asked)
    assert await batcher.submit(list(range(3 * MAX_WAITING))) == [10 * number for number in range(3 * MAX_WAITING)]


@pytest.mark.parametrize("end", [None, ZeroDivisionError, asyncio.CancelledError])
def test_the_first_request_runs_at_once_and_others_form_the_next_batch(end: type | None) -> None:
    async def law() -> None:
        batches, may_go = list[list[int]](), asyncio.Event()

        async def work(asks: list[int]) -> list[int]:
            batches.append(asks)
            await may_go.wait()
            return [10 // ask for ask in asks]

        batcher = MicroBatcher(work, one_each, Limits(MAX_BATCH, MAX_WAITING))
        numbers = (0 if end is ZeroDivisionError else 1, 2, 5)
        asked = [await begun(asyncio.ensure_future(batcher.answer_one(number))) for number in numbers]
        if end is asyncio.CancelledError:
            asked[0].cancel()
        may_go.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert found[1:] == [5, 2]
        assert found[0] == 10 if end is None else isinstance(found[0], end)
        assert batches == [[numbers[0]], [2, 5]]
        assert await batcher.answer_one(10) == 1

    asyncio.run(law())


async def test_disconnected_and_cancelled_callers_are_not_computed() -> None:
    work, batcher = new_batcher()
    first = await begun(batcher.submit([0]))
    gone = await begun(batcher.submit([1], Requester(lambda: True)))
    cancelled = await begun(batcher.submit([2]))
    waits = await begun(batcher.submit([3], Requester(lambda: False)))
    cancelled.cancel()
    await asyncio.sleep(0)
    work.may_go.set()
    assert [await first, await waits] == [[0], [30]]
    with pytest.raises(ClientDisconnect):
        await gone
    assert work.batches == [[0], [3]]


async def test_a_cancelled_caller_does_not_delay_others() -> None:
    work, batcher = new_batcher()
    first = await begun(batcher.submit([0]))
    first.cancel()
    second = await begun(batcher.submit([1]))
    work.may_go.set()
    assert await second == [10]


class TestOverlappingBatches:
    """Two batches run at a time, as on a GPU whose copies overlap with computation."""

    def test_two_batches_run_at_a_time(self) -> None:
        async def law() -> None:
            may_end = [asyncio.Event() for _ in range(3)]
            batches: list[list[int]] = []

            async def work(asks: list[int]) -> list[int]:
                batches.append(asks)
                await may_end[len(batches) - 1].wait()
                return asks

            batcher = MicroBatcher(work, one_each, Limits(MAX_BATCH, MAX_WAITING, max_running=2))
            asked = [await begun(batcher.submit([number])) for number in range(4)]
            assert batches == [[0], [1]]
            may_end[1].set()
            assert await asked[1] == [1]
            assert not asked[0].done()
            await begun(asked[2])
            assert batches == [[0], [1], [2, 3]]
            may_end[0].set()
            may_end[2].set()
            assert await asyncio.gather(*asked) == [[0], [1], [2], [3]]

        asyncio.run(law())

    @given(
        callers=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), max_size=12),
        max_running=st.integers(1, 3),
        data=st.data(),
    )
    def test_answers_keep_their_order_whichever_batch_ends_first(
        self, callers: list[list[int]], max_running: int, data: st.DataObject
    ) -> None:
        async def law() -> None:
            at_work: list[asyncio.Event] = []
            largest = 0

            async def work(asks: list[int]) -> list[int]:
                nonlocal largest
                at_work.append(may_end := asyncio.Event())
                largest = max(largest, len(at_work))
                await may_end.wait()
                return [10 * ask for ask in asks]

            batcher = MicroBatcher(work, one_each, Limits(MAX_BATCH, 1_000, max_running=max_running))
            asked = [batcher.submit(asks) for asks in callers]
            while not all(one.done() for one in asked):
                await begun(asked[0])
                if at_work:
                    at_work.pop(data.draw(st.integers(0, len(at_work) - 1))).set()
            assert [one.result() for one in asked] == [[10 * ask for ask in asks] for asks in callers]
            assert largest <= max_running

        asyncio.run(law())

    def test_batches_run_in_threads_concurrently(self) -> None:
        both = threading.Barrier(2, timeout=PATIENCE_S)
        threads: list[threading.Thread] = []

        def compute(_: Any, number: int) -> int:
            threads.append(threading.current_thread())
            both.wait()
            return number

        async def law() -> None:
            with ThreadPoolExecutor(2) as light, ThreadPoolExecutor(1) as other:
                executor = AdaptiveExecutor(compute, EngineThreads(light, other, FairThread(other)), max_running=2)
                runs = [executor.run_light([], number, cost=1e-9) for number in range(6)]
                assert await asyncio.gather(*runs) == list(range(6))

        asyncio.run(law())
        assert threading.main_thread() not in threads


class WorkByNode:
    """Returns ten times each request once its node responds; the node is the last digit."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.hanging: dict[int, asyncio.Event] = {}

    async def __call__(self, asks: list[int]) -> list[int]:
        self.batches.append(asks)
        (node,) = {ask % 10 for ask in asks}
        if node in self.hanging:
            await self.hanging[node].wait()
        return [10 * ask for ask in asks]


def new_batcher_by_node(max_callers: int = 100) -> tuple[WorkByNode, MicroBatcherByLane[str, int, int]]:
    work = WorkByNode()
    return work, MicroBatcherByLane(
        work,
        one_each,
        lambda ask: f"{ask % 10 or ''}",  # 0 needs no node
        lambda node: Limits(MAX_BATCH, MAX_WAITING, max_callers if node else inf),
    )


@given(callers=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), max_size=12))
def test_each_batch_contains_users_of_one_node(callers: list[list[int]]) -> None:
    async def law() -> None:
        work, batcher = new_batcher_by_node()
        asked = [await begun(batcher.submit(asks)) for asks in callers]
        assert await asyncio.gather(*asked) == [[10 * ask for ask in asks] for asks in callers]
        assert sorted(chain(*work.batches)) == sorted(chain(*callers))

    asyncio.run(law())


async def test_a_hung_node_delays_only_a_few_of_its_own_callers() -> None:
    work, batcher = new_batcher_by_node(max_callers=3)
    work.hanging[7] = asyncio.Event()
    waiting = [await begun(batcher.submit([ask])) for ask in (7, 17)]
    mixed = await begun(batcher.submit([1, 27, 2]))
    for ask in (1, 2, 10):
        assert await batcher.submit([ask]) == [10 * ask]
    for asks in ([37], [1, 37]):
        with pytest.raises(Overloaded):
            await batcher.submit(asks)
    assert not any(one.done() for one in (*waiting, mixed))
    work.hanging[7].set()
    assert await asyncio.gather(*waiting, mixed) == [[70], [170], [10, 270, 20]]
    assert await batcher.submit([37]) == [370]


async def test_callers_without_a_node_have_no_limit_per_node() -> None:
    work, batcher = new_batcher_by_node(max_callers=1)
    work.hanging[0] = asyncio.Event()
    asked = [await begun(batcher.submit([10 * number])) for number in range(5)]
    work.hanging[0].set()
    assert await asyncio.gather(*asked) == [[100 * number] for number in range(5)]


FLOWS = "abc"


class TestFairness:
    """Callers are flows; a request is its own cost, and a batch costs at most MAX_BATCH or is one request."""

    def batcher(self, max_waiting: int = 1_000) -> tuple[Work, MicroBatcher[int, int]]:
        work = Work()
        return work, MicroBatcher(work, float, Limits(MAX_BATCH, max_waiting))

    async def test_a_large_call_does_not_delay_later_callers(self) -> None:
        work, batcher = self.batcher()
        large = await begun(batcher.submit([1] * 100, Requester(flow="a")))
        small = await begun(batcher.submit([2], Requester(flow="b")))
        work.may_go.set()
        assert await small == [20]
        assert not large.done()
        assert work.batches[1].count(2) == 1  # the batch after the one that was at work already
        assert await large == [10] * 100

    @given(
        calls=st.lists(
            st.tuples(st.sampled_from(FLOWS), st.lists(st.integers(1, 6), min_size=1, max_size=8)), min_size=1
        )
    )
    def test_waiting_flows_get_equal_shares(self, calls: list[tuple[str, list[int]]]) -> None:
        """Requests encode (flow, cost), so that batches show the order of flows."""
        waiting = {flow: sum(sum(costs) for of, costs in calls if of == flow) for flow in FLOWS}

        async def law() -> None:
            batches: list[list[tuple[str, int]]] = []
            may_go = asyncio.Event()

            async def work(batch: list[tuple[str, int]]) -> list[tuple[str, int]]:
                batches.append(batch)
                await may_go.wait()
                return batch

            batcher: MicroBatcher[tuple[str, int], tuple[str, int]] = MicroBatcher(
                work, lambda one: one[1], Limits(MAX_BATCH, 1_000)
            )
            first = await begun(batcher.submit([("first", 1)], Requester(flow="first")))
            answers = [batcher.submit([(flow, cost) for cost in costs], Requester(flow=flow)) for flow, costs in calls]
            may_go.set()
            assert await first == [("first", 1)]
            for (flow, costs), answer in zip(calls, answers, strict=True):
                assert await answer == [(flow, cost) for cost in costs]
            for batch in batches:
                assert len(batch) == 1 or sum(cost for _, cost in batch) <= MAX_BATCH
            got = dict.fromkeys(FLOWS, 0)
            for flow, cost in chain(*batches[1:]):
                behind = [one for one in FLOWS if got[one] < waiting[one]]
                assert got[flow] == min(got[one] for one in behind)
                got[flow] += cost

        asyncio.run(law())

    async def test_a_full_queue_still_admits_the_share_of_each_flow(self) -> None:
        work, batcher = self.batcher(max_waiting=10)
        greedy = [await begun(batcher.submit([1] * size, Requester(flow="a"))) for size in (MAX_BATCH, 5, 5)]
        with pytest.raises(Overloaded):
            batcher.submit([1], Requester(flow="a"))
        modest = batcher.submit([2] * 5, Requester(flow="b"))  # half of ten
        with pytest.raises(Overloaded):
            batcher.submit([2], Requester(flow="b"))
        third = batcher.submit([3] * 3, Requester(flow="c"))
        with pytest.raises(Overloaded):
            batcher.submit([3], Requester(flow="c"))
        work.may_go.set()
        assert await modest == [20] * 5
        assert await third == [30] * 3
        assert await asyncio.gather(*greedy) == [[10] * MAX_BATCH, [10] * 5, [10] * 5]

    async def test_a_caller_cancelled_midway_releases_its_turn(self) -> None:
        work, batcher = self.batcher()
        leaves = await begun(batcher.submit([1] * 100, Requester(flow="a")))
        stays = batcher.submit([2] * 9, Requester(flow="a"))
        leaves.cancel()
        work.may_go.set()
        assert await stays == [20] * 9
        assert sum(batch.count(1) for batch in work.batches) == MAX_BATCH
