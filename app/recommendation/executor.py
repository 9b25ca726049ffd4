"""Runs short computations on the event loop, and long ones in a thread."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from math import inf
from typing import Generic, NamedTuple, TypeVar

from app.recommendation.fair_thread import FairThread
from app.schemas.recommendations import RecommendationRequest
from storage.state.switch_interval import short_turns

MAX_ON_LOOP_S = 0.005  # Python's default switch interval, by which another computing thread would delay the event loop
FEW = 4.0  # plain requests; where fewer fit on the event loop, larger batches in a thread answer many more of them
TIMES_AVERAGED = 8
BATCHES_PER_TIMING = 4  # reading a thread's time is a system call
# The slowest costly requests take so long for each unit of their cost: in Python, and for each item of the catalogue,
# as with boosts for a user without a history. On a slow machine, it is this many times as long as light requests take.
COSTLY_UNIT_S, COSTLY_ITEM_S, COSTLY_MARGIN = 4e-4, 4e-9, 4.0
# Costly requests of one shop are mostly alike, and much faster than that. So a batch also runs on the event loop if
# it fits at somewhat more than the slowest recent pace, and would hold the loop up by no more than this at the slowest.
RARELY_ON_LOOP_S, RECENT_MARGIN, REMEMBERED = 0.02, 1.25, 31 / 32

InputT = TypeVar("InputT")
ResultT = TypeVar("ResultT")


class EngineThreads(NamedTuple):
    """The threads that compute for all tenants.

    light   runs batches of cheap requests; it has as many threads as batches of a generation may run at a time
    costly  runs batches of costly requests
    shared  runs work that is not batched
    """

    light: Executor
    costly: Executor
    shared: FairThread


class AdaptiveExecutor(Generic[InputT, ResultT]):
    """Runs one function for batches of requests: short batches on the event loop, all others in a thread.

    Two threads that run Python delay each other at every call that releases the interpreter lock. That costs more than
    making all other requests wait briefly. Long costly requests have their own thread, so that light requests do not
    wait for them. If batches wait for a GPU, they overlap and never run on the event loop.

    compute      takes the requests of a batch and the data read for them
    items        the size of the catalogue
    max_running  the largest number of light batches that run at a time
    """

    def __init__(
        self,
        compute: Callable[[Sequence[RecommendationRequest], InputT], ResultT],
        threads: EngineThreads,
        items: int = 0,
        max_running: int = 1,
    ) -> None:
        self._compute = compute
        self._threads = threads
        self._running_light = asyncio.Semaphore(max_running)  # batches for several nodes share the engine
        self._in_threads = 0
        self._may_run_on_loop = max_running == 1
        self._costly_unit_s = COSTLY_UNIT_S + COSTLY_ITEM_S * items
        self._recent_unit_s = inf  # that of the slowest of the last costly batches
        self._light_batches = 0
        self._unit_s = MAX_ON_LOOP_S  # estimated processor time of light batches per unit of cost

    def short_batch(self) -> float:
        """Return the largest cost of a light batch that runs on the event loop; infinity where that is too little."""
        fits = MAX_ON_LOOP_S / self._unit_s
        return fits if self._may_run_on_loop and fits >= FEW else inf

    @property
    def _slowest_unit_s(self) -> float:
        """How long the slowest costly requests may take for each unit of their cost."""
        return max(self._costly_unit_s, COSTLY_MARGIN * self._unit_s)

    async def run_light(self, requests: Sequence[RecommendationRequest], data: InputT, cost: float) -> ResultT:
        """Return the result of the function for one batch of light requests with this total cost."""
        self._light_batches += 1
        is_timed = self._light_batches % BATCHES_PER_TIMING == 0
        compute = partial(self._compute_timed, cost) if is_timed else self._compute
        is_short = self._may_run_on_loop and cost * self._unit_s <= MAX_ON_LOOP_S
        if is_short and not self._in_threads:
            return compute(requests, data)
        async with self._running_light:
            if is_short:
                return compute(requests, data)
            self._in_threads += 1
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads.light, compute, requests, data)
            finally:
                self._in_threads -= 1

    async def run_costly(self, requests: Sequence[RecommendationRequest], data: InputT, cost: float) -> ResultT:
        """Return the result of the function for one batch of costly requests with this total cost.

        A long batch builds lists in Python, so its thread releases the interpreter lock more often than usual.
        """
        is_likely_short = RECENT_MARGIN * cost * self._recent_unit_s <= MAX_ON_LOOP_S
        limit_s = max(MAX_ON_LOOP_S, RARELY_ON_LOOP_S * is_likely_short)
        compute = self._compute if cost == inf else partial(self._compute_costly, cost)  # says nothing of the pace
        if self._may_run_on_loop and cost * self._slowest_unit_s <= limit_s:
            return compute(requests, data)
        with short_turns():
            return await asyncio.get_running_loop().run_in_executor(self._threads.costly, compute, requests, data)

    def _compute_costly(self, cost: float, requests: Sequence[RecommendationRequest], data: InputT) -> ResultT:
        result, unit_s = self._timed(cost, requests, data)
        self._recent_unit_s = max(unit_s, REMEMBERED * min(self._recent_unit_s, self._slowest_unit_s))
        if self._light_batches < BATCHES_PER_TIMING:  # none of them is timed yet
            self._unit_s = unit_s
        return result

    def _compute_timed(self, cost: float, requests: Sequence[RecommendationRequest], data: InputT) -> ResultT:
        result, unit_s = self._timed(cost, requests, data)
        self._unit_s += (unit_s - self._unit_s) / TIMES_AVERAGED
        return result

    def _timed(self, cost: float, requests: Sequence[RecommendationRequest], data: InputT) -> tuple[ResultT, float]:
        """Return the result, and the processor time for each unit of its cost."""
        begin_s = time.thread_time()
        result = self._compute(requests, data)
        return result, (time.thread_time() - begin_s) / cost
