"""A time limit of a connection."""

import asyncio
from asyncio import TimerHandle
from collections.abc import Callable


class Deadline:
    """Calls a function after some time, unless it is cleared earlier.

    timer  None unless it is set
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self.timer: TimerHandle | None = None
        self._loop = loop
        self._call = call

    def set(self, within_s: float) -> None:
        """Set the deadline, instead of an earlier one."""
        self.clear()
        self.timer = self._loop.call_later(within_s, self._call)

    def clear(self) -> None:
        """Cancel the deadline."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
