"""Groups of options: a command's parameter that is a dataclass becomes one option per field."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import wraps
from typing import Any


def ungrouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command for Typer, with the fields of each group as its parameters."""
    parameters = inspect.signature(command, eval_str=True).parameters
    groups = {
        name: inspect.signature(kind, eval_str=True).parameters
        for name, parameter in parameters.items()
        if isinstance(kind := parameter.annotation, type) and is_dataclass(kind)
    }

    @wraps(command)
    def run(**given: Any) -> None:
        made = {name: parameters[name].annotation(**_pick(given, fields)) for name, fields in groups.items()}
        command(**{**_pick(given, parameters), **made})

    options = [option for name in parameters for option in groups.get(name, {name: parameters[name]}).values()]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
    )
    return run


def _pick(given: Mapping[str, Any], names: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}
