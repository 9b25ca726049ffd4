"""CORS: pages of other origins may post with a page key; without keys, they may only load the client script.

Without this check, any page in a browser on the service's own machine could post events or switch models of a service
without keys: blindly, or through its own host name that resolves to 127.0.0.1 (DNS rebinding).
"""

from collections.abc import Awaitable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import Forbidden
from app.http.error_responses import error_response
from app.http.services import Services
from app.settings import is_loopback

PATHS = frozenset({"/v1/events", "/v1/portable/events", "/v1/portable/recommendations"})  # for page keys
METHOD = "POST"
ALLOWED_HEADERS = frozenset({"authorization", "content-type"})
PREFLIGHT_MAX_AGE_S = 600
BROWSER_HEADERS = frozenset({b"origin", b"sec-fetch-site"})
# When a page reads from its own host without TLS, browsers send only the last one.
BROWSER_HEADERS_OF_READS = BROWSER_HEADERS | {b"accept-language"}
PUBLIC_PATH = "/client.js"


class CrossOriginPolicy:
    """ASGI middleware that answers preflights, and rejects calls of other origins if the service has no keys.

    `app.http.access` checks the origins of a key.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one request (ASGI)."""
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        services: Services = scope["state"]["services"]
        if services.keyring is None:
            if _is_cross_origin(scope, services.settings.host):
                refusal = Forbidden("this service has no keys, so it rejects calls from other web origins")
                return error_response(refusal)(scope, receive, send)
            return self._app(scope, receive, send)
        if scope["path"] not in PATHS:
            return self._app(scope, receive, send)
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        is_allowed = services.keyring.allows(origin)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            return _preflight(headers, is_allowed)(scope, receive, send)

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer.add_vary_header("Origin")
                if is_allowed:
                    answer["Access-Control-Allow-Origin"] = origin
                    answer["Access-Control-Expose-Headers"] = "Retry-After"
            await send(message)

        return self._app(scope, receive, send_with_origin)


def _is_cross_origin(scope: Scope, own_host: str) -> bool:
    """Return whether a browser sent the request for a page of another origin; few others send such headers."""
    of_browsers = BROWSER_HEADERS_OF_READS if scope["method"] in ("GET", "HEAD") else BROWSER_HEADERS
    names = {name for name, _ in scope["headers"]}
    if names.isdisjoint(of_browsers) or scope["path"] == PUBLIC_PATH:
        return False
    if b"sec-fetch-mode" in names and b"sec-fetch-site" not in names:
        return False  # Node.js: browsers send both or neither, and pages cannot set them
    headers = Headers(scope=scope)
    host = headers.get("host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if is_loopback(own_host) and not is_loopback(name):
        return True
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is None:
        return origin is not None and origin not in (f"http://{host}", f"https://{host}")
    return site not in ("same-origin", "none")  # none: a typed address or a bookmark


def _preflight(headers: Headers, is_allowed: bool) -> Response:
    names = headers.get("access-control-request-headers", "").split(",", len(ALLOWED_HEADERS))  # more are rejected
    requested = {name.strip().lower() for name in names} - {""}
    if not is_allowed or headers["access-control-request-method"] != METHOD or requested - ALLOWED_HEADERS:
        refusal = error_response(Forbidden("this web origin may not call this endpoint"))
        refusal.headers["Vary"] = "Origin"
        return refusal
    return Response(
        status_code=204,
        headers={
            "Access-Control-Allow-Origin": headers["origin"],
            "Access-Control-Allow-Methods": METHOD,
            "Access-Control-Allow-Headers": ", ".join(sorted(ALLOWED_HEADERS)),
            "Access-Control-Max-Age": str(PREFLIGHT_MAX_AGE_S),
            "Vary": "Origin",
        },
    )
