"""Answers the most frequent calls without the framework, whose overhead exceeds their own cost.

The declared routes remain: /openapi.json is generated from them. They also answer every request that is not in the
simplest form, so that one place decides which requests are rejected before their bodies are read. All other code is
shared.
"""

import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl

from pydantic import ValidationError
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.access import Caller, authorise
from app.http.auth.keys import Scope as KeyScope
from app.http.charged_calls import append_events, recommend, recommend_body
from app.http.dependencies import REPEATABLE, read_body
from app.http.error_responses import EXPECTED_ERRORS, response_to
from app.http.routes.portable import append_portable_events, recommend_portable
from app.http.services import Services
from app.schemas.fields import is_id
from app.schemas.recommendations import RecommendationRequest, RecommendationUrlQuery

USER_PATH = re.compile(r"/v1/users/([^/]+)/recommendations")
SINGLE_VALUED = RecommendationUrlQuery.model_fields.keys() - REPEATABLE
JSON_CONTENT_TYPE = (b"content-type", b"application/json")
PLAIN = RecommendationRequest(user_id="user")


class Route(NamedTuple):
    """The route under which the request metrics count a request."""

    path: str


class Post(NamedTuple):
    """A call with a body.

    scope   what the caller's key must allow
    answer  returns the response body, given that of the request
    """

    scope: KeyScope
    answer: Callable[[Services, Caller, bytes], Coroutine[None, None, bytes]]


GET_RECOMMENDATIONS = Route("/v1/users/{user_id}/recommendations")


class FastPath:
    """ASGI middleware that answers the most frequent calls itself, and passes all others to the app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""
        answer = fast_answer(scope, receive) if scope["type"] == "http" else None
        try:
            content = None if answer is None else await answer
        except Exception as exc:
            await response_to(exc, scope["state"]["services"].metrics)(scope, receive, send)
            if isinstance(exc, EXPECTED_ERRORS):
                return
            raise  # a bug in the service: the server logs it
        if content is None:
            await self._app(scope, receive, send)
            return
        length = b"content-length", b"%d" % len(content)
        await send({"type": "http.response.start", "status": 200, "headers": [length, JSON_CONTENT_TYPE]})
        await send({"type": "http.response.body", "body": content})


def fast_answer(scope: Scope, receive: Receive) -> Awaitable[bytes | None] | None:
    """Return an awaitable of the response body; None, or an awaitable of None, if the app must answer."""
    method, path = scope["method"], scope["path"]
    if b"%" in scope["raw_path"]:  # `RequestPath` decodes such paths
        return None
    if method == "GET" and (user := USER_PATH.fullmatch(path)):
        scope["route"] = GET_RECOMMENDATIONS
        return _recommend(scope, user[1])
    if method == "POST" and not scope["query_string"] and (post := POSTS.get(path)):
        scope["route"] = Route(path)
        return _post(post, scope, receive)
    return None


def plain_request(user_id: str, query: bytes) -> RecommendationRequest | None:
    """Parse the request from the user's id and the query; return None if the app must parse or reject it."""
    if not query:  # the common case; a copy takes a third of the time of a validation
        return PLAIN.model_copy(update={"user_id": user_id}) if is_id(user_id) else None
    fields: dict[str, str | list[str]] = {"user_id": user_id}
    try:
        parameters = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict")
    except UnicodeDecodeError:
        return None
    for name, value in parameters:
        if name in REPEATABLE:
            fields.setdefault(name, []).append(value)  # type: ignore[union-attr]
        elif name in fields or name not in SINGLE_VALUED:
            return None
        else:
            fields[name] = value
    try:
        return RecommendationRequest.model_validate(fields, strict=False)
    except ValidationError:
        return None


async def _recommend(scope: Scope, user_id: str) -> bytes | None:
    services: Services = scope["state"]["services"]
    caller = await authorise(services, scope, "recs:read")
    request = plain_request(user_id, scope["query_string"])  # after the key check: parsing a cursor takes milliseconds
    if request is None:
        return None
    return await recommend(services, caller, request)


async def _post(post: Post, scope: Scope, receive: Receive) -> bytes:
    services: Services = scope["state"]["services"]
    caller = await authorise(services, scope, post.scope)
    return await post.answer(services, caller, await read_body(Request(scope, receive), services))


POSTS: Mapping[str, Post] = {
    "/v1/events": Post("events:write", append_events),
    "/v1/recommendations": Post("recs:read", recommend_body),
    "/v1/portable/events": Post("portable", append_portable_events),
    "/v1/portable/recommendations": Post("portable", recommend_portable),
}
