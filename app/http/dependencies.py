"""Dependencies of the endpoints: the tenant's service, the parsed body, and ids in the path."""

import asyncio
import json
from collections import Counter
from functools import partial
from typing import Annotated, Any, get_origin

from fastapi import Depends, Path
from fastapi.openapi.models import Example
from pydantic import BeforeValidator
from starlette.requests import Request

from app.errors import BodyTooLarge, BodyTooSlow, InvalidJson, InvalidRequest, UnsupportedMediaType
from app.http.access import Caller
from app.http.services import Services
from app.schemas.fields import ENCODED_SLASH, Id
from app.schemas.items import StockedId
from app.schemas.recommendations import RecommendationUrlQuery
from app.serving.lifespan import Service

LONG_BODY_BYTES = 1 << 14  # parsing a longer body takes a large part of a millisecond
REPEATABLE = frozenset(
    name for name, field in RecommendationUrlQuery.model_fields.items() if get_origin(field.annotation) is list
)


async def get_services(request: Request) -> Services:
    """Return the services of the lifespan."""
    services: Services = request.state.services
    return services


ServicesDep = Annotated[Services, Depends(get_services)]


async def get_caller(request: Request) -> Caller:
    """Return the caller, which the check of the route's scope has determined."""
    caller: Caller = request.state.caller
    return caller


CallerDep = Annotated[Caller, Depends(get_caller)]


async def get_service(caller: CallerDep, services: ServicesDep) -> Service:
    """Return the service of the caller's tenant."""
    return services.by_tenant[caller.tenant]


def example(value: str) -> dict[str, Example]:
    """Return an OpenAPI example for a parameter whose type, such as `Id`, has a description of its own."""
    return {value: {"value": value}}


def _with_slashes(value: object) -> object:
    """Return a part of a path, with its encoded slashes restored."""
    return value.replace(ENCODED_SLASH, "/") if isinstance(value, str) else value


ServiceDep = Annotated[Service, Depends(get_service)]
WITH_SLASHES = BeforeValidator(_with_slashes)
UserId = Annotated[Id, WITH_SLASHES, Path(description="The user's id, encoded.", openapi_examples=example("ada"))]
ITEM_IN_PATH = Path(description="The item's id, encoded.", openapi_examples=example("tea-2"))
ItemId = Annotated[Id, WITH_SLASHES, ITEM_IN_PATH]
StockedItemId = Annotated[StockedId, WITH_SLASHES, ITEM_IN_PATH]
EventId = Annotated[
    Id,
    WITH_SLASHES,
    Path(
        description="The event's `event_id`, encoded.", openapi_examples=example("01932c07-5e00-7d4b-a1c3-2f8e6b9d0a11")
    ),
]


async def read_body(request: Request, services: ServicesDep) -> bytes:
    """Read the body, up to the size limit.

    raises  BodyTooLarge, BodyTooSlow, UnsupportedMediaType
    """
    content_type = request.headers.get("content-type")
    if content_type is not None and content_type.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaType("the body must be JSON; send Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaType("the body must not be compressed; send it without Content-Encoding")
    timeout_s = services.settings.body_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, services.settings.max_body_bytes)
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {timeout_s:g} s; send it again") from None


RawBody = Annotated[bytes, Depends(read_body)]


async def json_body(services: ServicesDep, caller: CallerDep, body: RawBody) -> object:
    """Parse the body as `parsed_json` does."""
    return await parsed_json(services, caller, body)


JsonBody = Annotated[object, Depends(json_body)]


async def parsed_json(services: Services, caller: Caller, body: bytes) -> object:
    """Parse a body strictly, a long one in the shared thread; raises InvalidJson."""
    if len(body) <= LONG_BODY_BYTES:
        return parse_json(body)
    return await services.shared_thread.run(partial(parse_json, body), len(body), caller.requester)


async def _read(request: Request, limit: int) -> bytes:
    body = bytearray()
    is_too_large = _declared_length(request) > limit
    if not is_too_large:
        async for chunk in request.stream():
            body += chunk
            if is_too_large := len(body) > limit:
                break
    if is_too_large:
        raise BodyTooLarge(f"the body exceeds {limit:,} bytes; split it")
    return bytes(body)


def _declared_length(request: Request) -> int:
    try:
        return int(request.headers.get("content-length", 0))
    except ValueError:
        return 0  # the bytes that arrive are counted anyway


def parse_json(body: bytes) -> object:
    """Parse the body strictly.

    raises  InvalidJson
    """
    try:
        text = body.decode()
        if text.startswith(BYTE_ORDER_MARK):
            raise InvalidJson("the body begins with a byte order mark; send UTF-8 without it")
        return DECODER.decode(text)
    except UnicodeDecodeError:
        raise InvalidJson("the body is not UTF-8") from None
    except RecursionError:
        raise InvalidJson("the body is nested too deeply") from None
    except ValueError as exc:
        raise InvalidJson(_json_problem(exc)) from None


def _refuse_repeated_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field appears twice in one object")
    return fields


def _json_problem(fault: ValueError) -> str:
    if isinstance(fault, json.JSONDecodeError):
        return f"the body is not JSON: {fault.msg} at character {fault.pos:,}"
    if "digits" in str(fault):
        return "the body has an integer with too many digits"
    return str(fault)


BYTE_ORDER_MARK = "\ufeff"
DECODER = json.JSONDecoder(object_pairs_hook=_refuse_repeated_fields)


def refuse_repeated_parameters(request: Request) -> None:
    """Reject a repeated query parameter that is not a list; the framework would silently use the last value.

    raises  InvalidRequest
    """
    counts = Counter(name for name, _ in request.query_params.multi_items())
    if any(count > 1 and name not in REPEATABLE for name, count in counts.items()):
        raise InvalidRequest("a query parameter is repeated, but is not a list")


async def no_query(request: Request) -> None:
    """Reject a request with query parameters; raises InvalidRequest."""
    if request.scope["query_string"]:
        raise InvalidRequest("this endpoint has no query parameters")


NO_QUERY = Depends(no_query)
