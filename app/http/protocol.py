"""The HTTP protocol of one connection, with time-outs and size limits that the server does not have itself.

A worker process imports this module before it can answer its supervisor, which waits for 5 s. Torch takes seconds to
import, so nothing here may import it.
"""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.errors import HeadTooLarge, NotHttp

if TYPE_CHECKING:
    from app.http.services import Services

BODY_GRACE_S = 5.0  # for the service to answer itself that a body is late


class LimitedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose request arrives too slowly, or whose client takes the response too slowly.

    It also ends every connection above the limit of open ones. A request's time runs from the opening of the
    connection, or from the first byte after a response, to the request's last byte. Where the service reads the body,
    it answers itself that the body is late; this class ends the connections whose body nobody reads.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        services: Services = self.app_state["services"]
        self._services = services
        self._limits = services.settings
        self._metrics = services.metrics.requests
        self.app_state = {**self.app_state, "is_gone": self.is_gone}
        self._cycle: RequestResponseCycle | None = None
        self._deadline: TimerHandle | None = None  # for the client to send the request
        self._response_deadline: TimerHandle | None = None  # for the client to take the response
        self._heads_begun = 0
        self._in_head = False
        self._head_bytes = 0  # received so far of a head that is not complete

    def is_gone(self) -> bool:
        """Return whether the client has gone."""
        return self.transport.is_closing()

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_open_connections:
            transport.abort()
            return
        self._set_deadline(self._limits.head_timeout_s)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self._clear_response_deadline()
        self._disconnect_cycle()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        if self._deadline is None:
            self._set_deadline(self._limits.head_timeout_s)
        head = self._heads_begun if self._in_head else None
        super().data_received(data)
        if self._in_head and head == self._heads_begun and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_head_bytes:
                self._refuse_head()

    @override
    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._heads_begun += 1
        super().on_message_begin()

    @override
    def on_headers_complete(self) -> None:
        head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if head_bytes > self._limits.max_head_bytes:
            self._refuse_head()
        if self.transport.is_closing():
            return
        self._in_head = False
        self._set_deadline(self._limits.body_timeout_s + BODY_GRACE_S)
        super().on_headers_complete()

    @override
    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        if self.transport.is_closing():
            return
        self._clear_deadline()
        super().on_message_complete()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._clear_response_deadline()
        self._response_deadline = self.loop.call_later(self._limits.answer_timeout_s, self._abort)

    @override
    def resume_writing(self) -> None:
        self._clear_response_deadline()
        super().resume_writing()

    @override
    def timeout_keep_alive_handler(self) -> None:
        self._close()

    @override
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._cycle = cycle
        if self._services.draining:  # the client's next connection goes to another process
            cycle.keep_alive = False
        super()._start_asgi_task(cycle, app)

    def _set_deadline(self, within_s: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(within_s, self._close)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _clear_response_deadline(self) -> None:
        if self._response_deadline is not None:
            self._response_deadline.cancel()
            self._response_deadline = None

    @override
    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP, with the same kind of body as every other error."""
        self._refuse(NotHttp("this is no request in HTTP/1.1; nothing was done"))

    @override
    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a client could fill the log. It gets the response of HTTP/1.1."""

    def _refuse_head(self) -> None:
        limit = self._limits.max_head_bytes
        self._refuse(HeadTooLarge(f"address and headers of a request have at most {limit:,} bytes"))

    def _refuse(self, failure: Exception) -> None:
        """Answer what never becomes a request of the app. The metrics count it; the log does not mention it."""
        from app.http.error_responses import error_response

        response = error_response(failure)
        head = [STATUS_LINE[response.status_code], b"connection: close\r\n"]
        head += [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
        self.transport.write(b"".join(head) + b"\r\n" + bytes(response.body))
        self._metrics.observe("other", "unmatched", response.status_code, 0.0)
        self._close()

    def _close(self) -> None:
        """Close the connection, and give the client limited time to take what was sent."""
        self._disconnect_cycle()
        self.transport.close()
        self.loop.call_later(self._limits.answer_timeout_s, self.transport.abort)

    def _abort(self) -> None:
        self._disconnect_cycle()
        self.transport.abort()

    def _disconnect_cycle(self) -> None:
        """Tell the request in progress that its client has gone, also where pipelined requests follow it."""
        if self._cycle is not None and not self._cycle.response_complete:
            self._cycle.disconnected = True
            self._cycle.message_event.set()
