"""Fair shares of the event loop: while several keys send requests, a few of each are in progress at a time.

The event loop gives every request in progress the same share of its time, so a key with 32 requests in progress would
get 32 times as much as a key with one, and make it wait as long.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import NamedTuple

AT_ONCE = 16  # requests of a key; with fewer, batches of one key alone would be too small
SLOW_S = 0.05  # a request that takes longer waits for the store or a thread, and the loop has time for another one
RECENT_S = 1.0


class Source(NamedTuple):
    """The source of a request: a valid key of a tenant."""

    tenant: str
    key_id: str


class KeyTurns:
    """Lets a bounded number of each key's requests begin, while other keys send requests, too. The others queue."""

    def __init__(self) -> None:
        self._turns: defaultdict[Source, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))
        self._last: Source | None = None
        self._changed_s = -inf

    def is_needed(self, source: Source | None) -> bool:
        """Note a request of the source; return whether other sources have sent requests within the last second."""
        if source is None:
            return False
        now_s = time.monotonic()
        if source != self._last:
            if self._last is not None:
                self._changed_s = now_s
            self._last = source
        return now_s - self._changed_s < RECENT_S

    @asynccontextmanager
    async def turn(self, source: Source) -> AsyncIterator[None]:
        """Wait for the key's turn. It ends with the block, or before that when the block takes long."""
        turns, is_slow = self._turns[source], False

        def end_early() -> None:
            nonlocal is_slow
            is_slow = True
            turns.release()

        await turns.acquire()
        timer = asyncio.get_running_loop().call_later(SLOW_S, end_early)
        try:
            yield
        finally:
            timer.cancel()
            if not is_slow:
                turns.release()
