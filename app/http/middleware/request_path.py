"""ASGI middleware that rejects paths and queries that routers, proxies and logs may interpret differently."""

import re
from collections.abc import Awaitable
from urllib.parse import unquote_to_bytes

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import InvalidRequest
from app.http.error_responses import error_response
from app.schemas.fields import ENCODED_SLASH

# An encoded control character, as in docker/haproxy.cfg. Routes would match "/metrics%0a" as "/metrics".
AMBIGUOUS = re.compile(rb"%([01][0-9a-f]|7f)", re.IGNORECASE)
MAX_PATH_BYTES = 4_096  # two ids of 128 characters take 3,072, encoded
_SLASH = re.compile(rb"%2f", re.IGNORECASE)


class RequestPath:
    """ASGI middleware that decodes the path, with ENCODED_SLASH for slashes that are part of an id.

    So "/v1/users/a%2Fevents" is the user "a/events", and not the path with a plain slash. A path that has an encoded
    control character, is not UTF-8 or is longer than MAX_PATH_BYTES gets a 422 before any route is tried. So does a
    query that is not percent-encoded UTF-8.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one request (ASGI)."""
        if scope["type"] == "http":
            raw_path: bytes = scope["raw_path"]
            if len(raw_path) > MAX_PATH_BYTES:
                return _refusal(f"a path must have at most {MAX_PATH_BYTES:,} bytes")(scope, receive, send)
            if b"%" in raw_path:
                path = None if AMBIGUOUS.search(raw_path) else _unquoted(_SLASH.sub(ENCODED_SLASH.encode(), raw_path))
                if path is None:
                    reason = "a path must be UTF-8 and must not have an encoded control character"
                    return _refusal(reason)(scope, receive, send)
                scope["path"] = path
            query: bytes = scope["query_string"]
            if not query.isascii() or (b"%" in query and _unquoted(query) is None):
                return _refusal("a query must be percent-encoded UTF-8")(scope, receive, send)
        return self._app(scope, receive, send)


def _refusal(reason: str) -> Response:
    return error_response(InvalidRequest(reason))


def _unquoted(text: bytes) -> str | None:
    """Return the percent-decoded text; None if that is not UTF-8."""
    try:
        return unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        return None
