"""ASGI middleware that refuses paths which a router, a proxy and a log line may read differently."""

import re
from collections.abc import Awaitable

from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import InvalidRequest
from app.http.error_responses import error_response

# A control character or a slash, encoded; docker/haproxy.cfg has the same expression. The framework's routes would take
# "/metrics%0a" for "/metrics", and "/v1/users/a%2fevents" for the path with a plain slash.
AMBIGUOUS = re.compile(rb"%([01][0-9a-f]|7f|2f)", re.IGNORECASE)


class RequestPath:
    """ASGI middleware that answers a path with an encoded control character or slash with 422."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one request (ASGI)."""
        if scope["type"] == "http" and AMBIGUOUS.search(scope["raw_path"]):
            refusal = error_response(
                InvalidRequest("a path must not have an encoded control character or an encoded slash")
            )
            return refusal(scope, receive, send)
        return self._app(scope, receive, send)
