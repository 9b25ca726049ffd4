"""What the framework cannot derive for /openapi.json: bodies that are parsed by hand, and the one shape of errors."""

from typing import Any

from app.errors import ErrorBody


def json_request(schema: dict[str, Any], examples: dict[str, Any]) -> dict[str, Any]:
    """An operation's request body; the examples by name."""
    content = {"schema": schema, "examples": {name: {"value": value} for name, value in examples.items()}}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses of an operation that are errors."""
    return {status: {"model": ErrorBody} for status in statuses}
