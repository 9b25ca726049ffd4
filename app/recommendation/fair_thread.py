"""A thread for Python work that takes milliseconds and is not batched: long bodies, lists of ids, searches."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from app.recommendation.batching import ANYBODY, Limits, MicroBatcher, Requester
from storage.state.switch_interval import short_turns

MAX_WAITING = 1024  # computations

ResultT = TypeVar("ResultT")


class Computation(NamedTuple):
    """A function and its cost relative to others."""

    run: Callable[[], Any]
    cost: float


class FairThread:
    """Runs functions one after another in a thread; keys take turns, weighted by the cost of their functions.

    Each thread that runs Python delays every step of the event loop. So one thread per process runs all long
    computations, however many requests need one at the same time. While it works, it releases the interpreter lock five
    times as often.
    """

    def __init__(self, thread: Executor) -> None:
        self._thread = thread
        self._batcher: MicroBatcher[Computation, Any] = MicroBatcher(
            self._run_alone, attrgetter("cost"), Limits(max_batch=0, max_waiting=MAX_WAITING)
        )

    async def run(self, function: Callable[[], ResultT], cost: float, requester: Requester = ANYBODY) -> ResultT:
        """Run the function in the thread; return its result or raise its exception.

        cost     greater than 0, in a unit that all computations share
        raises   Overloaded        when the queue is full
                 ClientDisconnect  when the client has disconnected
        """
        result: ResultT
        (result,) = await self._batcher.submit([Computation(function, cost)], requester)
        return result

    async def _run_alone(self, batch: Sequence[Computation]) -> list[Any]:
        (computation,) = batch
        with short_turns():
            return [await asyncio.get_running_loop().run_in_executor(self._thread, computation.run)]
