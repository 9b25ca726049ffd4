"""Redis calls without most of the overhead that redis-py adds to sending a command and reading its reply.

A call of redis-py starts a task to write the command, and uses locks, timers and counters to borrow a connection from
the pool and to return it. This takes several times the processor time of the call itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from math import inf
from types import FunctionType
from typing import Any, NamedTuple

import hiredis
from redis._parsers import BaseParser
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.connection import HiredisRespSerializer
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from typing_extensions import override

SERIALIZER = HiredisRespSerializer()
CLOSED = "Connection closed by server."
PLAIN = frozenset({"MGET", "EVALSHA"})  # nearly all calls; redis-py returns their replies unchanged
MAX_LEASED = 3  # connections of a node: for the round that reads, the one that writes, and a read without a round
READ_BYTES = 1 << 16
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

    async def receive(self, replies: hiredis.Reader) -> Any:
        """Read one reply as `read_response` does, through the parser `replies`, with a timer instead of its contexts.

        raises  RedisError  if the reply is an error, or if there is none: the connection is closed then
        """
        reader, writer, is_late = self._reader, self._writer, False
        if reader is None or writer is None:
            raise RedisConnectionError(CLOSED)

        def give_up() -> None:
            nonlocal is_late
            is_late = True
            writer.transport.abort()

        timer = asyncio.get_running_loop().call_later(self.socket_timeout or inf, give_up)
        try:
            while (reply := replies.gets()) is False:
                received = await reader.read(READ_BYTES)
                if not received:
                    raise RedisTimeoutError("Timeout reading from socket") if is_late else RedisConnectionError(CLOSED)
                replies.feed(received)
            if isinstance(reply, RedisConnectionError):  # such as that of a server that is loading its data
                raise reply
        except OSError as exc:
            await self.disconnect(nowait=True)
            raise RedisConnectionError(f"Error while reading from socket: {exc}") from exc
        except BaseException:  # the rest of the reply would be taken for the next one
            await self.disconnect(nowait=True)
            raise
        finally:
            timer.cancel()
        if isinstance(reply, ResponseError):
            raise reply
        return reply


class _Lease(NamedTuple):
    """A connection for exclusive use, and the parser of its replies."""

    connection: LeanConnection
    replies: hiredis.Reader


class LeasedConnections:
    """Keeps a few connections of a pool for calls of plain commands, each of which has exclusive use of one.

    If the client's own method is wrapped, for example to trace commands, all calls go through it.
    """

    def __init__(self, pool: BlockingConnectionPool) -> None:
        self._pool = pool
        self._idle: list[_Lease] = []
        self._leased = 0
        self._is_wrapped = not isinstance(Redis.execute_command, FunctionType)

    def takes(self, command: str | bytes | int) -> bool:
        """Return whether a connection for a call of the command is available now."""
        return command in PLAIN and (bool(self._idle) or self._leased < MAX_LEASED) and not self._is_wrapped

    async def call(self, *args: str | bytes | int) -> Any:
        """Execute a command, and return its reply.

        raises  RedisError, OSError, RuntimeError  as the client does
        """
        lease = await self._take()
        connection, replies = lease
        try:
            await connection.send_packed_command(connection.pack_command(*args))
            reply = await connection.receive(replies)
        except ResponseError:
            self._idle.append(lease)
            raise
        except BaseException:  # the connection is closed now
            await self._give_back(connection)
            raise
        self._idle.append(lease)
        return reply

    async def _take(self) -> _Lease:
        while self._idle:
            lease = self._idle.pop()
            if await _is_usable(lease.connection):
                return lease
            await self._give_back(lease.connection)
        self._leased += 1
        try:
            new: LeanConnection = await self._pool.get_connection()
        except BaseException:
            self._leased -= 1
            raise
        return _Lease(new, hiredis.Reader(protocolError=InvalidResponse, replyError=BaseParser.parse_error))

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
