"""Events that are posted, the sealed states of visitors who keep them themselves, and the answers."""

from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from app.schemas.fields import Closed, Id, Timestamp
from storage.state.portable_state import PortableState

MAX_EVENTS = 1_000  # of one request
MAX_PUBLIC_EVENTS = 100  # of one request with a page's key, which everybody can read
MAX_PUBLIC_NEW_USERS = 20  # among them
MAX_VALUE = 1e9  # of one event, so that no sum of them is infinite


def _value(value: float, info: ValidationInfo) -> float:
    """Return what an event is worth, from 0 to the context's ``max_value``."""
    assert info.context is not None
    most = info.context["max_value"]
    if not 0 <= value <= most:
        raise PydanticCustomError("value_out_of_range", "is not from 0 to {most}", {"most": f"{most:,.15g}"})
    return value


Value = Annotated[float, AfterValidator(_value), WithJsonSchema({"type": "number", "minimum": 0, "maximum": MAX_VALUE})]


class PostedEvent(Closed):
    """One interaction of a user with an item."""

    model_config = ConfigDict(strict=True)

    event_id: Id | None = Field(None, description="best a UUIDv7; without one, a retry may count twice")
    user_id: Id
    item_id: Id
    type: Id = "click"
    timestamp_us: Timestamp | None = Field(None, alias="timestamp")
    value: Value | None = Field(
        None,
        description="what the event is worth, such as what was paid: logged, exported, and added up in `/v1/stats` by "
        "the list that led here; the service may be set to take less",
    )
    recommendation_id: Id | None = Field(None, description="of the answer that led here")


class EventCounts(BaseModel):
    """What became of the events; accepted, duplicates and refused add up to the number sent."""

    accepted: int
    duplicates: int
    unknown_items: int = Field(description="of the accepted: the current model has not learned their items")
    unknown_types: int = Field(description="of the accepted: no served model has a weight for their types")
    refused: int = Field(
        description="with a key of pages: neither the shop nor a model knows their items. They are not logged; PUT the "
        "items first"
    )

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"accepted": 2, "duplicates": 1, "unknown_items": 0, "unknown_types": 0, "refused": 0}]
        }
    )


class SealedState:
    """A sealed state as it was sent, and what is in it once it is opened."""

    __slots__ = ("opened", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.opened: PortableState | None = None


def _sealed(value: object) -> SealedState:
    if not isinstance(value, str):
        raise PydanticCustomError("no_text", "is not a text")
    return SealedState(value)


SealedStateText = Annotated[SealedState, PlainValidator(_sealed), WithJsonSchema({"type": "string"})]


class PortableEventsRequest(Closed):
    """The visitor's sealed state and what the visitor did."""

    model_config = ConfigDict(strict=True)

    state: SealedStateText | None = Field(None, description="as the answer before gave it; left out by a new visitor")
    events: list[Any]


class PortableEventCounts(EventCounts):
    """What became of the events, none of which is logged, and the state after them."""

    state: str = Field(description="to be sent with the next call, in the place of the one before")
    expires: datetime = Field(description="until when it can be opened; the next events give one that lasts longer")

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "accepted": 1,
                    "duplicates": 0,
                    "unknown_items": 0,
                    "unknown_types": 0,
                    "refused": 0,
                    "state": "AZ8...",
                    "expires": "2026-12-23T10:00:00Z",
                }
            ]
        }
    )
