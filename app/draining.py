"""ASGI middleware that closes connections while the process shuts down."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CloseWhenDraining:
    """ASGI middleware: while the process drains, responses close their connection, so clients reconnect elsewhere."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""

        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        draining = scope["type"] == "http" and scope["state"]["services"].draining
        await self._app(scope, receive, send_closing if draining else send)
