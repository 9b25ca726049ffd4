"""Properties of items and users: names, types and values in requests and answers."""

import json
import re
import unicodedata
from collections.abc import Container, Mapping, MutableMapping
from datetime import datetime, timedelta
from itertools import chain, count
from math import isfinite
from typing import Annotated, Any, get_args

from pydantic import BaseModel, Field, PlainValidator, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from app.schemas.fields import IDENTIFIER, Closed, matches_identifier, rfc_3339_us, with_example
from model.content.folding import fold
from storage.records import EPOCH, ITEM_TIMES, MAX_PROPERTIES, PropertyType, PropertyValue, property_type

MAX_VALUE_BYTES = 1_024  # UTF-8, of the texts of a set together
MAX_SHOWN_CHARS = 40  # of a value in a message
NO_NAMES = frozenset({"item_id", "title", "categories", "available", *ITEM_TIMES, "user_id"})
"""Names of built-in fields of items or users, which properties cannot have."""
RESERVED_WORDS = frozenset(
    re.findall(
        r"\w+",
        "as break const continue else false for function if import in let loop namespace null package return true var"
        " void while",
    )
)
"""Reserved words of expressions, which cannot be names in them."""

MAX_SIMILAR_CHARS = 32  # of a name that is suggested, before its number

NAME_RULE = (
    "a property's name may have only English letters, digits and _, and at most 64 of them; it must not begin with a "
    f"digit, and must not be a reserved word of expressions (such as `in`) or one of {', '.join(sorted(NO_NAMES))}"
)

TypesSoFar = MutableMapping[str, PropertyType]
"""The known types. Validation adds the types of first values."""


def is_property_name(name: str) -> bool:
    """Return whether a property may have this name."""
    return matches_identifier(name) is not None and name not in NO_NAMES and name not in RESERVED_WORDS


def similar_property_name(name: str, taken: Container[str]) -> str:
    """Return a valid name like this one, such as groesse_cm for "Größe (cm)", which is not taken."""
    plain = unicodedata.normalize("NFKD", fold(name)).encode("ascii", "ignore").decode()
    similar = re.sub(r"\W+", "_", plain).strip("_")[:MAX_SIMILAR_CHARS]
    valid = similar if is_property_name(similar) else f"_{similar}"
    return next(one for one in chain([valid], (f"{valid}_{number}" for number in count(2))) if one not in taken)


def shown(value: PropertyValue) -> Any:
    """Return the value in JSON."""
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    return list(value) if isinstance(value, tuple) else value


def shown_of_item(properties: Mapping[str, PropertyValue | None]) -> dict[str, Any]:
    """Return the fields of an `Item` that show its properties."""
    values = {name: shown(value) for name, value in properties.items() if value is not None}
    times = {name: values.pop(name) for name in ITEM_TIMES if name in values}
    return {"properties": values, **times}


def refusal(name: str, given: str, value: Any, held: str | None) -> str:
    """Return why a value is refused: its property is of another type, or there are too many."""
    if held is None:
        return f"{name} exceeds the maximum of {MAX_PROPERTIES} properties"
    return f"{name} is a {held}, and {_clipped(value)} is a {given}"


