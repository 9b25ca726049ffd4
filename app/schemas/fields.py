"""Field types of requests: each validates raw JSON or a query string, with errors in plain words."""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from model.config import ID_PATTERN, ID_RULE, NAME_PATTERN
from storage.records import EPOCH

MAX_ITEM_IDS = 10_000
MAX_ID_CHARS = 128
MAX_K = 1_000
MAX_BASKET = 50
MAX_ROTATION_DAYS = 365
MAX_CATEGORY_CHARS = 256
MAX_CATEGORIES = 100  # in `categories_all`
MAX_BOOSTS = 20  # categories
MAX_BOOST = 20.0  # in either direction: multiplying the odds by e to the power of 20 is more than enough
MAX_EXPRESSION_CHARS = 2_000
MAX_BOOST_EXPRESSIONS = 8
MAX_PARAMS = 32
MAX_PARAM_TEXTS = 100  # or numbers, in a list
MAX_PARAM_CHARS, MAX_PARAMS_CHARS = 1_024, 10_000  # of one text, and of all together
ENCODED_SLASH = "\x1f"  # an encoded slash of a path; app/http/middleware/request_path.py decodes the rest
MAX_COMPARED = 32  # letters of an unknown name; longer ones get no suggestion
MAX_AHEAD_US = 5 * 60 * 1_000_000  # a client's clock may be this far ahead of ours

Param: TypeAlias = "bool | float | str | tuple[str, ...] | tuple[float, ...]"
"""A parameter of expressions."""

ParamType = Literal["text", "number", "boolean", "set", "numbers"]
"""The type of a parameter: a set is a list of texts."""

IDENTIFIER = "[A-Za-z_][A-Za-z0-9_]{0,63}"  # a name in expressions, of a property or a parameter
matches_identifier = re.compile(IDENTIFIER).fullmatch
_RFC_3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?([Zz]|[+-][0-9]{2}:[0-9]{2})?"
)


def is_id(value: object) -> TypeGuard[str]:
    """Return whether the value is a valid `Id`. Most ids are printable, and need no regular expression."""
    return (
        type(value) is str
        and 0 < len(value) <= MAX_ID_CHARS
        and (value.isprintable() or _matches_id(value) is not None)
        and value not in (".", "..")
    )


def is_name(value: object) -> TypeGuard[str]:
    """Return whether the value is a valid `Name`."""
    return type(value) is str and _matches_name(value) is not None and value not in (".", "..")


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether the value is a number of JSON, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def checked_by(parse: Callable[[Any], object]) -> AfterValidator:
    """Return a validator for texts of a query string, which it keeps as they are; it raises as the parser does."""

    def checked(text: Any) -> Any:
        parse(text)
        return text

    return AfterValidator(checked)


def _id(value: str) -> str:
    if not is_id(value):
        raise PydanticCustomError("no_id", "must be " + ID_RULE)
    return value


def _id_or_empty(value: str) -> str:
    return value and _id(value)


def _no_path_step(value: str) -> str:
    if value in (".", ".."):
        raise PydanticCustomError("path_step", "'.' and '..' are not names")
    return value


def are_ids(values: Sequence[str]) -> bool:
    """Return whether every value is an `Id`. One match of all of them together is faster than one match each."""
    return not values or (_match_ids("\n".join(values)) is not None and {".", ".."}.isdisjoint(values))


def rfc_3339_us(text: str) -> int:
    """Return the microseconds since the epoch of an RFC 3339 time; raise PydanticCustomError."""
    match = _RFC_3339.fullmatch(text)
    if match is None:
        raise PydanticCustomError("not_a_time", "is neither an RFC 3339 time nor a number of Unix seconds")
    if match[2] is None:
        raise PydanticCustomError("no_zone", "has no time zone; end it with Z or an offset such as +01:00")
    try:
        return (datetime.fromisoformat(text.upper()) - EPOCH) // timedelta(microseconds=1)
    except ValueError:
        raise PydanticCustomError("not_a_time", "names a date or time that does not exist") from None


