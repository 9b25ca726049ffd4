"""ASGI middleware that measures every request, gives it an id, and logs the slow and the failed ones."""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import trace
from app.logs import LINES_A_SECOND
from app.metrics import RequestMetrics
from app.trace import Trace

KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

logger = logging.getLogger(__name__)


class RequestTimer:
    """ASGI middleware that measures every request, and answers with its id and its `Server-Timing`.

    A time is recorded under the route's template, so that user ids make no new series. A slow or failed request is
    logged with its id, at most LINES_A_SECOND of them, since an overloaded process should not write much.
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
        request_trace = Trace(next((value for name, value in scope["headers"] if name == b"x-request-id"), None))
        trace.begin(request_trace)  # in the request's own task
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message["headers"]
                headers.append((b"x-request-id", request_trace.id))
                if request_trace.spans:
                    headers.append((b"server-timing", request_trace.server_timing()))
            await send(message)

        metrics = self._metrics
        metrics.in_progress += 1
        begin = time.perf_counter()
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - begin
            metrics.in_progress -= 1
            method = scope["method"] if scope["method"] in KNOWN_METHODS else "other"
            route = getattr(scope.get("route"), "path", "unmatched")
            metrics.observe(method, route, status, seconds)
            if status >= 500 or seconds >= self._slow_s:
                self._log(method, route, status, seconds)

    def _log(self, method: str, route: str, status: int, seconds: float) -> None:
        if (second := int(time.monotonic())) != self._second:
            if self._lines > LINES_A_SECOND:
                logger.warning("%d more slow or failed requests in that second", self._lines - LINES_A_SECOND)
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines <= LINES_A_SECOND:
            logger.warning("%s %s answered %d after %.3f s", method, route, status, seconds)
