"""A time limit of a connection."""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from collections.abc import Callable


class Deadline:
    """Calls a function after some time, unless it is cleared before.

    is_set  whether it was set and not cleared; without a call, because each request asks for it
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self.is_set = False
        self._loop = loop
        self._call = call
        self._timer: TimerHandle | None = None

    def set(self, within_s: float) -> None:
        """Set the deadline, instead of an earlier one."""
        self.clear()
        self._timer, self.is_set = self._loop.call_later(within_s, self._call), True

    def clear(self) -> None:
        """Never call the function."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.is_set = None, False
