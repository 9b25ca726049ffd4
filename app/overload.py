"""How much one process works on at a time; what comes on top of it is told at once to come back."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.error_responses import error_response
from app.errors import Overloaded

# Those who watch the process have to get an answer just then.
ALWAYS_ANSWERED = frozenset({"/healthz", "/readyz", "/metrics"})
REFUSAL = error_response(Overloaded())  # made once: it is sent when there is no time


async def _refuse(send: Send) -> None:
    # the headers are copied, since the layers around this one add to them
    await send({"type": "http.response.start", "status": REFUSAL.status_code, "headers": list(REFUSAL.raw_headers)})
    await send({"type": "http.response.body", "body": REFUSAL.body})


class RequestBound:
    """ASGI middleware: refuses requests beyond so many that are being worked on.

    Waiting for a client, for its body to come or for the answer to be taken, is no work: slow clients shut nobody out.
    """

    def __init__(self, app: ASGIApp, at_most: int) -> None:
        self._app = app
        self._at_most = at_most
        self._at_work = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ALWAYS_ANSWERED:
            await self._app(scope, receive, send)
            return
        if self._at_work >= self._at_most:
            await _refuse(send)
            return
        has_more_body = True

        async def receive_off_work() -> Message:
            nonlocal has_more_body
            self._at_work -= 1
            try:
                message = await receive()
            finally:
                self._at_work += 1
            if has_more_body and not message.get("more_body", False):
                has_more_body = False
                if self._at_work > self._at_most:
                    raise Overloaded
            return message

        async def send_off_work(message: Message) -> None:
            self._at_work -= 1
            try:
                await send(message)
            finally:
                self._at_work += 1

        self._at_work += 1
        try:
            await self._app(scope, receive_off_work, send_off_work)
        finally:
            self._at_work -= 1
