"""Users: their state, their log, undo, merge and erasure."""

from datetime import datetime
from typing import Annotated, NotRequired

from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from app.schemas.fields import Closed, Id, with_example


class ShownItem(TypedDict):
    """An item that the user was shown and has not chosen since."""

    item_id: str
    count: Annotated[int, Field(description="The number of impressions, at most 255.")]
    last: Annotated[datetime, Field(description="The time of the newest impression.")]


class UserState(BaseModel):
    """The state of a user. Its size does not depend on the length of the history."""

    user_id: str
    generation: str
    event_count: int
    last_item_id: str | None
    recent_items: list[str] = Field(description="Newest first.")
    shown_items: list[ShownItem] = Field(description="The items that `rotation` lowers: at most 56, newest first.")
    histogram: list[list[list[float]]] = Field(description="[R][B][W]: decayed uses of each codeword.")

    model_config = with_example(
        {
            "user_id": "ada",
            "generation": "shop",
            "event_count": 2,
            "last_item_id": "tea-2",
            "recent_items": ["tea-2", "cup-1"],
            "shown_items": [{"item_id": "pot-3", "count": 2, "last": "2024-11-14T18:20:00Z"}],
            "histogram": [[[1.0, 0.95], [0.0, 1.95]]],
        }
    )


class LoggedEvent(TypedDict):
    """An event as it was logged, without fields that were not sent. It can be posted again unchanged."""

    event_id: str
    user_id: str
    item_id: NotRequired[str]
    items: NotRequired[Annotated[list[str], Field(description="The items of an impression, in place of `item_id`.")]]
    type: str
    timestamp: float
    value: NotRequired[float]
    recommendation_id: NotRequired[str]
    order_id: NotRequired[str]


class LoggedUndo(TypedDict):
    """An undo. From here on, the event with this user and id no longer counts."""

    undo: str
    user_id: str
    timestamp: float


class UserEvents(BaseModel):
    """Events and undos in log order. After a merge, an event's `user_id` is the id that it was posted for."""

    user_id: str
    events: list[LoggedEvent | LoggedUndo]
    next: int | None = Field(description="`after` of the next page. Null after the last page.")

    model_config = with_example(
        {
            "user_id": "ada",
            "events": [
                {
                    "event_id": "01932c07-5e00-7d4b-a1c3-2f8e6b9d0a11",
                    "user_id": "ada",
                    "item_id": "tea-2",
                    "type": "click",
                    "timestamp": 1731608400.0,
                },
                {
                    "undo": "01932c07-5e00-7d4b-a1c3-2f8e6b9d0a11",
                    "user_id": "ada",
                    "timestamp": 1731608460.0,
                },
            ],
            "next": None,
        }
    )


class Undone(BaseModel):
    """The event no longer counts. Its id stays known: the same event sent again is a duplicate."""

    user_id: str
    event_id: str
    changed: bool = Field(description="False if it was already undone.")

    model_config = with_example({"user_id": "ada", "event_id": "01932c07-5e00-7d4b-a1c3-2f8e6b9d0a11", "changed": True})


class MergeRequest(Closed, strict=True):
    """The visitor to merge into the user."""

    visitor: Id = Field(alias="from", description="The visitor's id, which is another name of the user from now on.")


class Merged(BaseModel):
    """The visitor is the user: past and future calls with either id mean the same user."""

    user_id: str
    visitor: str = Field(serialization_alias="from")
    changed: bool = Field(description="False if they were already merged.")

    model_config = with_example({"user_id": "ada", "from": "visitor-7", "changed": True})


class Erasure(BaseModel):
    """The user is erased. Copies in files are gone by the deadline."""

    user_id: str
    files_by: datetime = Field(
        description="The time when the archive and the log's own files have nothing left of the user."
    )

    model_config = with_example({"user_id": "ada", "files_by": "2024-11-15T18:20:00Z"})
