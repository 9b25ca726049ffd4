"""Parts of /openapi.json that the framework cannot derive: bodies parsed by hand, error responses, and keys."""

from functools import cache
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from app.http.access import declared_scopes
from app.http.error_responses import ErrorBody
from app.settings import Settings

BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "A key of `lisarec keys add` with the scope that the call names.",
}
REFUSALS = {
    "401": "There is no key, or none that is valid; the same words for both.",
    "403": "The key is not for this call (`{scope}`), or not for pages of this origin.",
    "429": "The key has used up its requests, or its new users, for now; `Retry-After` says when there will be some.",
}


def json_request(schema: dict[str, Any], examples: dict[str, Any]) -> dict[str, Any]:
    """Return the description of an operation's JSON body, with named examples."""
    content = {
        "schema": _inlined(schema, {}),
        "examples": {name: {"value": value} for name, value in examples.items()},
    }
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return the schema with its definitions inlined, since a reference to them would lead nowhere in the document."""
    if isinstance(schema, list):
        return [_inlined(one, definitions) for one in schema]
    if not isinstance(schema, dict):
        return schema
    definitions = definitions | schema.get("$defs", {})
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
    return {name: _inlined(one, definitions) for name, one in schema.items() if name != "$defs"}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the descriptions of an operation's error responses."""
    return {status: {"model": ErrorBody} for status in statuses}


def describe_keys(app: FastAPI, settings: Settings) -> None:
    """Add to the app's document which scope each operation needs, and the responses to a request without it.

    The document of a service without keys does not mention them.
    """
    framework = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = framework()
        if settings.keys_file is not None:
            document["components"]["securitySchemes"] = {"key": BEARER}
        for route in app.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                (scope,) = declared_scopes(route.dependencies)
                if settings.keys_file is None or (scope == "metrics:read" and settings.open_metrics):
                    scope = None
                for method in route.methods or ():
                    operation = document["paths"][route.path][method.lower()]
                    _describe_key(operation, scope)
                    # the framework adds an empty JSON response to those that are declared by hand
                    content = operation["responses"].get("200", {}).get("content", {})
                    if content.get("application/json") == {"schema": {}}:
                        del content["application/json"]
        return document

    app.openapi = described  # type: ignore[method-assign]


def add_document(app: FastAPI) -> None:
    """Serve the app's document to everybody, written once."""

    @cache
    def document() -> bytes:
        return orjson.dumps(app.openapi())

    async def get_document(_request: Request) -> Response:
        return Response(document(), media_type="application/json")

    app.add_route("/openapi.json", get_document, include_in_schema=False)


def _describe_key(operation: dict[str, Any], scope: str | None) -> None:
    operation["security"] = [] if scope is None else [{"key": [scope]}]
    for status, description in REFUSALS.items():
        if scope is None:
            del operation["responses"][status]
        else:
            operation["responses"][status]["description"] = description.format(scope=scope)
