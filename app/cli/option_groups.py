"""Groups of options: a command's parameter that is a dataclass becomes one option per field."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import typer

from storage.folders.place import SCHEMES

URL_STARTS = {f"{scheme}:" for scheme in SCHEMES}  # of a URL that was taken for a path


def ungrouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command for Typer, with the fields of each group as its parameters.

    A bucket's URL for an option that takes a path is refused; else the command would make a folder named ``s3:``.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    groups = {
        name: inspect.signature(kind, eval_str=True).parameters
        for name, parameter in parameters.items()
        if isinstance(kind := parameter.annotation, type) and is_dataclass(kind)
    }

    @wraps(command)
    def run(**given: Any) -> None:
        for value in given.values():
            for path in value if isinstance(value, list) else [value]:
                if isinstance(path, Path) and path.parts[:1] and path.parts[0] in URL_STARTS:
                    raise typer.BadParameter(f"'{path.parts[0]}//…' is a bucket's URL; pass a path on this machine")
        made = {name: parameters[name].annotation(**_pick(given, fields)) for name, fields in groups.items()}
        command(**{**_pick(given, parameters), **made})

    options = [option for name in parameters for option in groups.get(name, {name: parameters[name]}).values()]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
    )
    return run


def _pick(given: Mapping[str, Any], names: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}
