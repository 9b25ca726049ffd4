"""Looks up the addresses of a host."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextvars import Context

from aiohappyeyeballs import AddrInfoType

KEPT_S = 0.5  # how long addresses are known: those that gave up may try again after PROBE_EVERY_S


class HostLookup:
    """Looks up the addresses of one host.

    A lookup goes on when those that wait for it give up, and serves the next ones: the resolver may need longer than
    a connection may take, for example if the first of its name servers is down.
    """

    def __init__(self) -> None:
        self._running: asyncio.Task[Sequence[AddrInfoType]] | None = None

    async def addresses(self, host: str, port: int) -> Sequence[AddrInfoType]:
        """Return the addresses in the resolver's order; raise OSError if there is none."""
        if self._running is None:
            self._running = asyncio.create_task(_resolve(host, port), context=Context())
            self._running.add_done_callback(self._keep)
        return await asyncio.shield(self._running)

    def _keep(self, lookup: asyncio.Task[Sequence[AddrInfoType]]) -> None:
        if lookup.cancelled() or lookup.exception() is not None:
            self._running = None
        else:
            asyncio.get_running_loop().call_later(KEPT_S, self._forget)

    def _forget(self) -> None:
        self._running = None


async def _resolve(host: str, port: int) -> Sequence[AddrInfoType]:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
