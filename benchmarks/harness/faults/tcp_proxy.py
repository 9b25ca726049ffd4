"""A TCP proxy that cuts connections: within a request, after it, or before its reply."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Literal

Cut = Literal["within the request", "after the request", "before the reply"]
CUTS: tuple[Cut, ...] = ("within the request", "after the request", "before the reply")
CUT_SHARE = 0.5  # of the requests that arrive while a cut is due, so that every proxy gets its share

Address = tuple[str, int]


class TcpProxy:
    """Listens at an address and forwards to another one.

    is_due  returns whether to cut a connection now
    note    receives a description of each cut
    """

    def __init__(self, name: str, target: Address, is_due: Callable[[], bool], note: Callable[[str], None]) -> None:
        self.name = name
        self.target = target
        self._is_due = is_due
        self._note = note
        self._random = random.Random(name)
        self._server: asyncio.Server | None = None
        self._open: set[_ClientSide] = set()

    async def listen(self, address: Address) -> Address:
        """Start to listen, on a free port if the port is 0, and return the address."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _ClientSide(self), *address)
        host, port = self._server.sockets[0].getsockname()
        return host, port

    def close(self) -> None:
        """Stop listening and reset every connection."""
        if self._server is not None:
            self._server.close()
        for side in list(self._open):
            side.abort()

    def add(self, side: _ClientSide) -> None:
        """Register a connection that a client has opened, to reset it at the end."""
        self._open.add(side)

    def remove(self, side: _ClientSide) -> None:
        """Forget a closed connection."""
        self._open.discard(side)

    def next_cut(self) -> Cut | None:
        """Decide whether and how to cut the connection of the request that has just arrived."""
        if self._is_due() and self._random.random() < CUT_SHARE:
            return self._random.choice(CUTS)
        return None

    def cut(self, side: _ClientSide, kind: Cut) -> None:
        """Cut the connection, and note it."""
        side.abort()
        self._note(f"{self.name}: cut {kind}")


class _ClientSide(asyncio.Protocol):
    """The side of a connection on which requests arrive."""

    def __init__(self, proxy: TcpProxy) -> None:
        self._proxy = proxy
        self._server_side: _ServerSide | None = None
        self._early = b""  # data that arrives before the other side is connected
        self._cut_before_reply = False
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._proxy.add(self)
        self._connecting = asyncio.create_task(self._connect())

    def connection_lost(self, exc: Exception | None) -> None:
        self._proxy.remove(self)
        if self._server_side is not None:
            self._server_side.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._server_side is None:
            self._early += data
        else:
            self._pass_on(data)

    def reply(self, data: bytes) -> None:
        if self._cut_before_reply:
            self._proxy.cut(self, "before the reply")
        elif not self.transport.is_closing():
            self.transport.write(data)

    def abort(self) -> None:
        """Reset the connection on this side; the other side still receives the data that was sent to it."""
        self.transport.abort()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, self._server_side = await loop.create_connection(lambda: _ServerSide(self), *self._proxy.target)
        except OSError:
            self.abort()
            return
        if self.transport.is_closing():
            self._server_side.transport.abort()
        elif self._early:
            self._pass_on(self._early)

    def _pass_on(self, data: bytes) -> None:
        assert self._server_side is not None
        cut = None if self._cut_before_reply else self._proxy.next_cut()
        self._server_side.transport.write(data[: len(data) // 2] if cut == "within the request" else data)
        if cut == "before the reply":
            self._cut_before_reply = True
        elif cut is not None:
            self._proxy.cut(self, cut)


class _ServerSide(asyncio.Protocol):
    """The side of a connection towards the target."""

    def __init__(self, client_side: _ClientSide) -> None:
        self._client_side = client_side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._client_side.reply(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self._client_side.transport.close()
        else:
            self._client_side.abort()
