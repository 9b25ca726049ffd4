"""Rules that leave items out of a list because of the user's own events: types of events, and for how long."""

import re
from collections.abc import Iterable, Sequence
from math import inf
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from app.schemas.fields import Name

MAX_TYPES = 20
UNITS_S = {"m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_PATTERN = f"[1-9][0-9]{{0,4}}[{''.join(UNITS_S)}]"
_matches = re.compile(_PATTERN).fullmatch


class EventRule(NamedTuple):
    """Types of events that leave their items out; `within` is a text such as 90d, or None for no time limit."""

    types: Sequence[str]
    within: str | None


def longest_within_s(rules: Iterable[EventRule]) -> dict[str, float]:
    """Return how many seconds an event of each type leaves its item out, so that all rules hold."""
    longest: dict[str, float] = {}
    for types, within in rules:
        within_s = inf if within is None else int(within[:-1]) * UNITS_S[within[-1]]
        longest |= {name: max(within_s, longest.get(name, 0.0)) for name in types}
    return longest


def _within(text: str) -> str:
    if _matches(text) is None:
        raise PydanticCustomError("no_duration", "must be a whole number followed by m, h, d or w, such as 90d or 12h")
    return text


def _split(value: object) -> object:
    """Return the types in the texts of a query string, each of which may list several, separated by commas."""
    return [name for text in value for name in str(text).split(",")] if isinstance(value, list) else value


EventTypes = Annotated[list[Name], Field(max_length=MAX_TYPES, fail_fast=True)]
EventTypesText = Annotated[EventTypes, BeforeValidator(_split)]
Within = Annotated[str, AfterValidator(_within), WithJsonSchema({"type": "string", "pattern": f"^{_PATTERN}$"})]
