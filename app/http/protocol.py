"""The HTTP protocol of one connection, with timeouts and limits that uvicorn lacks.

A worker process imports this module before it can answer its supervisor, which waits for 5 s. Importing torch takes
seconds, so nothing here may import it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from httptools import HttpParserError, HttpParserUpgrade
from typing_extensions import override
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.errors import HeadTooLarge, NotHttp, RequestError, TooManyPipelined
from app.http.connection.deadline import Deadline
from app.http.connection.keep_alive import KeepAlive
from app.http.connection.lingering_transport import LingeringTransport
from app.http.connection.request_head import check_head
from app.http.connection.response_transport import ResponseTransport
from app.http.connection.tls import TlsProtocol
from app.http.connection.upgrades import head_without_upgrade, is_upgrade, new_parser
from app.http.middleware.plain_cycle import begin_plain

if TYPE_CHECKING:
    from starlette.responses import Response

    from app.http.services import Services

BODY_GRACE_S = 5.0  # for the app to respond that the body is late
YIELD_S = 1e-9  # the system makes it some 50 µs, in which another process wakes up and takes the next connection
MAX_HEADERS = 100
MAX_PIPELINED = 16  # queued requests of one connection, behind the one in progress
TOO_MANY = f"at most {MAX_PIPELINED} requests of a connection may be pending; read the responses, or connect again"


def new_connection(**options: Any) -> asyncio.BaseProtocol:
    """Return the protocol of a new connection, for uvicorn; it has TLS if the service has a certificate."""
    http = LimitedHttpProtocol(**options)
    services: Services = options["app_state"]["services"]
    if services.settings.workers > 1:
        time.sleep(YIELD_S)
    if services.tls is None:
        return http
    return TlsProtocol(http, services.tls, services.settings.head_timeout_s, services.settings.answer_timeout_s)


class LimitedHttpProtocol(HttpToolsProtocol):
    """Closes the connection if a request arrives too slowly or is too large, or the client reads responses too slowly.

    The time limit of a head starts when the connection opens, or at the first byte after the previous request. That of
    a body starts when the head is complete. If the app reads the body, it responds itself when the body is late; this
    class closes the connection if the app does not read the body. The memory of a connection is bounded by limits on
    the bytes of a head, of a chunk-size line and of trailers, which are ignored, and on the number of queued requests.

    Above the limit of open connections, the one that has been idle for longest is closed; if none is idle, the one
    whose body has been late for longest, or else the new one. So clients that send no requests cannot lock others out.
    """

    transport: LingeringTransport

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._services: Services = self.app_state["services"]
        self._limits, self._idle_connections = self._services.settings, self._services.idle_connections
        self._idle, self._late = self._idle_connections.idle, self._idle_connections.late
        self.app_state = {**self.app_state, "is_disconnected": self.is_disconnected}
        self._cycle: RequestResponseCycle | None = None  # the request in progress; `cycle` is the newest
        self._deadline = Deadline(self.loop, self._close)  # for the client to send the request
        self._response_deadline = Deadline(self.loop, self._abort)  # for the client to take the response
        self.keep_alive = KeepAlive(self.loop, self.timeout_keep_alive, self._close)
        self._in_head = self._in_body = False
        self._has_advanced = False  # in this call, a head began or ended, a chunk began, or data of a body came
        self._standstill_bytes = 0  # received since the last advance: in a head, chunk-size line or trailers
        self._refusal: bytes | None = None  # the last response, to send after the pending ones

    def is_disconnected(self) -> bool:
        """Return whether the connection is closed or closing."""
        return self.transport.is_closing()

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(LingeringTransport(transport, self._is_awaiting_rest, self._limits.answer_timeout_s))
        if len(self.connections) > self._limits.max_open_connections:
            self._idle_connections.close_longest(self.transport)
        if not self.transport.is_closing():
            self._set_idle()
            self._deadline.set(self._limits.head_timeout_s)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._idle_connections.forget(self.transport)
        self._deadline.clear()
        self._response_deadline.clear()
        self.keep_alive.cancel()
        self._disconnect_cycle()
        self.transport.closed()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self.transport.is_closing():
            self.transport.discard(data)
            return
        self.keep_alive.end()
        self._has_advanced, over_http = False, b""
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            over_http = head_without_upgrade(self.parser, self.url, self.headers) + data[upgrade.args[0] :]
        except HttpParserError as exc:
            # raised by a callback that found a limit exceeded, or else by the parser itself
            exceeded = exc.__context__ if isinstance(exc.__context__, RequestError) else None
            self._refuse(exceeded or NotHttp("this is not an HTTP/1.1 request; nothing was done"))
            return
        if over_http:
            self.parser = new_parser(self)
            self.data_received(over_http)
            return
        if self._deadline.timer is None:  # set late, because almost every request arrives in one piece
            if self._in_body:
                self._deadline.set(self._limits.body_timeout_s + BODY_GRACE_S)
                self._set_late()
            elif self._in_head or not self._has_advanced:
                self._deadline.set(self._limits.head_timeout_s)
        self._standstill_bytes = 0 if self._has_advanced else self._standstill_bytes + len(data)
        if self._standstill_bytes > self._limits.max_head_bytes:
            self._refuse(_head_too_large(self._limits.max_head_bytes))

    @override
    def on_message_begin(self) -> None:
        self._in_head = self._has_advanced = True
        super().on_message_begin()

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer
        if len(self.headers) == MAX_HEADERS:
            raise _head_too_large(self._limits.max_head_bytes)
        super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        if len(self.url) + sum(map(len, chain.from_iterable(self.headers))) > self._limits.max_head_bytes:
            raise _head_too_large(self._limits.max_head_bytes)
        if len(self.pipeline) == MAX_PIPELINED:
            raise TooManyPipelined(TOO_MANY)
        check_head(version := self.parser.get_http_version(), self.headers)
        if version == "1.0":
            self.expect_100_continue = False  # such clients do not know interim responses
        self._in_head, self._has_advanced = False, True
        if self._deadline.timer is not None:
            self._deadline.clear()
        if (cycle := begin_plain(self, self.app_state["plain_requests"])) is None:
            if is_upgrade(self.parser):
                return  # `data_received` parses the request again
            super().on_headers_complete()  # raises if the target is not a URL
        else:
            self.cycle = self._cycle = cycle
            self._idle.pop(self.transport, None)
        self._in_body = True

    def on_chunk_header(self) -> None:
        """Record that a chunk-size line is complete, also the last one, before the trailers (httptools)."""
        self._has_advanced = True

    @override
    def on_body(self, body: bytes) -> None:
        self._has_advanced = True
        if not self.transport.is_closing():
            super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        if not self._in_body:
            return  # the head of an upgrade
        self._in_body = False
        if self.transport.is_closing():
            return
        if self._deadline.timer is not None:
            self._deadline.clear()
            self._late.pop(self.transport, None)
        super().on_message_complete()
        if self.cycle.response_complete:  # before the rest of the request came
            self.keep_alive.begin()

    @override
    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._set_idle()
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            self._set_late()
        if self._refusal is not None:
            self._send_refusal_after_responses()
        elif self.pipeline:
            self.flow.pause_reading()  # the next request is in progress, and more are queued
        elif self._cycle is None or self._cycle.response_complete:
            self._set_idle()  # or else the last of the queued requests is in progress
            self.keep_alive.begin()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._response_deadline.set(self._limits.answer_timeout_s)

    @override
    def resume_writing(self) -> None:
        self._response_deadline.clear()
        super().resume_writing()

    @override
    def shutdown(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close_both_sides()
        super().shutdown()

    @override
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._cycle = cycle
        self._idle.pop(self.transport, None)
        if cycle.scope["method"] != "HEAD":
            cycle.transport = ResponseTransport(cycle)
        if self._services.draining:  # the client's next connection goes to another process
            cycle.keep_alive = False
        is_short = _has_short_body(cycle.scope["headers"], self._limits.max_body_bytes)
        super()._start_asgi_task(cycle, app if is_short else _closing_if_unread(cycle, app))

    def _abort(self) -> None:
        self._disconnect_cycle()
        self.transport.abort()

    def _set_idle(self) -> None:
        """Record that no response is owed from now on."""
        if self in self.connections:
            self._idle.pop(self.transport, None)
            self._idle[self.transport] = None

    def _set_late(self) -> None:
        """Record that the rest of a body is missing, if no earlier response is owed."""
        if self._in_body and self._deadline.timer is not None and self._cycle is self.cycle:
            self._late[self.transport] = None

    def _is_awaiting_rest(self) -> bool:
        """Return whether the client may still be sending a request that already has a response."""
        return self._refusal is not None or (self._in_body and self.cycle.response_started)

    def _refuse(self, failure: RequestError) -> None:
        """Reject input that never reaches the app: respond after the pending responses, and read no further.

        The metrics count the rejection, but it is not logged.
        """
        from app.http.error_responses import error_response

        response = error_response(failure)
        is_head = (self._in_head or self._in_body) and self.url != b"" and self.parser.get_method() == b"HEAD"
        self._refusal = _last_response(response, self.server_state.default_headers, has_body=not is_head)
        self._services.metrics.requests.observe("other", "unmatched", response.status_code, 0.0)
        self._deadline.clear()
        if self._in_body:
            self._break_off_request()
        self._send_refusal_after_responses()

    def _break_off_request(self) -> None:
        """Make the refusal the response to the request whose body is being received, unless it already has one."""
        if self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()
        elif self.cycle.response_started:
            self._refusal = b""
        else:
            self._disconnect_cycle()

    def _send_refusal_after_responses(self) -> None:
        cycle = self._cycle
        is_at_work = cycle is not None and not (cycle.response_complete or cycle.disconnected)
        if self._refusal is not None and not is_at_work and not self.pipeline:
            self.transport.write(self._refusal)
            self._close()

    def _close(self) -> None:
        """Close the connection, and give the client limited time to read what was sent."""
        self._deadline.clear()
        self._disconnect_cycle()
        self._set_idle()
        self.transport.close()

    def _disconnect_cycle(self) -> None:
        """Tell the request in progress that its client has disconnected, even if pipelined requests follow it."""
        if self._cycle is not None and not self._cycle.response_complete:
            self._cycle.disconnected = True
            self._cycle.message_event.set()


def _head_too_large(limit: int) -> HeadTooLarge:
    return HeadTooLarge(
        f"the URL and the headers of a request may have at most {limit:,} bytes and {MAX_HEADERS} headers"
    )


def _last_response(response: Response, default_headers: Sequence[tuple[bytes, bytes]], *, has_body: bool) -> bytes:
    """Return a response after which the connection closes."""
    head = [STATUS_LINE[response.status_code], b"connection: close\r\n"]
    head += [name + b": " + value + b"\r\n" for name, value in (*default_headers, *response.raw_headers)]
    return b"".join(head) + b"\r\n" + (bytes(response.body) if has_body else b"")


def _has_short_body(headers: Iterable[tuple[bytes, bytes]], limit: int) -> bool:
    """Return whether the body is so short that reading the rest of it is cheaper than a new connection."""
    for name, value in headers:
        if name == b"content-length":
            return int(value) <= limit
        if name == b"transfer-encoding":
            return False
    return True


def _closing_if_unread(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Wrap the app so that the connection closes after a response that is sent before the request is complete."""

    async def answer(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_and_close(message: ASGISendEvent) -> None:
            cycle.keep_alive = cycle.keep_alive and not cycle.more_body
            await send(message)

        await app(scope, receive, send_and_close)

    return answer