def _clipped(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()
    except RecursionError:
        return "a value of many levels"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def _time(value: object) -> datetime:
    if not isinstance(value, str):
        raise PydanticCustomError("not_a_time", "is not an RFC 3339 time such as 2026-05-01T08:00:00Z")
    try:
        return EPOCH + timedelta(microseconds=rfc_3339_us(value))
    except OverflowError:
        raise PydanticCustomError("not_a_time", "is a time before the year 1 or after the year 9999") from None


def _properties(values: object, info: ValidationInfo) -> dict[str, PropertyValue | None]:
    """Return the values in the types of their properties: the context's ``types``, else those of first values."""
    if not isinstance(values, dict) or len(values) > MAX_PROPERTIES:
        raise PydanticCustomError("no_properties", f"is not an object of at most {MAX_PROPERTIES} names and values")
    if not all(map(is_property_name, values)):
        raise PydanticCustomError("no_name", f"has an invalid name: {NAME_RULE}")
    assert info.context is not None
    types: TypesSoFar = info.context["types"]
    return {name: None if value is None else _value(name, value, types) for name, value in values.items()}


def _value(name: str, given: object, types: TypesSoFar) -> PropertyValue:
    held = types.get(name)
    try:
        value = _typed(given, held)
    except PydanticCustomError as fault:
        raise _fault(f"{name} {fault.message()}, but is {_clipped(given)}") from None
    if (found := property_type(value)) != types.setdefault(name, found):
        raise _fault(refusal(name, found, given, held))
    return value


def _fault(reason: str) -> PydanticCustomError:
    return PydanticCustomError("wrong_property", "{reason}", {"reason": reason})


def _typed(given: object, held: PropertyType | None) -> PropertyValue:
    if isinstance(given, bool):
        return given
    if isinstance(given, int | float):
        return _number(given)
    if isinstance(given, str):
        if held == "time" or (held is None and _is_time(given)):
            return _time(given)
        return _text(given)
    if isinstance(given, list) and all(isinstance(one, str) for one in given):
        texts = tuple(sorted(set(given)))
        _text("".join(texts))
        return texts
    raise PydanticCustomError("no_value", "must be a text, a number, true or false, an array of texts, or null")


def _is_time(text: str) -> bool:
    try:
        _time(text)
    except PydanticCustomError:
        return False
    return True


def _number(given: float) -> float:
    try:
        number = float(given)
    except OverflowError:
        number = float("inf")
    if not isfinite(number):
        raise PydanticCustomError("no_number", "must be a number up to 1.8e308")
    return number


def _text(text: str) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise PydanticCustomError("no_text", "must be text without unpaired surrogates") from None
    if size > MAX_VALUE_BYTES:
        raise PydanticCustomError("too_long", f"must have at most {MAX_VALUE_BYTES:,} bytes of text")
    return text


def _types(types: object) -> dict[str, PropertyType | None]:
    if not isinstance(types, dict) or len(types) > MAX_PROPERTIES:
        raise PydanticCustomError("no_types", f"is not an object of at most {MAX_PROPERTIES} names and types")
    if not all(map(is_property_name, types)):
        raise PydanticCustomError("no_name", f"has an invalid name: {NAME_RULE}")
    if not all(one is None or (isinstance(one, str) and one in TYPES) for one in types.values()):
        raise PydanticCustomError("no_type", f"must have one of the types {', '.join(TYPES)}, or null")
    return types


TYPES: tuple[PropertyType, ...] = get_args(PropertyType)
_NAMES = {"pattern": f"^(?!({'|'.join(sorted(NO_NAMES | RESERVED_WORDS))})$){IDENTIFIER}$"}
_TEXT = {"type": "string", "maxLength": MAX_VALUE_BYTES}
Properties = Annotated[
    dict[str, Any],
    PlainValidator(_properties),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": _NAMES,
            "additionalProperties": {
                "anyOf": [
                    _TEXT,
                    {"type": "number"},
                    {"type": "boolean"},
                    {"type": "array", "items": _TEXT},
                    {"type": "null"},
                ]
            },
            "maxProperties": MAX_PROPERTIES,
            "description": "Values by name; `null` removes a property. A property has its declared type, or the type of"
            " its first value: text, number, boolean, set (an array of texts) or time (RFC 3339 with a time zone). A"
            f" text, or all texts of a set together, have at most {MAX_VALUE_BYTES:,} bytes. There are at most"
            f" {MAX_PROPERTIES} properties.",
        }
    ),
]
PropertyTime = Annotated[datetime, PlainValidator(_time), WithJsonSchema({"type": "string", "format": "date-time"})]
TypesByName = Annotated[
    dict[str, PropertyType | None],
    PlainValidator(_types),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": _NAMES,
            "additionalProperties": {"anyOf": [{"type": "string", "enum": TYPES}, {"type": "null"}]},
            "maxProperties": MAX_PROPERTIES,
        }
    ),
]

EXAMPLES = with_example({"items": {"price": "number"}, "users": {"member": "boolean"}})


class DeclaredTypes(Closed):
    """Types of properties to declare.

    `null` removes a property and all its values. Properties that are left out do not change.
    """

    model_config = EXAMPLES

    items: TypesByName = Field(default_factory=dict)
    users: TypesByName = Field(default_factory=dict)


class HeldTypes(BaseModel):
    """The types of all properties. A type never changes, but a property can be removed."""

    model_config = EXAMPLES

    items: dict[str, PropertyType] = Field(
        description="Properties besides the fields that all items have, such as `title` and `categories`."
    )
    users: dict[str, PropertyType]


class PostedUserProperties(Closed):
    """Properties of a user to set. Properties that are left out keep their values."""

    model_config = with_example({"properties": {"member": True, "region": None}})

    properties: Properties


class UserProperties(BaseModel):
    """All properties of a user, or of the user that this one was merged into."""

    model_config = with_example({"user_id": "ada", "properties": {"member": True}})

    user_id: str
    properties: dict[str, Any] = Field(description="The properties by name. Empty for a user for whom none were set.")
