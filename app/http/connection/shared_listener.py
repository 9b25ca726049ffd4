"""An event loop that takes new connections of a shared socket one by one, so that worker processes get equal shares.

Uvloop accepts as many connections at once as wait: when a client opens several, the process that wakes first takes all
of them, and answers all of their requests for as long as they live.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import uvloop
from typing_extensions import override

YIELD_S = 1e-9  # the system makes it some 50 µs
RETRY_S = 1.0  # after the process has run out of files or memory

logger = logging.getLogger(__name__)


class SharingLoop(uvloop.Loop):
    """The event loop of a worker process."""

    @override
    async def create_server(self, protocol_factory: Any, *args: Any, sock: Any = None, **options: Any) -> Any:
        """Serve on a socket that other processes listen on, too; without `sock`, as any loop."""
        if sock is None:
            return await super().create_server(protocol_factory, *args, **options)
        sock.setblocking(False)
        sock.listen(options["backlog"])
        return SharedListener(self, protocol_factory, sock)


class SharedListener:
    """Accepts one connection in each turn of the event loop, and then lets other processes run."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, new_protocol: Callable[[], asyncio.BaseProtocol], listener: socket.socket
    ) -> None:
        self._loop, self._new_protocol, self._listener = loop, new_protocol, listener
        self._opening: set[asyncio.Task[Any]] = set()  # the event loop keeps only weak references to tasks
        self._is_closed = False
        self._resume()

    def close(self) -> None:
        """Accept no more connections."""
        self._is_closed = True
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Wait for connections that are being opened."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process was faster, or the client has gone
        except OSError as exc:
            logger.error("cannot accept a connection, trying again in %g s: %s", RETRY_S, exc.strerror)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(RETRY_S, self._resume)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        time.sleep(YIELD_S)  # or else this process takes all of a client's connections before another one wakes up
        task = self._loop.create_task(self._loop.connect_accepted_socket(self._new_protocol, connection))
        self._opening.add(task)
        task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[Any]) -> None:
        self._opening.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            logger.error("cannot open a connection", exc_info=failure)


def new_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of a worker process (uvicorn)."""
    return SharingLoop()
