"""Connects to a host with several addresses, of which some may not answer: Happy Eyeballs (RFC 8305) without sorting.

uvloop would wait for the first address until the timeout, and try no other.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextvars import Context
from typing import Any, TypeAlias

NEXT_ADDRESS_AFTER_S = 0.25  # RFC 8305, 5
KEPT_S = 0.5  # how long addresses are known: those that gave up may try again after PROBE_EVERY_S

Address: TypeAlias = tuple[int, int, int, str, tuple[Any, ...]]  # a result of getaddrinfo


class Lookup:
    """Looks up the addresses of one host.

    A lookup goes on when those that wait for it give up, and serves the next ones: the resolver may need longer than
    a connection may take, for example if the first of its name servers is down.
    """

    def __init__(self) -> None:
        self._running: asyncio.Task[Sequence[Address]] | None = None

    async def addresses(self, host: str, port: int) -> Sequence[Address]:
        """Return the addresses in the resolver's order; raise OSError if there is none."""
        if self._running is None:
            self._running = asyncio.create_task(_resolve(host, port), context=Context())
            self._running.add_done_callback(self._keep)
        return await asyncio.shield(self._running)

    def _keep(self, lookup: asyncio.Task[Sequence[Address]]) -> None:
        if lookup.cancelled() or lookup.exception() is not None:
            self._running = None
        else:
            asyncio.get_running_loop().call_later(KEPT_S, self._forget)

    def _forget(self) -> None:
        self._running = None


async def _resolve(host: str, port: int) -> Sequence[Address]:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


async def connected_socket(addresses: Sequence[Address]) -> socket.socket:
    """Return a socket that is connected to the address that answers first.

    Each address is tried when the one before has failed or is silent for NEXT_ADDRESS_AFTER_S.

    raises  OSError  if all of them fail
    """
    attempts: list[asyncio.Task[socket.socket]] = []
    try:
        while True:
            if len(attempts) < len(addresses):
                attempts.append(asyncio.create_task(_connect(addresses[len(attempts)])))
            pending = [attempt for attempt in attempts if not attempt.done()]
            if pending:
                timeout_s = NEXT_ADDRESS_AFTER_S if len(attempts) < len(addresses) else None
                await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for attempt in attempts:
                if attempt.done() and attempt.exception() is None:
                    attempts.remove(attempt)
                    return attempt.result()
            if len(attempts) == len(addresses) and all(attempt.done() for attempt in attempts):
                return attempts[0].result()  # raises its failure
    finally:
        for attempt in attempts:
            attempt.cancel()
            attempt.add_done_callback(_close)


async def _connect(address: Address) -> socket.socket:
    family, kind, protocol, _, place = address
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, place)
    except BaseException:
        connection.close()
        raise
    return connection


def _close(attempt: asyncio.Task[socket.socket]) -> None:
    """Close what a slower attempt has connected meanwhile."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().close()
