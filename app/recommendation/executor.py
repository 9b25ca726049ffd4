"""Runs short computations on the event loop, and long ones in a thread."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

from app.schemas.recommendations import RecommendationRequest

MAX_ON_LOOP_S = 0.005  # the interpreter's switch interval: another computing thread delays the event loop as much
TIMES_AVERAGED = 8
BATCHES_PER_TIMING = 4  # reading a thread's time is a system call
LIGHT_FIELDS, MAX_LIGHT_K = {"user_id", "k", "exclude_seen", "explain", "diversity", "max_per_category"}, 50
LIGHT_FIELDS |= {"categories", "categories_all", "categories_none", "exclude", "boost", "pin", "cursor", "because"}
MAX_LIGHT_IDS = 100  # items that are excluded, pinned or on earlier pages

InputT = TypeVar("InputT")
ResultT = TypeVar("ResultT")


class AdaptiveExecutor(Generic[InputT, ResultT]):
    """Runs one function for batches of requests: light ones on the event loop, heavy ones in a thread.

    Two threads that run Python delay each other at every call that releases the interpreter. That costs more than a
    short wait of all other requests.

    compute  takes the requests of a batch and the data read for them
    """

    def __init__(self, compute: Callable[[Sequence[RecommendationRequest], InputT], ResultT], thread: Executor) -> None:
        self._compute = compute
        self._thread = thread
        self._light_batches = 0
        self._light_request_s = MAX_ON_LOOP_S  # the estimated processor time of a light request

    async def run(self, requests: Sequence[RecommendationRequest], data: InputT) -> ResultT:
        """Return the result of the function for one batch."""
        compute, is_light = self._compute, all(map(_is_light, requests))
        if is_light:
            self._light_batches += 1
            if self._light_batches % BATCHES_PER_TIMING == 0:
                compute = self._compute_timed
            if len(requests) * self._light_request_s <= MAX_ON_LOOP_S:
                return compute(requests, data)
        return await asyncio.get_running_loop().run_in_executor(self._thread, compute, requests, data)

    def _compute_timed(self, requests: Sequence[RecommendationRequest], data: InputT) -> ResultT:
        begin_s = time.thread_time()
        result = self._compute(requests, data)
        request_s = (time.thread_time() - begin_s) / len(requests)
        self._light_request_s += (request_s - self._light_request_s) / TIMES_AVERAGED
        return result


def _is_light(request: RecommendationRequest) -> bool:
    """Return whether the request is a usual one, whose time predicts that of the next."""
    return (
        request.model_fields_set <= LIGHT_FIELDS
        and request.k <= MAX_LIGHT_K
        and request.exclude_seen != "all"
        and len(request.exclude) + len(request.pin) + len(request.cursor or ()) <= MAX_LIGHT_IDS
    )
