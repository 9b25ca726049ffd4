"""Closes a connection that has been idle for a while."""

import asyncio
from asyncio import TimerHandle
from collections.abc import Callable
from math import inf


class KeepAlive:
    """The time for which a connection may wait for its next request. One timer serves many requests.

    close  closes the connection
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float, close: Callable[[], None]) -> None:
        self._loop = loop
        self._close = close
        self._timer: TimerHandle | None = None
        self._idle_since_s = inf
        self.timeout_s = timeout_s

    def begin(self) -> None:
        """Record that the connection is idle from now on."""
        self._idle_since_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self.timeout_s, self.check)

    def end(self) -> None:
        """Record that data has arrived."""
        self._idle_since_s = inf

    def cancel(self) -> None:
        """Cancel the timer."""
        self.end()
        if self._timer is not None:
            self._timer.cancel()

    def check(self) -> None:
        """Close the connection if it has been idle for long enough, or else set the timer again."""
        self._timer = None
        left_s = self._idle_since_s + self.timeout_s - self._loop.time()
        if left_s <= 0:
            self._close()
        elif left_s < inf:  # otherwise a request has begun, and its response sets the timer again
            self._timer = self._loop.call_later(left_s, self.check)
