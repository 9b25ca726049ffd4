"""What browsers ask before pages of another origin may post events, and have to be told with the answer (CORS)."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import Forbidden, answer_to
from app.service import Services

PATH = "/v1/events"  # all that a key for browsers is good for
METHOD = "POST"
HEADERS = frozenset({"authorization", "content-type"})
PREFLIGHT_HOLDS_S = 600


class CrossOrigin:
    """ASGI middleware. Which key a page has is not known before it posts: the key's own origins are checked then."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        services: Services = scope["state"]["services"]
        if services.keyring is None:
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


def _preflight(headers: Headers, is_allowed: bool) -> Response:
    asked = {name.strip().lower() for name in headers.get("access-control-request-headers", "").split(",")} - {""}
    if not is_allowed or headers["access-control-request-method"] != METHOD or asked - HEADERS:
        refusal = answer_to(Forbidden("pages of this origin may not call this"))
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
