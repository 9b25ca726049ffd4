"""Parts of /openapi.json that the framework cannot derive: bodies parsed by hand, error responses, and keys."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import orjson
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from app.http.access import declared_scopes
from app.http.error_responses import ErrorBody
from app.schemas.recommendations import RecommendationUrlQuery
from app.settings import Settings

COMPONENT = "#/components/schemas/{model}"
Mode = Literal["validation", "serialization"]
BODY = "x-body"  # an operation's body as JSON text, because the framework drops nulls from examples
BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key, created by `lisarec keys add`. It needs the scope that the operation names.",
}
# Generated clients send the defaults of the document. These fields have none: a scenario cannot change what a request
# sends, and the clients of some languages send false as 0.
WITHOUT_DEFAULT = frozenset(RecommendationUrlQuery.model_fields)
ERRORS = {
    400: "The body is not JSON.",
    408: "The body did not arrive in time. Send the same request again.",
    413: "The body or the number of events is too large. Split the request.",
    415: "The body is not `application/json`.",
    422: "A value is not accepted. `details` name the field and the reason, `code` the kind of problem.",
    431: "The address and the headers are too large.",
    503: "The process or its store cannot answer now. Send the same request again after `Retry-After`.",
}
RETRY_AFTER = {"Retry-After": {"description": "The seconds to wait.", "schema": {"type": "integer"}}}
REFUSALS = {
    "401": "The key is missing or invalid. The message is the same in both cases.",
    "403": "The key lacks the scope `{scope}`, or does not allow this web origin.",
    "429": "The key has reached its rate limit or its limit of new users. `Retry-After` has the seconds to wait.",
}


def component_schemas(*types: Any, mode: Mode = "validation") -> dict[str, Any]:
    """Return the schemas of the models in these types, and of all models that they refer to, by name."""
    adapters = [(place, mode, TypeAdapter[Any](one)) for place, one in enumerate(types)]
    _, definitions = TypeAdapter.json_schemas(adapters, ref_template=COMPONENT)
    return dict(definitions["$defs"])


def json_request(body: Any, examples: Mapping[str, Any], schemas: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the description of an operation's JSON body, with named examples.

    body     a type whose models get schemas of their own, or a schema
    schemas  the schemas that `body` refers to, if it is a schema
    """
    if schemas is None:
        schemas = component_schemas(body)
        body = TypeAdapter(body).json_schema(ref_template=COMPONENT)
        body.pop("$defs", None)
        if body.get("title") in schemas:
            body = {"$ref": COMPONENT.format(model=body["title"])}
    content = {"schema": body, "examples": {name: {"value": value} for name, value in examples.items()}}
    described = {"schemas": schemas, "requestBody": {"required": True, "content": {"application/json": content}}}
    return {BODY: orjson.dumps(described).decode()}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the descriptions of an operation's error responses."""
    return {
        status: {"model": ErrorBody}
        | ({"description": ERRORS[status]} if status in ERRORS else {})
        | ({"headers": RETRY_AFTER} if status in (429, 503) else {})
        for status in statuses
    }


def describe(app: FastAPI, settings: Settings) -> None:
    """Complete the app's OpenAPI document with the schemas of bodies and the scope of each operation.

    If the service has no keys, the document describes them as optional. So a client that is generated from it can also
    send keys to a service that needs them.
    """
    framework = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = framework()
        document["components"]["securitySchemes"] = {"key": BEARER}
        schemas = document["components"]["schemas"]
        routes = [route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema]
        for route in routes:
            (scope,) = declared_scopes(route.dependencies)
            is_open = settings.keys_file is None or (scope == "metrics:read" and settings.open_metrics)
            for method in route.methods or ():
                operation = document["paths"][route.path][method.lower()]
                _describe_body(operation, schemas)
                _describe_key(operation, scope, is_open=is_open)
                # the framework adds empty JSON content to responses that are declared by hand
                content = operation["responses"].get("200", {}).get("content", {})
                if content.get("application/json") == {"schema": {}}:
                    del content["application/json"]
        if settings.keys_file is not None:
            _require_event_ids(schemas)
        _remove_defaults(document)
        _require_double_precision(document)
        answers = component_schemas(*(route.response_model for route in routes), mode="serialization")
        for name, schema in answers.items():
            if "examples" in schema:  # restores their nulls
                schemas[name]["examples"] = schema["examples"]
        return document

    app.openapi = described  # type: ignore[method-assign]


def _describe_body(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    body = orjson.loads(operation.pop(BODY, b"{}"))
    for name, schema in body.pop("schemas", {}).items():
        schemas.setdefault(name, schema)  # a response may use the same model
    operation |= body


def _require_event_ids(schemas: dict[str, Any]) -> None:
    for name in ("PostedEvent", "PortableEvent"):
        schemas[name]["required"].append("event_id")
        event_id = schemas[name]["properties"]["event_id"]
        event_id |= event_id.pop("anyOf")[0]  # and not null
        del event_id["default"]


def _remove_defaults(document: dict[str, Any]) -> None:
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    fields = [(one["name"], one["schema"]) for operation in operations for one in operation.get("parameters", ())]
    for schema in document["components"]["schemas"].values():
        fields += schema.get("properties", {}).items()
    for name, field in fields:
        if name in WITHOUT_DEFAULT:
            field.pop("default", None)


def _require_double_precision(node: Any) -> None:
    """Set the format of all numbers. Clients in Go otherwise have single precision, which rounds times to minutes."""
    if isinstance(node, list):
        for one in node:
            _require_double_precision(one)
    elif isinstance(node, dict):
        if node.get("type") == "number":
            node["format"] = "double"
        for name, one in node.items():
            if name != "examples":
                _require_double_precision(one)


def add_document(app: FastAPI) -> None:
    """Serve the app's OpenAPI document to everyone; it is encoded only once."""

    @cache
    def document() -> bytes:
        return orjson.dumps(app.openapi())

    async def get_document(_request: Request) -> Response:
        return Response(document(), media_type="application/json")

    app.add_route("/openapi.json", get_document, include_in_schema=False)


def _describe_key(operation: dict[str, Any], scope: str | None, *, is_open: bool) -> None:
    if scope is None:
        operation["security"] = []
        for status in REFUSALS:
            del operation["responses"][status]
        return
    key = {"key": [scope]}
    operation["security"] = [{}, key] if is_open else [key]
    for status, description in REFUSALS.items():
        operation["responses"][status]["description"] = description.format(scope=scope)
