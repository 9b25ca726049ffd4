"""The page of the settings, generated from their fields, with the variables of the containers."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from app.settings import PREFIX, Settings, StoreSettings
from website import container_variables
from website.markdown import code, table, with_code

INTRODUCTION = f"""# Settings

Every setting of the service and of the commands, as an environment variable.
In the tables, "all" means that the service and the commands read a setting.

This page is generated from `app/settings.py` and the files of the containers by `python -m website`.

Options of [the command line](command-line.md) take precedence over the environment, and an empty variable counts as unset.
An unknown variable `{PREFIX}...` is an error at startup, so a misspelt name does not go unnoticed.
Variables that Kubernetes sets for a Service named `lisarec` are ignored, as is its `{PREFIX}PORT=tcp://ADDRESS:PORT`.
The containers around the service read [variables of their own](#{container_variables.HEADING.lower().replace(" ", "-")}).

A place is a path, or a URL such as `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`.
"""
GROUPS = {  # headings, and beginnings of the names below them; the first match counts
    "Redis": ("redis_",),
    "Keys, tenants and access": (
        "keys_file",
        "seal_keys",
        "model_keys",
        "model_signing",
        "tenant",
        "insecure",
        "playground",
        "open_metrics",
    ),
    "Limits": ("max_", "new_users", "state_ttl", "sealed_state"),
    "Timeouts and shutdown": ("head_timeout", "body_timeout", "answer_timeout", "drain", "shutdown"),
    "Logging": ("log_", "slow_request"),
    "Address and processes": ("host", "port", "workers", "device", "tls_"),
    "Models, data and archive": ("",),
}
KINDS = {bool: "`true` or `false`", int: "integer", float: "number", str: "text", Path: "path"}


def page() -> str:
    """Return the page."""
    groups: dict[str, list[str]] = {heading: [] for heading in GROUPS}
    for name in Settings.model_fields:
        groups[_heading(name)].append(name)
    parts = [f"## {heading}\n\n{_table(names)}\n" for heading, names in sorted(groups.items())]
    return "\n".join([INTRODUCTION, *parts, container_variables.section()])


def _heading(name: str) -> str:
    return next(heading for heading, beginnings in GROUPS.items() if name.startswith(beginnings))


def _table(names: list[str]) -> str:
    return table(["variable", "type", "default", "read by", "meaning"], map(_row, names))


def _row(name: str) -> list[str]:
    field = Settings.model_fields[name]
    readers = "all" if name in StoreSettings.model_fields else "service"
    return [code(PREFIX + name.upper()), _type(field), _default(field), readers, with_code(field.description or "")]


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
