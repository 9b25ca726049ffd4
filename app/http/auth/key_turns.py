"""Fair shares of the event loop: while several keys ask for recommendations, a few requests of each begin at a time.

The event loop gives every request in progress the same share of its time, so a key with 32 requests in progress would
get 32 times as much as a key with one, and make it wait as long.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from math import inf
from weakref import WeakValueDictionary

from starlette.requests import ClientDisconnect

from app.recommendation.batching import Requester

AT_ONCE = 16  # requests of a key; with fewer, its batches would be too small
SLOW_S = 0.05  # a request that takes longer waits for the store or a thread, and the loop has time for another one
RECENT_S = 1.0


class KeyTurns:
    """While other keys send requests, lets 16 of a key begin, and others when these have ended or taken 50 ms."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # of keys with requests
        self._last_key = ""
        self._changed_s = -inf

    def is_needed(self, key_id: str) -> bool:
        """Note a request of the key; return whether other keys have sent requests within the last second."""
        if not key_id:
            return False
        now_s = time.monotonic()
        if key_id != self._last_key:
            if self._last_key:
                self._changed_s = now_s
            self._last_key = key_id
        return now_s - self._changed_s < RECENT_S

    def turn(self, requester: Requester) -> AbstractAsyncContextManager[None]:
        """Return a block that waits until it is the turn of the requester's key; raises ClientDisconnect."""
        return self._turn(requester) if self.is_needed(requester.flow) else nullcontext()

    @asynccontextmanager
    async def _turn(self, requester: Requester) -> AsyncIterator[None]:
        turns, is_slow = self._turns.get(requester.flow), False
        if turns is None:
            turns = self._turns[requester.flow] = asyncio.Semaphore(AT_ONCE)

        def let_another_begin() -> None:
            nonlocal is_slow
            is_slow = True
            turns.release()

        await turns.acquire()
        timer = asyncio.get_running_loop().call_later(SLOW_S, let_another_begin)
        try:
            if requester.is_disconnected():
                raise ClientDisconnect
            yield
        finally:
            timer.cancel()
            if not is_slow:
                turns.release()
