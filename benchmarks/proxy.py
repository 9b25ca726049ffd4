"""A TCP proxy that cuts connections: in the middle of a request, after it, or before its reply."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Literal

Cut = Literal["within the request", "after the request", "before the reply"]
CUTS: tuple[Cut, ...] = ("within the request", "after the request", "before the reply")
CUT_SHARE = 0.5  # of the requests that could be cut when a cut is due, so that every proxy gets its part

Address = tuple[str, int]


class Proxy:
    """Listens at an address and passes on to another one.

    is_due  whether somebody wants a connection to be cut now
    note    is told what was cut
    """

    def __init__(self, name: str, target: Address, is_due: Callable[[], bool], note: Callable[[str], None]) -> None:
        self.name = name
        self.target = target
        self._is_due = is_due
        self._note = note
        self._random = random.Random(name)
        self._server: asyncio.Server | None = None
        self._near: set[_Near] = set()

    async def listen(self, address: Address) -> Address:
        """Returns where it listens: port 0 takes a free one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Near(self), *address)
        host, port = self._server.sockets[0].getsockname()
        return host, port

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for near in list(self._near):
            near.abort()

    def next_cut(self) -> Cut | None:
        """What is to happen to the request that has just arrived."""
        if self._is_due() and self._random.random() < CUT_SHARE:
            return self._random.choice(CUTS)
        return None

    def cut(self, near: _Near, kind: Cut) -> None:
        near.abort()
        self._note(f"{self.name}: cut {kind}")


class _Near(asyncio.Protocol):
    """The side of a connection on which requests arrive."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._far: _Far | None = None
        self._early = b""  # what arrived before the other side was connected
        self._cut_before_reply = False
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._proxy._near.add(self)
        self._connecting = asyncio.create_task(self._connect())

    def connection_lost(self, exc: Exception | None) -> None:
        self._proxy._near.discard(self)
        if self._far is not None:
            self._far.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._far is None:
            self._early += data
        else:
            self._pass_on(data)

    def reply(self, data: bytes) -> None:
        if self._cut_before_reply:
            self._proxy.cut(self, "before the reply")
        elif not self.transport.is_closing():
            self.transport.write(data)

    def abort(self) -> None:
        """Reset the connection on this side; the other side still gets what was sent to it."""
        self.transport.abort()

    async def _connect(self) -> None:
        try:
            _, self._far = await asyncio.get_running_loop().create_connection(lambda: _Far(self), *self._proxy.target)
        except OSError:
            self.abort()
            return
        if self.transport.is_closing():
            self._far.transport.abort()
        elif self._early:
            self._pass_on(self._early)

    def _pass_on(self, data: bytes) -> None:
        assert self._far is not None
        cut = None if self._cut_before_reply else self._proxy.next_cut()
        self._far.transport.write(data[: len(data) // 2] if cut == "within the request" else data)
        if cut == "before the reply":
            self._cut_before_reply = True
        elif cut is not None:
            self._proxy.cut(self, cut)


class _Far(asyncio.Protocol):
    """The side of the service."""

    def __init__(self, near: _Near) -> None:
        self._near = near

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._near.reply(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self._near.transport.close()
        else:
            self._near.abort()
