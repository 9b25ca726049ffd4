"""ASGI middleware that measures every request, gives it an id, and logs the slow and the failed ones."""

import asyncio
import logging
import os
import re
import time
from itertools import count

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import Draining
from app.http.error_responses import error_response
from app.observability import tracing
from app.observability.log_format import MAX_LINES_PER_SECOND
from app.observability.metrics import RequestMetrics
from app.observability.tracing import Spans, Trace

KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

SAFE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")  # in a log line
PROCESS_PREFIX = os.urandom(4).hex().encode()
_request_numbers = count()

logger = logging.getLogger(__name__)


class RequestTimer:
    """ASGI middleware that measures every request, and answers with its id and its `Server-Timing`.

    A time is recorded under the route's template, so that user ids make no new series. A slow or failed request is
    logged with its id, at most MAX_LINES_PER_SECOND of them, since an overloaded process should not write much.

    A request that takes longer than the server's shutdown, which cancels it, gets a 503.
    """

    def __init__(self, app: ASGIApp, metrics: RequestMetrics, slow_s: float) -> None:
        self._app = app
        self._metrics = metrics
        self._slow_s = slow_s
        self._second = 0
        self._lines = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_trace = Trace(_request_id(scope))
        tracing.current.set(request_trace)  # in the request's own task
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message["headers"]
                headers.append((b"x-request-id", request_trace.id))
                if request_trace.spans:
                    headers.append((b"server-timing", _server_timing(request_trace.spans)))
            await send(message)

        metrics = self._metrics
        metrics.in_progress += 1
        begin = time.perf_counter()
        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if status is not None:
                raise
            await error_response(Draining())(scope, receive, send_with_id)
        finally:
            status = status or 500
            seconds = time.perf_counter() - begin
            metrics.in_progress -= 1
            method = scope["method"] if scope["method"] in KNOWN_METHODS else "other"
            route = getattr(scope.get("route"), "path", "unmatched")
            metrics.observe(method, route, status, seconds)
            if status >= 500 or seconds >= self._slow_s:
                self._log(method, route, status, seconds)

    def _log(self, method: str, route: str, status: int, seconds: float) -> None:
        if (second := int(time.monotonic())) != self._second:
            if self._lines > MAX_LINES_PER_SECOND:
                logger.warning("%d more slow or failed requests in that second", self._lines - MAX_LINES_PER_SECOND)
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines <= MAX_LINES_PER_SECOND:
            logger.warning("%s %s answered %d after %.3f s", method, route, status, seconds)


def _request_id(scope: Scope) -> bytes:
    """Return the id that the caller gave the request, if it is safe in a log line; else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            if SAFE_ID.fullmatch(value):
                return bytes(value)
            break
    return b"%s%08x" % (PROCESS_PREFIX, next(_request_numbers) & 0xFFFFFFFF)


def _server_timing(spans: Spans) -> bytes:
    """Return the value of the `Server-Timing` header, in milliseconds (https://www.w3.org/TR/server-timing/)."""
    return b", ".join(b"%s;dur=%.3f" % (name.encode(), seconds * 1e3) for name, seconds in spans.items())
