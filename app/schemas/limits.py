"""Settings of a list that use properties: the maximum number of items with the same text, and the objective."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from app.schemas.fields import IDENTIFIER, MAX_K, checked_by, is_number, matches_identifier

MAX_LIMITS = 4  # properties


class Objective(BaseModel, frozen=True):
    """A numeric property that weighs scores. The odds of an item are multiplied by it to the power of `strength`."""

    property: str
    strength: float = 1.0


def _max_per(value: object) -> dict[str, int]:
    """Return the limit of each property. An error echoes none of them."""
    if isinstance(value, list) and len({str(one).partition(":")[0] for one in value}) == len(value):
        value = dict(map(_limit_of_text, value))
    if not isinstance(value, dict) or len(value) > MAX_LIMITS or not all(map(_is_limit, value.items())):
        raise PydanticCustomError(
            "no_limit",
            "must have at most {most} properties, each with a whole number from 1 to {k}",
            {"most": MAX_LIMITS, "k": MAX_K},
        )
    return {name: int(most) for name, most in value.items()}


def _objective(value: object) -> Objective:
    """Return the objective in an object or a text. An error echoes none of it."""
    if isinstance(value, Objective):
        return value
    if isinstance(value, str) and (found := _match_objective(value)) is not None:
        return Objective(property=found[1], strength=float(found[2] or 1.0))
    if isinstance(value, dict) and value.keys() <= {"property", "strength"}:
        name, strength = value.get("property"), value.get("strength", 1.0)
        is_strength = is_number(strength) and 0 <= strength <= 1  # NaN is neither
        if isinstance(name, str) and matches_identifier(name) is not None and is_strength:
            return Objective(property=name, strength=float(strength))
    raise PydanticCustomError(
        "no_objective",
        "must be an item property with a strength from 0 to 1: {example}",
        {"example": '{"property": "margin", "strength": 0.5}, or as a text margin:0.5'},
    )


def _limit_of_text(text: object) -> tuple[str, int]:
    name, _, most = str(text).partition(":")
    return name, int(most) if most.isascii() and most.isdigit() and len(most) <= len(str(MAX_K)) else 0


def _is_limit(limit: tuple[object, object]) -> bool:
    name, most = limit
    return (
        isinstance(name, str)
        and matches_identifier(name) is not None
        and is_number(most)
        and 1 <= most <= MAX_K
        and most == int(most)
    )


_LIMIT_SCHEMA = {"type": "string", "pattern": f"^{IDENTIFIER}:[0-9]{{1,{len(str(MAX_K))}}}$"}
MaxPer = Annotated[
    dict[str, int],
    PlainValidator(_max_per),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": f"^{IDENTIFIER}$"},
                    "additionalProperties": {"type": "integer", "minimum": 1, "maximum": MAX_K},
                    "maxProperties": MAX_LIMITS,
                },
                {"type": "array", "items": _LIMIT_SCHEMA, "maxItems": MAX_LIMITS},
            ]
        }
    ),
]
MaxPerTexts = Annotated[
    list[str],
    checked_by(_max_per),
    WithJsonSchema({"type": "array", "items": _LIMIT_SCHEMA, "maxItems": MAX_LIMITS}),
]
_OBJECTIVE_PATTERN = f"({IDENTIFIER})(?::(0(?:\\.[0-9]{{1,9}})?|1(?:\\.0{{1,9}})?))?"
_match_objective = re.compile(_OBJECTIVE_PATTERN).fullmatch
_OBJECTIVE_TEXT_SCHEMA = {"type": "string", "pattern": f"^{_OBJECTIVE_PATTERN}$"}
ObjectiveOrText = Annotated[
    Objective,
    PlainValidator(_objective),
    PlainSerializer(lambda objective: objective.model_dump(), return_type=dict[str, Any]),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "property": {"type": "string", "pattern": f"^{IDENTIFIER}$"},
                        "strength": {"type": "number", "minimum": 0, "maximum": 1, "default": 1},
                    },
                    "required": ["property"],
                    "additionalProperties": False,
                },
                _OBJECTIVE_TEXT_SCHEMA,
            ]
        }
    ),
]
ObjectiveText = Annotated[str, checked_by(_objective), WithJsonSchema(_OBJECTIVE_TEXT_SCHEMA)]
