"""Fair queueing between flows in a batcher, and its counts."""

from __future__ import annotations

import asyncio

from app.recommendation.batching import FairQueue, Requester, _Call

Queue = FairQueue[str, str]


def new_queue() -> Queue:
    return FairQueue(lambda _: 1.0)


def put(queue: Queue, flow: str, requests: int) -> asyncio.Future[list[str]]:
    """Add a call whose requests are named after the flow."""
    waiter = asyncio.get_running_loop().create_future()
    queue.put(_Call([flow] * requests, Requester(flow=flow), waiter))
    return waiter


def take(queue: Queue, requests: int) -> list[str]:
    return [call.requests[place] for call, place in queue.take(requests)]


async def test_a_new_flow_shares_equally_with_a_busy_one() -> None:
    queue = new_queue()
    put(queue, "old", 1_100)
    take(queue, 1_000)
    put(queue, "new", 100)
    assert abs(take(queue, 100).count("new") - 50) <= 1


async def test_a_call_cancelled_midway_is_no_longer_counted() -> None:
    queue = new_queue()
    leaves = put(queue, "leaves", 3)
    put(queue, "stays", 2)
    assert take(queue, 1) == ["leaves"]
    leaves.cancel()
    assert take(queue, 2) == ["stays", "stays"]
    assert (bool(queue), queue.requests.total) == (False, 0)
    put(queue, "full", 10)
    assert queue.requests.has_room("other", 5, most=10)  # half: nobody else is counted
