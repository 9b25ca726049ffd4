"""What the framework cannot derive for /openapi.json: bodies parsed by hand, the one shape of errors, and keys."""

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts

from app.access import declared
from app.error_responses import ErrorBody
from app.settings import Settings

BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "A key of `lisarec keys add` with the scope that the call names.",
}
REFUSALS = {
    "401": "There is no key, or none that is valid; the same words for both.",
    "403": "The key is not for this call (`{scope}`), or not for pages of this origin.",
    "429": "The key has used up its requests for now; `Retry-After` says when there will be some again.",
}


def json_request(schema: dict[str, Any], examples: dict[str, Any]) -> dict[str, Any]:
    """An operation's request body; the examples by name."""
    content = {
        "schema": _in_one_piece(schema, {}),
        "examples": {name: {"value": value} for name, value in examples.items()},
    }
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def _in_one_piece(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with its definitions where they are used: a reference to them would lead nowhere in the document."""
    if isinstance(schema, list):
        return [_in_one_piece(one, definitions) for one in schema]
    if not isinstance(schema, dict):
        return schema
    definitions = definitions | schema.get("$defs", {})
    if "$ref" in schema:
        return _in_one_piece(definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
    return {name: _in_one_piece(one, definitions) for name, one in schema.items() if name != "$defs"}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses of an operation that are errors."""
    return {status: {"model": ErrorBody} for status in statuses}


def describe_keys(app: FastAPI, settings: Settings) -> None:
    """Let the app's description say which scope of a key each call needs, and what is answered without it.

    Where there are no keys no call needs one, and nothing is said of them.
    """
    framework = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = framework()
        if settings.keys_file is not None:
            document["components"]["securitySchemes"] = {"key": BEARER}
        for context in iter_route_contexts(app.routes):
            route = context.original_route
            if isinstance(route, APIRoute) and route.include_in_schema:
                (scope,) = declared(route.dependencies)
                if settings.keys_file is None or (scope == "metrics:read" and settings.open_metrics):
                    scope = None
                for method in route.methods or ():
                    operation = document["paths"][route.path][method.lower()]
                    _describe_key(operation, scope)
                    # the framework takes what is declared by hand for JSON too, of which it knows nothing
                    content = operation["responses"].get("200", {}).get("content", {})
                    if content.get("application/json") == {"schema": {}}:
                        del content["application/json"]
        return document

    app.openapi = described  # type: ignore[method-assign]


def _describe_key(operation: dict[str, Any], scope: str | None) -> None:
    operation["security"] = [] if scope is None else [{"key": [scope]}]
    for status, description in REFUSALS.items():
        if scope is None:
            del operation["responses"][status]
        else:
            operation["responses"][status]["description"] = description.format(scope=scope)
