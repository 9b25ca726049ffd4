"""Limits of a list: how many items with the same text in a property it may have."""

from typing import Annotated

from pydantic import AfterValidator, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from app.schemas.fields import MAX_K
from app.schemas.properties import NAME_PATTERN, matches_name

MAX_LIMITS = 4  # properties


def _max_per(value: object) -> dict[str, int]:
    """Return the limit of each property. A refusal echoes none of them."""
    if isinstance(value, list) and len({str(one).partition(":")[0] for one in value}) == len(value):
        value = dict(map(_limit_of_text, value))
    if not isinstance(value, dict) or len(value) > MAX_LIMITS or not all(map(_is_limit, value.items())):
        raise PydanticCustomError(
            "no_limit",
            "takes at most {most} properties, each with a whole number from 1 to {k}",
            {"most": MAX_LIMITS, "k": MAX_K},
        )
    return {name: int(most) for name, most in value.items()}


def _max_per_texts(texts: list[str]) -> list[str]:
    _max_per(texts)
    return texts


def _limit_of_text(text: object) -> tuple[str, int]:
    name, _, most = str(text).partition(":")
    return name, int(most) if most.isascii() and most.isdigit() and len(most) <= len(str(MAX_K)) else 0


def _is_limit(limit: tuple[object, object]) -> bool:
    name, most = limit
    return (
        isinstance(name, str)
        and matches_name(name) is not None
        and isinstance(most, int | float)
        and not isinstance(most, bool)
        and 1 <= most <= MAX_K
        and most == int(most)
    )


_LIMIT_SCHEMA = {"type": "string", "pattern": f"^{NAME_PATTERN}:[0-9]{{1,{len(str(MAX_K))}}}$"}
MaxPer = Annotated[
    dict[str, int],
    PlainValidator(_max_per),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "patternProperties": {f"^{NAME_PATTERN}$": {"type": "integer", "minimum": 1, "maximum": MAX_K}},
                    "additionalProperties": False,
                    "maxProperties": MAX_LIMITS,
                },
                {"type": "array", "items": _LIMIT_SCHEMA, "maxItems": MAX_LIMITS},
            ]
        }
    ),
]
MaxPerTexts = Annotated[
    list[str],
    AfterValidator(_max_per_texts),
    WithJsonSchema({"type": "array", "items": _LIMIT_SCHEMA, "maxItems": MAX_LIMITS}),
]
