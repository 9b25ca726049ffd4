"""Requests that are answered without an ASGI task, and whose response is sent as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Self

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from app.http.middleware.plain_requests import PlainRequest, PlainRequests

NOBODY_WAITS = asyncio.Event()  # the message event of requests that receive no messages
BODY_WITHIN_S = 0.05  # most clients send it with the head or right after it


def begin_plain(connection: HttpToolsProtocol, plain_requests: PlainRequests) -> PlainCycle | None:
    """Start to answer the request whose head is complete, or wait for its body; return None if the app must answer."""
    parser, method = connection.parser, connection.parser.get_method()
    is_first = connection.cycle is None or connection.cycle.response_complete
    is_usual = parser.get_http_version() == "1.1" and parser.should_keep_alive() and not parser.should_upgrade()
    if not (is_first and is_usual) or connection.flow.write_paused or connection.access_log:
        return None
    if method == b"GET":
        return PlainCycle(connection).begin(plain_requests)
    if method == b"POST" and plain_requests.takes_body(connection.url, connection.scope):  # type: ignore[arg-type]
        return PlainCycleWithBody(connection, plain_requests)
    return None


class PlainCycle(RequestResponseCycle):
    """A request that has no body."""

    def __init__(self, connection: HttpToolsProtocol) -> None:
        super().__init__(
            scope=connection.scope,
            transport=connection.transport,
            flow=connection.flow,
            logger=connection.logger,
            access_logger=connection.access_logger,
            access_log=False,
            default_headers=connection.server_state.default_headers,
            message_event=NOBODY_WAITS,
            expect_100_continue=False,
            keep_alive=True,
            on_response=connection.on_response_complete,
        )
        self._url, self._tasks = connection.url, connection.tasks
        self._request: PlainRequest | None = None

    def begin(self, plain_requests: PlainRequests) -> Self | None:
        """Start to answer; return None if the app must."""
        request = plain_requests.begin(self._url, self.scope, self)  # type: ignore[arg-type]
        return None if request is None else self._await(request)

    def _await(self, request: PlainRequest) -> Self:
        self._request = request
        # on shutdown, the server cancels the tasks that take too long
        self._tasks.add(request)  # type: ignore[arg-type]
        return self

    def respond(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Send the response in one write, unless the client has disconnected."""
        self._end()
        if self.disconnected:
            return
        lines = [STATUS_LINE[status]]
        for name, value in (*self.default_headers, *headers):
            lines += (name, b": ", value, b"\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines += (b"\r\n", body)
        self.response_started = self.response_complete = True
        self.transport.write(b"".join(lines))
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    def abort(self) -> None:
        """Close the connection without a response."""
        self._end()
        self.transport.abort()

    def _end(self) -> None:
        if self._request is not None:
            self._tasks.discard(self._request)
            self._request = None  # it refers to this object


class PlainCycleWithBody(PlainCycle):
    """A request that begins when its body is complete. It goes to the app if the rest of the body is late."""

    def __init__(self, connection: HttpToolsProtocol, plain_requests: PlainRequests) -> None:
        super().__init__(connection)
        self._plain_requests = plain_requests
        self._connection: HttpToolsProtocol | None = connection
        self._timer = connection.loop.call_later(BODY_WITHIN_S, self._leave_to_app)
        self.message_event = SimpleNamespace(set=self._receive)  # type: ignore[assignment]

    def _receive(self) -> None:
        """Handle more of the body, or a disconnect."""
        if self.disconnected:
            self._stop_waiting()
        elif not self.more_body:
            request = self._plain_requests.begin_with_body(self._url, self.scope, bytes(self.body), self)  # type: ignore[arg-type]
            if request is None:
                self._leave_to_app()
            else:
                self._stop_waiting()
                self._await(request)
                self.body = bytearray()  # an idle connection keeps this object

    def _leave_to_app(self) -> None:
        connection = self._stop_waiting()
        if connection is not None:
            connection.cycle = None  # type: ignore[assignment]  # as before this request
            HttpToolsProtocol.on_headers_complete(connection)
            cycle = connection.cycle
            cycle.body, cycle.more_body = self.body, self.more_body
            cycle.keep_alive = cycle.keep_alive and self.keep_alive  # False once the server shuts down
            cycle.message_event.set()

    def _stop_waiting(self) -> HttpToolsProtocol | None:
        """Drop everything that refers to this object, and return the connection."""
        self._timer.cancel()
        self.message_event = NOBODY_WAITS
        connection, self._connection = self._connection, None
        return connection
