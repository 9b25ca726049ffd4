"""Events that are posted, and the answer to them."""

from pydantic import BaseModel, ConfigDict, Field

from app.schemas.fields import Closed, Id, Timestamp

MAX_EVENTS = 1_000  # of one request
MAX_PUBLIC_EVENTS = 100  # of one request with a page's key, which everybody can read
MAX_PUBLIC_NEW_USERS = 20  # among them


class PostedEvent(Closed):
    """One interaction of a user with an item."""

    model_config = ConfigDict(strict=True)

    event_id: Id | None = Field(None, description="best a UUIDv7; without one, a retry may count twice")
    user_id: Id
    item_id: Id
    type: Id = "click"
    timestamp_us: Timestamp | None = Field(None, alias="timestamp")
    value: float | None = Field(None, description="logged, for training")
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
