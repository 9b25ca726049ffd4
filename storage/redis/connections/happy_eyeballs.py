"""Connects to a host with several addresses, of which some may not answer: Happy Eyeballs (RFC 8305) without sorting.

uvloop would wait for the first address until the timeout, and try no other.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any, TypeAlias

NEXT_ADDRESS_AFTER_S = 0.25  # RFC 8305, 5

Address: TypeAlias = tuple[int, int, int, str, tuple[Any, ...]]  # a result of getaddrinfo


async def connected_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is connected to the address of the host that answers first.

    The addresses are tried in the resolver's order, each when the one before has failed or is silent for
    NEXT_ADDRESS_AFTER_S.

    raises  OSError  if the name has no address, or all of them fail
    """
    loop = asyncio.get_running_loop()
    addresses: Sequence[Address] = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
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
