"""The page of the settings, made from their fields."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from app.settings import PREFIX, Settings, StoreSettings
from website.markdown import code, table, with_code

INTRODUCTION = f"""# Settings

Every setting of the service and of the commands, as an environment variable.
This page is made from the fields in `app/settings.py` by `python -m website`.

Options of [the command line](command-line.md) take precedence over the environment, and an empty variable counts as not set.
A variable `{PREFIX}...` that no program reads is refused at the start, so that a misspelt limit does not go unnoticed.
Variables that Kubernetes sets for a Service named `lisarec` are ignored, as is its `{PREFIX}PORT=tcp://ADDRESS:PORT`.
[Docker Compose](../how-to/deploy/docker-compose.md) lists the variables that only `docker-compose.yml` reads.

A place is a path, or a URL such as `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`.
"""
STORE = """## Store, models and logs

The service and all commands read these.
"""
SERVICE = """## Service

Only the service reads these.
"""
KINDS = {bool: "`true` or `false`", int: "integer", float: "number", str: "text", Path: "path"}


def page() -> str:
    """Return the page."""
    own = [name for name in Settings.model_fields if name not in StoreSettings.model_fields]
    return "\n".join([INTRODUCTION, STORE, _table([*StoreSettings.model_fields]), "", SERVICE, _table(own), ""])


def _table(names: list[str]) -> str:
    return table(["variable", "type", "default", "meaning"], map(_row, names))


def _row(name: str) -> list[str]:
    field = Settings.model_fields[name]
    return [code(PREFIX + name.upper()), _type(field), _default(field), with_code(field.description or "")]


def _type(field: FieldInfo) -> str:
    bounds = [bound for part in field.metadata if (bound := _bound(part))]
    return ", ".join([_kind(field.annotation), *bounds])


def _kind(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(map(code, get_args(annotation)))
    if origin is dict:
        return "JSON object"
    if origin in (Union, types.UnionType):
        kinds = [one for one in get_args(annotation) if one is not type(None)]
        return _kind(kinds[0]) if len(kinds) == 1 else "place"
    if hasattr(annotation, "__metadata__"):
        return _kind(get_args(annotation)[0])
    return KINDS[annotation]


def _bound(part: Any) -> str | None:
    match part:
        case annotated_types.Ge(least):
            return f"at least {least:,}"
        case annotated_types.Gt(least):
            return f"above {least:,}"
        case annotated_types.Le(most):
            return f"at most {most:,.0f}"
    return None


def _default(field: FieldInfo) -> str:
    default = field.default
    if default is None:
        return "none"
    if isinstance(default, bool | dict):
        return code(json.dumps(default))
    return code(f"{default:.0f}" if isinstance(default, float) and default.is_integer() else str(default))
