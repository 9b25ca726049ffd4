"""Requests with events, sealed states that visitors keep themselves, and the answers."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, Field, PlainValidator, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from app.schemas.fields import Closed, Id, Name, is_number, rfc_3339_us, with_example
from model.data.table import LAST_SECOND
from storage.state.event import IMPRESSION
from storage.state.portable_state import PortableState

MAX_SHOWN = 50  # items of one impression
MAX_EVENTS = 1_000  # of one request
MAX_PUBLIC_EVENTS = 100  # of one request with a page's key, which everybody can read
MAX_PUBLIC_NEW_USERS = 20  # in such a request
MAX_VALUE = 1e9  # of one event, so that no sum of them is infinite


def _timestamp_us(value: object, info: ValidationInfo) -> int:
    """Return microseconds since the epoch, at most the context's ``max_us``."""
    time_us = rfc_3339_us(value) if isinstance(value, str) else _unix_seconds_us(value)
    assert info.context is not None
    if time_us > info.context["max_us"]:
        raise PydanticCustomError("ahead", "is more than 5 minutes ahead of the server's clock (the unit is seconds)")
    return time_us


def _unix_seconds_us(seconds: object) -> int:
    if not is_number(seconds):
        raise PydanticCustomError("not_a_time", "is neither an RFC 3339 time nor a number of Unix seconds")
    if not abs(seconds) <= LAST_SECOND:  # so that NaN is refused too
        raise PydanticCustomError("not_a_time", "is out of range for a number of Unix seconds")
    return round(seconds * 1_000_000)


Timestamp = Annotated[
    int,
    PlainValidator(_timestamp_us),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "format": "date-time"},
                {"type": "number", "minimum": -LAST_SECOND, "maximum": LAST_SECOND},
            ],
            "description": "An RFC 3339 time with a time zone, or Unix seconds. At most 5 minutes ahead of the "
            "server's clock.",
        }
    ),
]


def _value(value: float, info: ValidationInfo) -> float:
    """Return the value of an event, from 0 to the context's ``max_value``."""
    assert info.context is not None
    most = info.context["max_value"]
    if not 0 <= value <= most:
        raise PydanticCustomError("value_out_of_range", "is not from 0 to {most}", {"most": f"{most:,.15g}"})
    return value


Value = Annotated[float, AfterValidator(_value), WithJsonSchema({"type": "number", "minimum": 0, "maximum": MAX_VALUE})]


def _different(items: list[str]) -> list[str]:
    if len({*items}) < len(items):
        raise PydanticCustomError("shown_twice", "names an item twice")
    return items


def _of_impression(items: list[str] | None, info: ValidationInfo) -> list[str] | None:
    if items is not None and info.data.get("type", IMPRESSION) != IMPRESSION:
        raise PydanticCustomError("items_of_another", "is allowed only in an event of type impression")
    return items


def _item_or_items(item_id: str | None, info: ValidationInfo) -> str | None:
    """Require an item or, in an impression, items; not both. Invalid items have their own error."""
    if "items" in info.data and (item_id is None) == (info.data["items"] is None):
        raise PydanticCustomError("item_or_items", "is required, or items in an event of type impression, but not both")
    return item_id


ShownItems = Annotated[list[Id], Field(min_length=1, max_length=MAX_SHOWN, fail_fast=True), AfterValidator(_different)]

# not `oneOf`, which client generators mistake for the whole schema
ITEM_OR_ITEMS: dict[str, Any] = {
    "if": {"required": ["items"], "properties": {"items": {"type": "array"}}},
    "then": {"required": ["type"], "properties": {"item_id": {"type": "null"}, "type": {"const": IMPRESSION}}},
    "else": {"required": ["item_id"], "properties": {"item_id": {"type": "string"}}},
}


class PostedEvent(Closed, strict=True, json_schema_extra=ITEM_OR_ITEMS):
    """One interaction of a user with an item, or an impression of several items."""

    hints: ClassVar[Mapping[str, str]] = {"events": "; send several events as an array, such as [{...}, {...}]"}

    event_id: Id | None = Field(
        None,
        description="Makes a retry safe; a UUIDv7 is best. Required if the service has keys; without an id, a retry "
        "may count twice.",
    )
    user_id: Id
    type: Name = "click"
    items: Annotated[ShownItems | None, AfterValidator(_of_impression)] = Field(
        None,
        description="What the user was shown, in any order. Only for events of type `impression`, in "
        "place of `item_id`.",
    )
    item_id: Annotated[Id | None, AfterValidator(_item_or_items)] = Field(
        None, validate_default=True, description="The item, unless the event has `items`."
    )
    timestamp_us: Timestamp | None = Field(None, alias="timestamp")
    value: Value | None = Field(
        None,
        description="What the event is worth, such as the price paid. The value is logged, exported, and added "
        "up in `/v1/stats` by the list that led to the event. The service may be configured with a lower "
        "maximum.",
    )
    recommendation_id: Name | None = Field(
        None, description="The `recommendation_id` of the list that led to the event."
    )
    order_id: Id | None = Field(
        None,
        description="The order that a purchase belongs to. Items that a user buys under one order id "
        "count as bought together.",
    )


class EventCounts(BaseModel):
    """How many events were accepted. `accepted`, `duplicates` and `refused` add up to the number sent."""

    accepted: int
    duplicates: int
    unknown_items: int = Field(description="Accepted events on items that the current model has not learned.")
    unknown_types: int = Field(description="Accepted events of types that no served model has a weight for.")
    refused: int = Field(
        description="With a page key: events on items that neither the shop nor a model has. They are not "
        "logged; PUT the items first."
    )

    model_config = with_example({"accepted": 2, "duplicates": 1, "unknown_items": 0, "unknown_types": 0, "refused": 0})


class SealedState:
    """A sealed state as it was sent, and its content once it is opened."""

    __slots__ = ("opened", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.opened: PortableState | None = None


def _sealed(value: object) -> SealedState:
    if not isinstance(value, str):
        raise PydanticCustomError("no_text", "is not a text")
    return SealedState(value)


SealedStateText = Annotated[SealedState, PlainValidator(_sealed), WithJsonSchema({"type": "string"})]


class PortableEventsRequest(Closed, strict=True):
    """A visitor's sealed state and new events."""

    state: SealedStateText | None = Field(
        None, description="The state from the previous response. A new visitor leaves it out."
    )
    events: list[Any]


class PortableEventCounts(EventCounts):
    """How many events were accepted, and the new state. No event is logged."""

    state: str = Field(description="Send it with the next call, in place of the previous state.")
    expires: datetime = Field(description="When the state expires. The next events return a state that lasts longer.")

    model_config = with_example(
        {
            "accepted": 1,
            "duplicates": 0,
            "unknown_items": 0,
            "unknown_types": 0,
            "refused": 0,
            "state": "AZ8...",
            "expires": "2026-12-23T10:00:00Z",
        }
    )
