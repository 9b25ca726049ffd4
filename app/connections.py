"""One HTTP connection, with bounds on what a client may take its time for. The server has none of these by itself.

A worker process imports this before it can answer the one that watches it, which waits for 5 s: so torch, which takes
seconds, and what imports it, have to wait.
"""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from typing import TYPE_CHECKING, Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.errors import HeadTooLarge, NotHttp

if TYPE_CHECKING:
    from app.http_state import Services

BODY_GRACE_S = 5.0  # for the service to say itself that a body is late


class Connection(HttpToolsProtocol):
    """A request arrives in time and an answer is taken in time, or the connection ends; so does one too many.

    The time for a request runs from the opening of the connection, or from the first byte after an answer, to its last
    byte. Where the service reads the body it says itself that it came too late; this ends those that nobody reads.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        services: Services = self.app_state["services"]
        self._limits = services.settings
        self._metrics = services.metrics.requests
        self.app_state = {**self.app_state, "is_gone": self.is_gone}
        self._answering: RequestResponseCycle | None = None
        self._deadline: TimerHandle | None = None  # of what the client is sending
        self._answer_deadline: TimerHandle | None = None  # of what it is taking
        self._heads_begun = 0
        self._in_head = False
        self._head_bytes = 0  # of whole pieces of a head that is not complete

    def is_gone(self) -> bool:
        """Whether nobody takes answers any more."""
        return self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_open_connections:
            transport.abort()
            return
        self._expect(self._limits.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._answer_taken()
        self._answer_nobody()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None:
            self._expect(self._limits.head_timeout_s)
        head = self._heads_begun if self._in_head else None
        super().data_received(data)
        if self._in_head and head == self._heads_begun and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_head_bytes:
                self._refuse_head()

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._heads_begun += 1
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if head_bytes > self._limits.max_head_bytes:
            self._refuse_head()
        if self.transport.is_closing():
            return
        self._in_head = False
        self._expect(self._limits.body_timeout_s + BODY_GRACE_S)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.transport.is_closing():
            return
        self._stop_waiting()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._answer_taken()
        self._answer_deadline = self.loop.call_later(self._limits.answer_timeout_s, self._cut)

    def resume_writing(self) -> None:
        self._answer_taken()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        self._end()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _expect(self, within_s: float) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(within_s, self._end)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _answer_taken(self) -> None:
        if self._answer_deadline is not None:
            self._answer_deadline.cancel()
            self._answer_deadline = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the words and the shape of every other refusal."""
        self._refuse(NotHttp("this is no request in HTTP/1.1; nothing was done"))

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: who asks for it could fill the log, and gets the answer that HTTP/1.1 has."""

    def _refuse_head(self) -> None:
        limit = self._limits.max_head_bytes
        self._refuse(HeadTooLarge(f"address and headers of a request have at most {limit:,} bytes"))

    def _refuse(self, failure: Exception) -> None:
        """Answer what never becomes a request of the app; it is counted, and no line of log says so."""
        from app.error_responses import error_response

        answer = error_response(failure)
        head = [STATUS_LINE[answer.status_code], b"connection: close\r\n"]
        head += [name + b": " + value + b"\r\n" for name, value in answer.raw_headers]
        self.transport.write(b"".join(head) + b"\r\n" + bytes(answer.body))
        self._metrics.observe("other", "unmatched", answer.status_code, 0.0)
        self._end()

    def _end(self) -> None:
        """Close the connection, and not wait for ever until the client has taken what was sent."""
        self._answer_nobody()
        self.transport.close()
        self.loop.call_later(self._limits.answer_timeout_s, self.transport.abort)

    def _cut(self) -> None:
        self._answer_nobody()
        self.transport.abort()

    def _answer_nobody(self) -> None:
        """Let whoever still works on an answer find the client gone, also where more requests came behind this one."""
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
