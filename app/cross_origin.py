"""Pages of other origins: with a key of theirs they may post events (CORS); without keys they may do nothing.

A browser on the machine of a service without keys would else let any page that somebody looks at post events or switch
models, blindly or under a name of its own that it lets lead to 127.0.0.1 (DNS rebinding).
"""

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.error_responses import error_response
from app.errors import Forbidden
from app.http_state import Services
from app.settings import is_loopback

PATH = "/v1/events"  # all that a key for browsers is good for
METHOD = "POST"
HEADERS = frozenset({"authorization", "content-type"})
PREFLIGHT_HOLDS_S = 600
OF_BROWSERS = frozenset({b"origin", b"sec-fetch-site"})
FOR_EVERY_PAGE = "/client.js"


class CrossOrigin:
    """ASGI middleware. Which key a page has is not known before it posts: the key's own origins are checked then."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        services: Services = scope["state"]["services"]
        if services.keyring is None:
            if _is_of_another_page(scope, services.settings.host):
                await error_response(Forbidden("there are no keys here, and pages of other origins may do nothing"))(
                    scope, receive, send
                )
            else:
                await self._app(scope, receive, send)
            return
        if scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        is_allowed = services.keyring.allows(origin)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers, is_allowed)(scope, receive, send)
            return

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer.add_vary_header("Origin")
                if is_allowed:
                    answer["Access-Control-Allow-Origin"] = origin
                    answer["Access-Control-Expose-Headers"] = "Retry-After"
            await send(message)

        await self._app(scope, receive, send_with_origin)


def _is_of_another_page(scope: Scope, own_host: str) -> bool:
    """Whether a browser sent this for a page that did not come from here; other programs send none of the headers."""
    if not any(name in OF_BROWSERS for name, _ in scope["headers"]) or scope["path"] == FOR_EVERY_PAGE:
        return False
    headers = Headers(scope=scope)
    host = headers.get("host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if is_loopback(own_host) and not is_loopback(name):
        return True
    site = headers.get("sec-fetch-site")
    if site is None:
        return headers["origin"] not in (f"http://{host}", f"https://{host}")
    return site not in ("same-origin", "none")  # none: somebody has typed the address, or follows a bookmark


def _preflight(headers: Headers, is_allowed: bool) -> Response:
    asked = {name.strip().lower() for name in headers.get("access-control-request-headers", "").split(",")} - {""}
    if not is_allowed or headers["access-control-request-method"] != METHOD or asked - HEADERS:
        refusal = error_response(Forbidden("pages of this origin may not call this"))
        refusal.headers["Vary"] = "Origin"
        return refusal
    return Response(
        status_code=204,
        headers={
            "Access-Control-Allow-Origin": headers["origin"],
            "Access-Control-Allow-Methods": METHOD,
            "Access-Control-Allow-Headers": ", ".join(sorted(HEADERS)),
            "Access-Control-Max-Age": str(PREFLIGHT_HOLDS_S),
            "Vary": "Origin",
        },
    )
