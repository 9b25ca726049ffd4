"""The classes of all routes and routers, which check a request's key before they parse the request."""

from collections.abc import Callable, Coroutine
from operator import attrgetter
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from typing_extensions import override

from app.errors import InvalidRequest
from app.http.access import authorise, declared_scopes
from app.http.dependencies import refuse_repeated_parameters
from app.http.openapi import errors

MAX_OPEN_QUERY_BYTES = 256  # of a call that needs no key, such as "?v=3" after a script's URL


class GuardedRoute(APIRoute):
    """A route that checks the key before the framework parses any part of the request.

    Parsing the longest possible query takes 12 ms, and a request without a key must cost next to nothing.
    """

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        needed = next(iter(declared_scopes(self.dependencies)), None)

        async def guarded(request: Request) -> Response:
            if needed is not None:
                await authorise(request.state.services, request.scope, needed)
            elif len(request.scope["query_string"]) > MAX_OPEN_QUERY_BYTES:
                raise InvalidRequest("the query of this endpoint is too long")
            refuse_repeated_parameters(request)
            return await handle(request)

        return guarded


class GuardedRouter(APIRouter):
    """The routes of one resource, with the errors that any of them may return."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            route_class=GuardedRoute,
            responses=errors(401, 403, 422, 429, 431, 503),
            generate_unique_id_function=attrgetter("name"),  # of the endpoint function, such as `get_recommendations`
            **options,
        )
