"""ASGI middleware that measures every request, gives it an id, and logs slow and failed requests."""

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable
from functools import partial
from itertools import count

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import Draining
from app.http.error_responses import error_response
from app.http.middleware.load_shedding import Source
from app.observability import tracing
from app.observability.log_format import MAX_LINES_PER_SECOND
from app.observability.metrics import RequestMetrics
from app.observability.tracing import Spans, Trace

KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

SAFE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")  # in a log line
PROCESS_PREFIX = os.urandom(4).hex().encode()
_request_numbers = count()

CACHE_CONTROL = b"cache-control"
NO_STORE = (CACHE_CONTROL, b"no-store")  # some caches share what has no such header, between keys and users

SourceFinder = Callable[[], Source | None]

logger = logging.getLogger(__name__)


class RequestRecorder:
    """Records requests in the metrics, and logs slow and failed ones.

    Times are recorded by the template of the route, so that user ids create no new series. Slow and failed requests are
    logged with their ids, those of their keys, and their tenants, at most MAX_LINES_PER_SECOND, because an overloaded
    process should not write much.
    """

    def __init__(self, metrics: RequestMetrics, slow_s: float) -> None:
        self._metrics = metrics
        self._slow_s = slow_s
        self._second = 0
        self._lines = 0

    def begin(self) -> float:
        """Count a request in progress, and return its start time, as of ``time.perf_counter``."""
        self._metrics.in_progress += 1
        return time.perf_counter()

    def end(self, method: str, route: str, status: int, begin_s: float, find_source: SourceFinder) -> None:
        """Record the end of a request, whose source is looked for only if the request is logged."""
        seconds = time.perf_counter() - begin_s
        self._metrics.in_progress -= 1
        self._metrics.observe(method, route, status, seconds)
        if status >= 500 or seconds >= self._slow_s:
            self._log(method, route, status, seconds, find_source)

    def _log(self, method: str, route: str, status: int, seconds: float, find_source: SourceFinder) -> None:
        if (second := int(time.monotonic())) != self._second:
            if self._lines > MAX_LINES_PER_SECOND:
                logger.warning("%d more slow or failed requests in that second", self._lines - MAX_LINES_PER_SECOND)
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines <= MAX_LINES_PER_SECOND:
            source = find_source()
            whose = "" if source is None else f" to key {source.key_id} of tenant {source.tenant}"
            logger.warning("%s %s answered %d after %.3f s%s", method, route, status, seconds, whose)


class RequestTimer:
    """ASGI middleware that records every request, and adds its id and `Server-Timing` to the response.

    No cache may store a response that has no `Cache-Control` of its own, because most concern one user or one tenant. A
    request that the server cancels at shutdown gets a 503.
    """

    def __init__(self, app: ASGIApp, recorder: RequestRecorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_trace = Trace(request_id(scope))
        tracing.current.set(request_trace)  # in the request's own task
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message["headers"]
                if not any(name == CACHE_CONTROL for name, _ in headers):
                    headers.append(NO_STORE)
                headers += trace_headers(request_trace)
            await send(message)

        begin_s = self._recorder.begin()
        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if status is not None:
                raise
            await error_response(Draining())(scope, receive, send_with_id)
        finally:
            method = scope["method"] if scope["method"] in KNOWN_METHODS else "other"
            route = getattr(scope.get("route"), "path", "unmatched")
            self._recorder.end(method, route, status or 500, begin_s, partial(Source.of, scope))


def request_id(scope: Scope) -> bytes:
    """Return the id that the client sent if it is safe in a log line; otherwise a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            if SAFE_ID.fullmatch(value):
                return bytes(value)
            break
    return b"%s%08x" % (PROCESS_PREFIX, next(_request_numbers) & 0xFFFFFFFF)


def trace_headers(request_trace: Trace) -> list[tuple[bytes, bytes]]:
    """Return the headers with the request's id and, in milliseconds, its `Server-Timing`.

    Source: https://www.w3.org/TR/server-timing/
    """
    headers = [(b"x-request-id", request_trace.id)]
    if request_trace.spans:
        headers.append((b"server-timing", _timings.text(request_trace.spans)))
    return headers


class _Timings:
    """Writes spans for the header, once for all requests of a batch, which share them."""

    def __init__(self) -> None:
        self._last: tuple[Spans, bytes] = {}, b""

    def text(self, spans: Spans) -> bytes:
        last, text = self._last
        if spans is not last:
            text = b", ".join([b"%s;dur=%.3f" % (name.encode(), seconds * 1e3) for name, seconds in spans.items()])
            self._last = spans, text
        return text


_timings = _Timings()
