"""docker-compose.yml with default values for all variables."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.harness.compose import DEFAULT_OF_VARIABLE, compose_document

COMPOSE = compose_document()["services"]


def filled_in(value: Any) -> Any:
    """The value of the compose file with defaults for all variables."""
    if isinstance(value, str):
        text = re.sub(r"\$\{\w+:\+[^}]*\}\}?", "", value)
        return DEFAULT_OF_VARIABLE.sub(r"\1", text).replace("$$", "$")
    if isinstance(value, list):
        return [filled_in(one) for one in value]
    if isinstance(value, dict):
        return {name: filled_in(one) for name, one in value.items()}
    return value


def seconds_of(duration: str) -> int:
    return int(duration.removesuffix("s"))
