"""Redis calls without most of the overhead that redis-py adds to sending a command and reading its reply.

A call of redis-py starts a task to write the command, and uses locks, timers and counters to borrow a connection from
the pool and to return it. This takes several times the processor time of the call itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import hiredis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.connection import HiredisRespSerializer
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from typing_extensions import override

SERIALIZER = HiredisRespSerializer()
PLAIN = frozenset({"MGET", "EVALSHA"})  # nearly all calls; redis-py returns their replies unchanged
MAX_LEASED = 3  # connections of a node: for the round that reads, the one that writes, and a read without a round
LARGE_BYTES = 1 << 15  # unsent bytes in the buffer; for fewer, there is no need to wait


class LeanConnection(AbstractConnection):
    """Packs commands in C, as redis-py's blocking connections do, and writes them without a task."""

    __slots__ = ()

    @override
    def pack_command(self, *args: Any) -> list[bytes]:
        # the serializer copies all arguments, some of which it would have to change in other commands
        return [hiredis.pack_command(args)] if args[0] in PLAIN else SERIALIZER.pack(*args)

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
        except BaseException:  # unknown how much of it was sent
            await self.disconnect(nowait=True)
            raise


class LeasedConnections:
    """Keeps a few connections of a pool for calls of plain commands, each of which has exclusive use of one.

    If the client's own method is wrapped, for example to trace commands, all calls go through it.
    """

    def __init__(self, pool: BlockingConnectionPool) -> None:
        self._pool = pool
        self._idle: list[AbstractConnection] = []
        self._leased = 0
        self._is_wrapped = not isinstance(Redis.execute_command, FunctionType)

    def takes(self, command: str | bytes | int) -> bool:
        """Return whether a connection for a call of the command is available now."""
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
    """Return whether the connection is open and to be kept, and has no unexpected data to read, such as its end."""
    if not connection.is_connected or connection.should_reconnect():
        return False
    try:
        return not await connection.can_read()
    except (RedisError, OSError):
        return False
