"""A shorter thread switch interval while a long computation runs next to the event loop."""

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar, TypeVarTuple

ArgumentsT = TypeVarTuple("ArgumentsT")
ResultT = TypeVar("ResultT")

SWITCH_INTERVAL_S = 0.0002  # only when needed, because it costs requests 7% more processor time


class _ShortTurns:
    """The number of long computations running in this process, and the interval before the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._usual_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._running:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_s, SWITCH_INTERVAL_S))
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._running -= 1
            if not self._running:
                sys.setswitchinterval(self._usual_s)


_OF_PROCESS = _ShortTurns()


def short_turns() -> AbstractContextManager[None]:
    """Limit the delay that a computing thread adds to each step of the event loop to `SWITCH_INTERVAL_S`."""
    return _OF_PROCESS


async def in_thread(function: Callable[[*ArgumentsT], ResultT], *args: *ArgumentsT) -> ResultT:
    """Run a long computation in a thread, with short turns, and return its result."""
    with short_turns():
        return await asyncio.to_thread(function, *args)