def plain_digits(value: object) -> object:
    """Accept only plain digits in a query string, not 1_0, +5 or 5.0. In JSON, 5.0 is 5."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and not (value.isascii() and value.isdigit()):
        raise PydanticCustomError("not_digits", "is not a whole number in plain digits")
    return value


def _plain_flag(value: object) -> object:
    """Accept only true and false in a query string, not 1, yes or on."""
    if isinstance(value, str) and value not in ("true", "false"):
        raise PydanticCustomError("not_a_flag", "is neither true nor false")
    return value


def _plain_number(value: object) -> object:
    """Accept only the numbers of JSON in a query string, not inf, 1_0 or +.5."""
    if isinstance(value, str) and not _PLAIN_NUMBER.fullmatch(value):
        raise PydanticCustomError("not_plain", "is not a plain number such as 0.5")
    return value


def _boost(value: object) -> dict[str, float] | tuple[str, ...]:
    """Return the score boost of each category, or expressions. An error names none, so it does not echo the request."""
    if isinstance(value, str | list | tuple):
        return _expressions(value)
    if not isinstance(value, dict) or len(value) > MAX_BOOSTS or not all(map(_is_boost, value.items())):
        raise PydanticCustomError(
            "no_boost",
            "must be an expression, a list of them, or up to {categories} categories, each with a number from -{most} "
            "to {most}",
            {"categories": MAX_BOOSTS, "most": int(MAX_BOOST)},
        )
    return {category: float(gain) for category, gain in value.items()}


def _expressions(value: str | Sequence[object]) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if len(texts) <= MAX_BOOST_EXPRESSIONS:
        expressions = tuple(one for one in texts if isinstance(one, str) and 1 <= len(one) <= MAX_EXPRESSION_CHARS)
        if len(expressions) == len(texts):
            return expressions
    raise PydanticCustomError(
        "no_boost",
        "must have at most {expressions} expressions, each a text of 1 to {characters} characters",
        {"expressions": MAX_BOOST_EXPRESSIONS, "characters": MAX_EXPRESSION_CHARS},
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raises ValueError if it has a name twice."""
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name appears twice")
    return dict(pairs)


def parse_params(value: object) -> dict[str, Param]:
    """Return the parameters of expressions, which a query string has as JSON. An error echoes none of them."""
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=_unique)
        except (ValueError, RecursionError):
            raise PydanticCustomError("not_json", 'is not a JSON object such as {"max_price": 50}') from None
    if not isinstance(value, dict) or len(value) > MAX_PARAMS or not all(map(matches_identifier, value)):
        raise PydanticCustomError(
            "no_params", "must have at most {most} values, named by letters, digits and _", {"most": MAX_PARAMS}
        )
    params = {name: _param(one) for name, one in value.items()}
    if sum(map(_param_size, params.values())) > MAX_PARAMS_CHARS:
        raise PydanticCustomError(
            "large_params", "has texts with more than {most} characters in total", {"most": MAX_PARAMS_CHARS}
        )
    return params


def _param(value: object) -> Param:
    if isinstance(value, bool) or _is_param_text(value):
        return value
    if _is_param_number(value):
        return float(value)
    if isinstance(value, list) and len(value) <= MAX_PARAM_TEXTS:
        if all(map(_is_param_text, value)):
            return tuple(value)
        if all(map(_is_param_number, value)):
            return tuple(map(float, value))
    raise PydanticCustomError(
        "no_param",
        "must be numbers, booleans, texts of at most {characters} characters, or lists of at most {most} numbers or "
        "texts",
        {"characters": MAX_PARAM_CHARS, "most": MAX_PARAM_TEXTS},
    )


def param_type(param: Param) -> ParamType:
    """Return the type of a parameter. An empty list is one of texts."""
    match param:
        case bool():
            return "boolean"
        case str():
            return "text"
        case tuple():
            return "numbers" if isinstance(next(iter(param), None), float) else "set"
    return "number"


def _param_size(param: Param) -> int:
    return sum(map(_param_size, param)) if isinstance(param, tuple) else len(param) if isinstance(param, str) else 0


def _is_param_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= MAX_PARAM_CHARS and _is_unicode(value)


def _is_unicode(text: str) -> bool:
    # not with half of a surrogate pair, which JSON can name and UTF-8 cannot encode
    return _find_half_of_pair(text) is None


def _is_param_number(value: object) -> TypeGuard[int | float]:
    # also refuses NaN, and whole numbers beyond those of floating point
    return is_number(value) and abs(value) <= sys.float_info.max


def _is_boost(boost: tuple[object, object]) -> bool:
    category, gain = boost
    return (
        isinstance(category, str)
        and 1 <= len(category) <= MAX_CATEGORY_CHARS
        and _is_unicode(category)
        and is_number(gain)
        and abs(gain) <= MAX_BOOST  # so that NaN is refused too
    )


