"""Keeps merges and erasures apart from accepted data losses.

A merge or an erasure is written to the logs of two users, perhaps on two servers. Where one of them goes back to before
it, for good, the logs contradict each other, and nobody can say which of the events in them had to stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class CorrectionGate:
    """A gate that is open except during a loss.

    epoch  another one before, within and after every loss, and wherever a replica takes over
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.is_open = True
        self._running = 0

    @contextmanager
    def correction(self) -> Iterator[None]:
        """Count a merge or an erasure as in progress; start one only while the gate is open."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Block merges and erasures within the block; one block at a time."""
        self.is_open = False
        self.epoch += 1
        try:
            while self._running:
                await asyncio.sleep(0.01)
            yield
        finally:
            self.epoch += 1
            self.is_open = True
