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
from aiohappyeyeballs import start_connection
from redis._parsers import BaseParser
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection, Connection
from redis.connection import HiredisRespSerializer
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from typing_extensions import override

from storage.redis.connections.host_lookup import HostLookup

SERIALIZER = HiredisRespSerializer()
NEXT_ADDRESS_AFTER_S = 0.25  # how long a silent address holds up the next one (RFC 8305, 5)
CLOSED = "Connection closed by server."
PLAIN = frozenset({"MGET", "EVALSHA"})  # nearly all calls; redis-py returns their replies unchanged
MAX_LEASED = 5  # connections of a node: for the round that reads, those that write, and a read without a round
LARGE_BYTES = 1 << 15  # unsent bytes in the buffer; for fewer, there is no need to wait


class LeanConnection(AbstractConnection):
    """Packs commands in C, as redis-py's blocking connections do, and writes them without a task.

    Of a host with several addresses, it takes the one that answers first; uvloop would wait for the first address
    until the timeout, and try no other.

    lookup  of the host, shared by its connections
    """

    __slots__ = ()
    lookup: HostLookup

    @override
    async def _connect(self) -> None:
        self._socket = None
        async with asyncio.timeout(self.socket_connect_timeout):
            if isinstance(self, Connection) and not _is_address(self.host):
                addresses = await self.lookup.addresses(self.host, self.port)
                self._socket = await start_connection(addresses, happy_eyeballs_delay=NEXT_ADDRESS_AFTER_S)
            await super()._connect()  # type: ignore[no-untyped-call, safe-super]  # of the pool's own class

    def _connection_arguments(self) -> dict[str, Any]:
        """Return the arguments of asyncio.open_connection."""
        arguments: dict[str, Any] = super()._connection_arguments()  # type: ignore[misc]
        if self._socket is None:
            return arguments
        host, _ = arguments.pop("host"), arguments.pop("port")
        return arguments | {"sock": self._socket} | ({"server_hostname": host} if "ssl" in arguments else {})

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

    def take_replies(self) -> Replies:
        """Receive the replies on this open connection from now on, in place of its stream."""
        assert self._writer is not None
        transport = self._writer.transport
        replies = Replies(transport.get_protocol())
        transport.set_protocol(replies)
        return replies


class Replies(asyncio.Protocol):
    """Receives replies without a stream, which takes several turns of the event loop's code for each.

    stream  the protocol of the connection's stream, which controls the flow of writes and learns of the end
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._reader = hiredis.Reader(protocolError=InvalidResponse, replyError=BaseParser.parse_error)
        self._waiter: asyncio.Future[Any] | None = None
        self._is_spoiled = False  # it has ended, or got what nobody had asked for

    @property
    def is_clean(self) -> bool:
        """Whether the next reply is that of the next command."""
        return not (self._is_spoiled or self._reader.has_data())

    def expect(self) -> asyncio.Future[Any]:
        """Return a future of the reply to the command that is sent next; an error reply is a result, too."""
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        return waiter

    @override
    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            reply = self._reader.gets()
        except RedisError as exc:
            self._fail(exc)
            return
        if reply is False:  # it is not complete
            return
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            self._is_spoiled = True
        else:
            waiter.set_result(reply)

    @override
    def eof_received(self) -> None:
        self._fail(RedisConnectionError(CLOSED))
        self._stream.eof_received()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(RedisConnectionError(CLOSED if exc is None else f"Error while reading from socket: {exc}"))
        self._stream.connection_lost(exc)

    @override
    def pause_writing(self) -> None:
        self._stream.pause_writing()

    @override
    def resume_writing(self) -> None:
        self._stream.resume_writing()

    def _fail(self, failure: Exception) -> None:
        self._is_spoiled = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(failure)


class SafePool(BlockingConnectionPool):
    """A pool that also gets back the connection of a caller that is cancelled while it waits to return it."""

    @override
    async def release(self, connection: AbstractConnection) -> None:
        try:
            await super().release(connection)
        except asyncio.CancelledError:
            if connection in self._in_use_connections:
                await asyncio.shield(super().release(connection))
            raise


class _Lease(NamedTuple):
    """A connection for exclusive use, and its replies."""

    connection: LeanConnection
    replies: Replies


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
        waiter, timeout_s = replies.expect(), connection.socket_timeout or inf
        timer = asyncio.get_running_loop().call_later(timeout_s, _expire, waiter)
        try:
            await connection.send_packed_command(connection.pack_command(*args))
            reply = await waiter
            if isinstance(reply, RedisConnectionError):  # such as that of a server that is loading its data
                raise reply
        except BaseException:  # the rest of the reply would be taken for the next one
            waiter.cancel()
            await self._give_back(connection)
            raise
        finally:
            timer.cancel()
        self._idle.append(lease)
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    async def _take(self) -> _Lease:
        while self._idle:
            lease = self._idle.pop()
            if lease.replies.is_clean and not lease.connection.should_reconnect():  # type: ignore[no-untyped-call]
                return lease
            await self._give_back(lease.connection)
        self._leased += 1
        try:
            new: LeanConnection = await self._pool.get_connection()
        except BaseException:
            self._leased -= 1
            raise
        return _Lease(new, new.take_replies())

    async def _give_back(self, connection: LeanConnection) -> None:
        self._leased -= 1
        await connection.disconnect(nowait=True)
        await self._pool.release(connection)


def _is_address(host: str) -> bool:
    """Return whether the host is an address, which may have a zone as in fe80::1%eth0, and not a name."""
    return ":" in host or host.replace(".", "").isdecimal()


def _expire(waiter: asyncio.Future[Any]) -> None:
    if not waiter.done():
        waiter.set_exception(RedisTimeoutError("Timeout reading from socket"))
