"""Load shedding: a process works on a bounded number of requests, and refuses more with 503 at once."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import Overloaded
from app.http.error_responses import error_response

# Monitoring needs its answers most when the process is overloaded.
NEVER_SHED = frozenset({"/healthz", "/readyz", "/metrics"})
REFUSAL = error_response(Overloaded())  # made once: it is sent when there is no time


async def _refuse(send: Send) -> None:
    # the headers are copied, since the layers around this one add to them
    await send({"type": "http.response.start", "status": REFUSAL.status_code, "headers": list(REFUSAL.raw_headers)})
    await send({"type": "http.response.body", "body": REFUSAL.body})


class LoadShedding:
    """ASGI middleware: refuses a request while `max_in_progress` others are in progress.

    A request does not count while it waits for its client, to send the body or to take the response: slow clients
    shut nobody out.
    """

    def __init__(self, app: ASGIApp, max_in_progress: int) -> None:
        self._app = app
        self._max_in_progress = max_in_progress
        self._in_progress = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""
        if scope["type"] != "http" or scope["path"] in NEVER_SHED:
            await self._app(scope, receive, send)
            return
        if self._in_progress >= self._max_in_progress:
            await _refuse(send)
            return
        has_more_body = True

        async def receive_uncounted() -> Message:
            nonlocal has_more_body
            self._in_progress -= 1
            try:
                message = await receive()
            finally:
                self._in_progress += 1
            if has_more_body and not message.get("more_body", False):
                has_more_body = False
                if self._in_progress > self._max_in_progress:
                    raise Overloaded
            return message

        async def send_uncounted(message: Message) -> None:
            self._in_progress -= 1
            try:
                await send(message)
            finally:
                self._in_progress += 1

        self._in_progress += 1
        try:
            await self._app(scope, receive_uncounted, send_uncounted)
        finally:
            self._in_progress -= 1
