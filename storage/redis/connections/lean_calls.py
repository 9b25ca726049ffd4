"""Calls of Redis without most of what redis-py does beside sending a command and reading its reply.

Its own call takes a task to write the command, and locks, timers and counters to take a connection from the pool and to
give it back. All of that takes several times the processor time of the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.connection import HiredisRespSerializer
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from typing_extensions import override

PLAIN = frozenset({"MGET", "EVALSHA"})  # commands whose replies redis-py passes on as they are, and nearly all calls
MAX_LEASED = 2  # of a node's connections: one for the round that reads, one for the round that writes
LARGE_BYTES = 1 << 15  # that the system has not taken yet; of fewer nothing has to be waited for


class LeanConnection(AbstractConnection):
    """Packs commands in C, as redis-py's blocking connections do, and writes them without a task."""

    __slots__ = ()

    pack_command = staticmethod(HiredisRespSerializer().pack)  # type: ignore[assignment]

    @override
    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        writer = self._writer
        if writer is None or isinstance(command, bytes | str):
            await super().send_packed_command(command, check_health)
            return
        try:
            writer.writelines(command)
            if writer.transport.get_write_buffer_size() > LARGE_BYTES:
                async with asyncio.timeout(self.socket_timeout):
                    await writer.drain()
        except TimeoutError:
            await self.disconnect(nowait=True)
            raise RedisTimeoutError("Timeout writing to socket") from None
        except OSError as exc:
            await self.disconnect(nowait=True)
            raise RedisConnectionError(f"Error while writing to socket: {exc}") from exc
        except BaseException:  # nobody knows how much of it is sent
            await self.disconnect(nowait=True)
            raise


class LeasedConnections:
    """Keeps a few connections of a pool for calls of plain commands, each of which has one to itself.

    Where something has wrapped the client's own method, as what traces commands does, all calls go through it.
    """

    def __init__(self, pool: BlockingConnectionPool) -> None:
        self._pool = pool
        self._idle: list[AbstractConnection] = []
        self._leased = 0
        self._is_wrapped = not isinstance(Redis.execute_command, FunctionType)

    def takes(self, command: str | bytes | int) -> bool:
        """Return whether there is a connection for a call of the command now."""
        return command in PLAIN and (bool(self._idle) or self._leased < MAX_LEASED) and not self._is_wrapped

    async def call(self, *args: str | bytes | int) -> Any:
        """Execute a command, and return its reply.

        raises  RedisError, OSError, RuntimeError  as the client does
        """
        connection = await self._take()
        try:
            await connection.send_command(*args)
            reply = await connection.read_response()
        except ResponseError:
            self._idle.append(connection)
            raise
        except BaseException:  # the connection is closed now
            await self._give_back(connection)
            raise
        self._idle.append(connection)
        return reply

    async def _take(self) -> AbstractConnection:
        while self._idle:
            connection = self._idle.pop()
            if await _is_usable(connection):
                return connection
            await self._give_back(connection)
        self._leased += 1
        try:
            new: AbstractConnection = await self._pool.get_connection()
        except BaseException:
            self._leased -= 1
            raise
        return new

    async def _give_back(self, connection: AbstractConnection) -> None:
        self._leased -= 1
        await self._pool.release(connection)


async def _is_usable(connection: AbstractConnection) -> bool:
    """Return whether the connection is there, and nothing has come that nobody asked for, as the end of it."""
    try:
        return bool(connection.is_connected) and not await connection.can_read()
    except (RedisError, OSError):
        return False
