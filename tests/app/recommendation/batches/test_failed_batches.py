"""Every caller in a batch gets an error, however the work fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from app.recommendation.batching import Limits, MicroBatcher
from tests.waiting import PATIENCE_S, until

LIMITS = Limits(max_batch=4, max_waiting=10)


def new_batcher(work: Callable[[list[int]], Awaitable[list[int]]]) -> MicroBatcher[int, int]:
    return MicroBatcher(work, lambda _: 1.0, LIMITS)


@pytest.mark.parametrize("error", [RuntimeError, ValueError], ids=["cancelled", "too few answers"])
async def test_a_cancelled_or_incomplete_batch_fails_and_the_next_one_runs(error: type) -> None:
    async def work(asks: list[int]) -> list[int]:
        if 0 in asks and error is RuntimeError:
            raise asyncio.CancelledError
        return [] if 0 in asks else asks

    batcher = new_batcher(work)
    asked = [batcher.submit([ask]) for ask in (0, 1, 2, 3, 4)]
    async with asyncio.timeout(PATIENCE_S):
        *failed, last = await asyncio.gather(*asked, return_exceptions=True)
    assert list(map(type, failed)) == [error] * 4
    assert last == [4]


def test_a_cancelled_batcher_fails_its_batch_and_starts_no_other() -> None:
    batches = list[list[int]]()

    async def work(asks: list[int]) -> list[int]:
        batches.append(asks)
        if len(batches) == 1:
            await asyncio.Event().wait()
        return asks

    async def law() -> list[asyncio.Future[list[int]]]:
        batcher = new_batcher(work)
        asked = [batcher.submit([ask]) for ask in range(5)]
        await until(lambda: batches)
        return asked

    *failed, last = asyncio.run(law())  # which cancels the batch
    assert [type(one.exception()) for one in failed] == [RuntimeError] * 4
    assert (batches, last.done()) == ([[0, 1, 2, 3]], False)