_PLAIN_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
DOCUMENTED_NAME = rf"^(?!\.{{1,2}}$){NAME_PATTERN}$"
_ID_OR_EMPTY = {  # generated clients check patterns, and those in PHP and Ruby know only ASCII characters there
    "type": "string",
    "maxLength": MAX_ID_CHARS,
    "pattern": r"^(?!\.{1,2}$)[^\x00-\x1f\x7f]*$",
    "not": {"pattern": r"[\x80-\x9f]"},
}
_find_half_of_pair = re.compile(r"[\ud800-\udfff]").search
_matches_id = re.compile(ID_PATTERN).fullmatch
_matches_name = re.compile(NAME_PATTERN).fullmatch
_match_ids = re.compile(rf"{ID_PATTERN}(\n{ID_PATTERN})*+").fullmatch
Id = Annotated[str, AfterValidator(_id), WithJsonSchema({**_ID_OR_EMPTY, "minLength": 1})]
IdOrEmpty = Annotated[str, AfterValidator(_id_or_empty), WithJsonSchema(_ID_OR_EMPTY)]
Name = Annotated[
    str,
    StringConstraints(pattern=f"^{NAME_PATTERN}$"),
    AfterValidator(_no_path_step),
    WithJsonSchema({"type": "string", "pattern": DOCUMENTED_NAME}),
]
# fail_fast: one bad id is enough; a list of a million could otherwise collect a million errors
ItemIds = Annotated[list[Id], Field(max_length=MAX_ITEM_IDS, fail_fast=True)]
Basket = Annotated[
    list[Id], Field(max_length=MAX_BASKET, fail_fast=True), AfterValidator(lambda ids: list(dict.fromkeys(ids)))
]
Category = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CATEGORY_CHARS)]
Categories = Annotated[list[Category], Field(max_length=MAX_K, fail_fast=True)]
FewCategories = Annotated[list[Category], Field(max_length=MAX_CATEGORIES, fail_fast=True)]
ResultCount = Annotated[int, Field(ge=1, le=MAX_K), BeforeValidator(plain_digits)]
_EXPRESSION_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_EXPRESSION_CHARS}
Expression = Annotated[str, StringConstraints(min_length=1, max_length=MAX_EXPRESSION_CHARS)]
Expressions = Annotated[list[Expression], Field(max_length=MAX_BOOST_EXPRESSIONS, fail_fast=True)]
Boost = Annotated[
    dict[str, float] | tuple[str, ...],
    PlainValidator(_boost),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "additionalProperties": {"type": "number", "minimum": -MAX_BOOST, "maximum": MAX_BOOST},
                    "maxProperties": MAX_BOOSTS,
                },
                _EXPRESSION_SCHEMA,
                {"type": "array", "items": _EXPRESSION_SCHEMA, "maxItems": MAX_BOOST_EXPRESSIONS},
            ]
        }
    ),
]
ParamsText = Annotated[str, checked_by(parse_params)]
Params = Annotated[
    dict[str, Param],
    PlainValidator(parse_params),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^{IDENTIFIER}$"},
            "additionalProperties": {
                "anyOf": [
                    {"type": "number"},
                    {"type": "boolean"},
                    {"type": "string", "maxLength": MAX_PARAM_CHARS},
                    {"type": "array", "items": {"type": "number"}, "maxItems": MAX_PARAM_TEXTS},
                    {
                        "type": "array",
                        "items": {"type": "string", "maxLength": MAX_PARAM_CHARS},
                        "maxItems": MAX_PARAM_TEXTS,
                    },
                ]
            },
            "maxProperties": MAX_PARAMS,
        }
    ),
]
Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(_plain_number)]
RotationDays = Annotated[float, Field(gt=0, le=MAX_ROTATION_DAYS), BeforeValidator(_plain_number)]
Flag = Annotated[bool, BeforeValidator(_plain_flag)]


class Closed(BaseModel):
    """A request model that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    hints: ClassVar[Mapping[str, str]] = {}  # what to do instead, by unknown field

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, data: Any) -> Any:
        # Pydantic's own messages would name the class, or echo every unknown field, however many there are.
        if not isinstance(data, Mapping):
            if not isinstance(data, cls):
                raise PydanticCustomError("not_an_object", "is not a JSON object")
        elif not _field_names(cls).issuperset(data):
            names = sorted(_field_names(cls))
            unknown = next(name for name in data if name not in names)
            raise PydanticCustomError(
                "unknown_field",
                "has an unknown field{meant}; known fields: {known}",
                {"meant": cls.hints.get(unknown) or _meant(unknown, names), "known": ", ".join(names)},
            )
        return data


class LogPageQuery(Closed):
    """Parameters of a page of a log."""

    after: Annotated[int, Field(ge=0, le=2**53), BeforeValidator(plain_digits)] = Field(
        0, description="`next` of the previous page."
    )
    limit: ResultCount = Field(100, description="The number of entries of a page, by default 100.")


def with_example(example: dict[str, Any]) -> ConfigDict:
    """Return the configuration of a model that has this example in /openapi.json."""
    return ConfigDict(json_schema_extra={"examples": [example]})


def _meant(unknown: str, names: Sequence[str]) -> str:
    """Return a suggestion of similar names, if any. Few names are compared: a body may have 1,000 unknown ones."""
    like = [name for name in names if name[0] == unknown[:1]] if len(unknown) <= MAX_COMPARED else []
    close = get_close_matches(unknown, like, 2)
    return f", did you mean {' or '.join(close)}?" if close else ""


@cache
def _field_names(schema: type[Closed]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in schema.model_fields.items())
