"""Batches form while one is worked on; everybody who waits is answered, or told why not."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from app.errors import Overloaded
from app.recommendation.batching import MicroBatcher, MicroBatcherByNode

MAX_BATCH = 4
MAX_WAITING = 10


class Work:
    """Answers each ask with ten times it, as soon as the batch may go."""

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


async def begun(answers: asyncio.Future[Any]) -> asyncio.Future[Any]:
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return answers


def new_batcher() -> tuple[Work, MicroBatcher[int, int]]:
    work = Work()
    return work, MicroBatcher(work, max_batch=MAX_BATCH, max_waiting=MAX_WAITING)


def test_what_comes_while_a_batch_runs_forms_the_next_one() -> None:
    async def law() -> None:
        work, batcher = new_batcher()
        asked = [await begun(batcher.submit([number])) for number in range(1 + MAX_BATCH + 2)]
        assert work.batches == [[0]]
        work.may_go.set()
        assert await asyncio.gather(*asked) == [[10 * number] for number in range(len(asked))]
        assert work.batches == [[0], [1, 2, 3, 4], [5, 6]]
        assert await batcher.submit([7]) == [70]

    asyncio.run(law())


@given(callers=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), max_size=12))
def test_everybody_gets_the_own_answers_in_order(callers: list[list[int]]) -> None:
    async def law() -> None:
        work = Work()
        batcher = MicroBatcher(work, max_batch=MAX_BATCH, max_waiting=1_000)
        asked = [await begun(batcher.submit(asks)) for asks in callers]
        work.may_go.set()
        assert await asyncio.gather(*asked) == [[10 * ask for ask in asks] for asks in callers]
        assert [*chain(*work.batches)] == [*chain(*callers)]

    asyncio.run(law())


def test_everybody_in_a_failed_batch_is_told_and_the_next_one_runs() -> None:
    async def law() -> None:
        work, batcher = new_batcher()
        asked = [await begun(batcher.submit([ask])) for ask in (0, 1, -1, 2, 3, 4)]
        work.may_go.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [found[0], found[5]] == [[0], [40]]
        assert all(isinstance(one, ZeroDivisionError) for one in found[1:5])

    asyncio.run(law())


def test_no_more_wait_than_may() -> None:
    async def law() -> None:
        work, batcher = new_batcher()
        asked = [await begun(batcher.submit([number])) for number in range(1 + MAX_WAITING)]
        with pytest.raises(Overloaded):
            await batcher.submit([99])
        work.may_go.set()
        await asyncio.gather(*asked)
        assert await batcher.submit(list(range(3 * MAX_WAITING))) == [10 * number for number in range(3 * MAX_WAITING)]

    asyncio.run(law())


def test_nobody_works_for_who_is_gone_or_was_cancelled() -> None:
    async def law() -> None:
        work, batcher = new_batcher()
        first = await begun(batcher.submit([0]))
        gone = await begun(batcher.submit([1], lambda: True))
        cancelled = await begun(batcher.submit([2]))
        waits = await begun(batcher.submit([3], lambda: False))
        cancelled.cancel()
        await asyncio.sleep(0)
        work.may_go.set()
        assert [await first, await waits] == [[0], [30]]
        with pytest.raises(ClientDisconnect):
            await gone
        assert work.batches == [[0], [3]]

    asyncio.run(law())


def test_who_is_cancelled_meanwhile_holds_nobody_up() -> None:
    async def law() -> None:
        work, batcher = new_batcher()
        first = await begun(batcher.submit([0]))
        first.cancel()
        second = await begun(batcher.submit([1]))
        work.may_go.set()
        assert await second == [10]

    asyncio.run(law())


class WorkByNode:
    """Answers each ask with ten times it, as soon as its node answers; an ask's node is its last digit."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.hanging: dict[int, asyncio.Event] = {}

    async def __call__(self, asks: list[int]) -> list[int]:
        self.batches.append(asks)
        (node,) = {ask % 10 for ask in asks}
        if node in self.hanging:
            await self.hanging[node].wait()
        return [10 * ask for ask in asks]


def new_batcher_by_node(max_callers: int = 100) -> tuple[WorkByNode, MicroBatcherByNode[int, int]]:
    work = WorkByNode()
    return work, MicroBatcherByNode(
        work,
        lambda ask: f"{ask % 10 or ''}",  # 0 needs no node
        max_batch=MAX_BATCH,
        max_waiting=MAX_WAITING,
        max_callers=max_callers,
    )


@given(callers=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), max_size=12))
def test_batches_are_of_one_node_and_everybody_gets_the_own_answers_in_order(callers: list[list[int]]) -> None:
    async def law() -> None:
        work, batcher = new_batcher_by_node()
        asked = [await begun(batcher.submit(asks)) for asks in callers]
        assert await asyncio.gather(*asked) == [[10 * ask for ask in asks] for asks in callers]
        assert sorted(chain(*work.batches)) == sorted(chain(*callers))

    asyncio.run(law())


def test_a_node_that_hangs_holds_up_its_own_callers_only_and_few_of_them() -> None:
    async def law() -> None:
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

    asyncio.run(law())


def test_who_needs_no_node_is_not_bounded_by_node() -> None:
    async def law() -> None:
        work, batcher = new_batcher_by_node(max_callers=1)
        work.hanging[0] = asyncio.Event()
        asked = [await begun(batcher.submit([10 * number])) for number in range(5)]
        work.hanging[0].set()
        assert await asyncio.gather(*asked) == [[100 * number] for number in range(5)]

    asyncio.run(law())
