"""A transport whose client can still read the response after the service has closed the connection."""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from collections.abc import Callable
from typing import Any

from typing_extensions import override

MAX_BUFFERED_BYTES = 64 << 10  # that were received by TLS, as without TLS
PIECE_BYTES = 64 << 10
UNLIMITED = 1 << 62
MAX_DISCARDED_BYTES = 64 << 20  # of a rejected request that the client is still sending


class LingeringTransport(asyncio.Transport):
    """Continues to read after `close` while the client is still sending, and discards the data.

    Closing a socket with unread data resets the connection, and the client loses the part of the response that it has
    not read yet. So at first only the service's side is closed; the client closes the other side when it has read the
    response. (asyncio closes no side of TLS alone: there the response's `Connection: close` tells the client.) The
    connection is aborted after `patience_s` or MAX_DISCARDED_BYTES, because a client may never close it.

    transport   the transport of the connection
    is_sending  returns whether the client may still be sending a request
    patience_s  the time for the client to read the response and to notice that the connection is closed
    """

    def __init__(self, transport: asyncio.Transport, is_sending: Callable[[], bool], patience_s: float) -> None:
        super().__init__()
        self._connection = self._transport = transport
        self._is_sending = is_sending
        self._patience_s = patience_s
        self._is_closing = False
        self._discarded_bytes = 0
        self._end: TimerHandle | None = None

    def encrypt(self, transport: asyncio.Transport) -> None:
        """Use a transport that encrypts what is sent over the connection, from now on."""
        transport.set_write_buffer_limits(UNLIMITED)  # the connection's own limit holds
        transport.set_read_buffer_limits(MAX_BUFFERED_BYTES)  # type: ignore[attr-defined]
        self._transport = transport

    @override
    def close(self) -> None:
        """Close the connection as described above, after sending pending writes."""
        if self.is_closing():
            return
        self._is_closing = True
        self._end = asyncio.get_running_loop().call_later(self._patience_s, self._connection.abort)
        if self._is_sending():
            self._transport.resume_reading()
            if self._transport.can_write_eof():
                self._transport.write_eof()
        else:
            self._close()

    def close_both_sides(self) -> None:
        """Close the connection without waiting for the client."""
        self._is_closing = True
        self._close()

    def _close(self) -> None:
        if not self._transport.is_closing():
            self._transport.close()
        if self._transport is not self._connection and self._transport.get_write_buffer_size() == 0:
            self._connection.close()  # without waiting for the client's end of TLS

    def discard(self, data: bytes) -> None:
        """Discard data that arrived after `close`, and abort the connection after MAX_DISCARDED_BYTES."""
        self._discarded_bytes += len(data)
        if self._discarded_bytes > MAX_DISCARDED_BYTES:
            self._connection.abort()

    def closed(self) -> None:
        """Record that the connection is closed."""
        self._is_closing = True
        if self._end is not None:
            self._end.cancel()

    @override
    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    @override
    def abort(self) -> None:
        self._is_closing = True
        self._connection.abort()

    @override
    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._is_closing:
            return
        if self._transport is self._connection:
            self._transport.write(data)
            return
        for begin in range(0, len(data), PIECE_BYTES):  # TLS keeps as much memory as the largest write took
            self._transport.write(memoryview(data)[begin : begin + PIECE_BYTES])

    @override
    def pause_reading(self) -> None:
        if not self._is_closing:
            self._transport.pause_reading()

    @override
    def resume_reading(self) -> None:
        if not self._is_closing:
            self._transport.resume_reading()

    @override
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._connection.get_extra_info(name, default)
