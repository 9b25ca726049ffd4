"""Items: lists of items, search, and the data that a shop sets for an item."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NotRequired

from pydantic import AfterValidator, BaseModel, Field, StringConstraints, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from app.schemas.fields import Categories, Closed, Id, ResultCount, with_example
from app.schemas.properties import Properties, PropertyTime
from app.schemas.recommendations import PersonalSearch
from app.schemas.scored_items import ScoredItem
from storage.items.vectors import MAX_NUMBERS

MAX_ITEMS = 1_000  # of one request


def _with_direction(numbers: list[float]) -> list[float]:
    if not any(numbers):
        raise PydanticCustomError("no_direction", "must have a number that is not 0")
    return numbers


Vector = Annotated[
    list[Annotated[float, Field(allow_inf_nan=False)]],
    Field(min_length=1, max_length=MAX_NUMBERS, fail_fast=True),
    AfterValidator(_with_direction),
]


class PopularQuery(Closed):
    """Parameters of the list of popular items."""

    k: ResultCount = Field(10, description="The number of items, by default 10.")


class PopularItems(BaseModel):
    """Items with the most training events first. The score is that number."""

    generation: str
    items: list[ScoredItem]

    model_config = with_example(
        {"generation": "shop", "items": [{"item_id": "tea-2", "score": 311.0, "title": "Green tea"}]}
    )


class TrendingQuery(PopularQuery):
    """Parameters of the list of trending items."""

    categories: Categories = Field([], description="An item needs at least one of these categories.")


class TrendingItems(PopularItems):
    """Items with the most live visitors first. The score counts visitors; each counts half as much a week later."""

    model_config = with_example(
        {"generation": "shop", "items": [{"item_id": "tea-2", "score": 17.5, "title": "Green tea"}]}
    )


class SearchQuery(Closed):
    """Parameters of a search."""

    query: Annotated[str, StringConstraints(max_length=256)] = Field(
        "",
        description="Part of a title or id, or words of a title in any order. If fewer than `limit` items "
        "match, each word of four letters or more may have one typo.",
    )
    limit: ResultCount = Field(20, description="The number of items, by default 20.")
    user_id: Id | None = Field(
        None,
        description="Rank the matches for this user: by the scores of recommendations, minus 1 for each step "
        "by which an item matches less closely. Items that are not available are left out.",
    )

    def for_user(self) -> PersonalSearch | None:
        """Return the request that ranks the items for the user; None without a user."""
        if self.user_id is None:
            return None
        return PersonalSearch(user_id=self.user_id, k=self.limit, exclude_seen="none", text=self.query)


class FoundItem(TypedDict):
    """An item with its current data. An item that is not available is never recommended."""

    item_id: str
    title: str
    categories: list[str]
    available: bool
    known: Annotated[
        bool,
        Field(
            description="False while no model has learned the item. Until then its events, title and categories "
            "represent it."
        ),
    ]


@with_config(
    with_example(
        {
            "item_id": "tea-2",
            "title": "Green tea",
            "categories": ["tea", "organic"],
            "available": True,
            "known": True,
            "properties": {"price": 4.5, "brand": "Hill"},
            "published_at": "2026-05-01T08:00:00Z",
        }
    )
)
class Item(FoundItem):
    """An item with its current data and properties."""

    properties: Annotated[dict[str, Any], Field(description="The properties by name, as they were set.")]
    available_from: NotRequired[
        Annotated[str, Field(description="Left out if it is not set, as are `available_until` and `published_at`.")]
    ]
    available_until: NotRequired[str]
    published_at: NotRequired[str]


class Items(BaseModel):
    """Items that match, the closest first and then the most popular, or the best for a user first.

    Request a single item to see its properties.
    """

    items: list[FoundItem]

    model_config = with_example(
        {
            "items": [
                {
                    "item_id": "tea-2",
                    "title": "Green tea",
                    "categories": ["tea", "organic"],
                    "available": True,
                    "known": True,
                }
            ]
        }
    )


class ItemWords(Closed, strict=True):
    """Data of an item. Fields that are left out keep their values."""

    title: Annotated[str, StringConstraints(max_length=1024)] | None = None
    categories: Categories | None = Field(None, description="All categories of the item. An empty list removes them.")
    available: bool | None = Field(None, description="False: the item is never recommended until this is true again.")
    available_from: PropertyTime | None = Field(
        None, description="Recommended only from this time on. Null removes it."
    )
    available_until: PropertyTime | None = Field(None, description="Recommended only until this time. Null removes it.")
    published_at: PropertyTime | None = Field(None, description="A time for expressions. Null removes it.")
    vector: Vector | None = Field(
        None,
        description="A vector from the shop's own text or image model, of the same length for all items. Only "
        "its direction counts. Null removes it.",
    )
    properties: Properties = Field(default_factory=dict)


def _no_list(item_id: str) -> str:
    if item_id in ("popular", "trending"):
        raise PydanticCustomError("a_list", "is a path of the API; use another id for the item")
    return item_id


StockedId = Annotated[Id, AfterValidator(_no_list)]


class PostedItem(ItemWords):
    """Data of an item, with its id. Fields that are left out keep their values."""

    hints: ClassVar[Mapping[str, str]] = {"items": "; send several items as an array, such as [{...}, {...}]"}

    item_id: StockedId


class ItemsTaken(BaseModel):
    """The updates are durable, and every process applies them within one second."""

    accepted: int
    unknown_items: int = Field(description="How many of these items no model has learned yet.")

    model_config = with_example({"accepted": 2, "unknown_items": 0})
