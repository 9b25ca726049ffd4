"""Items: lists of them, search, and what a shop says of an item."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from app.schemas.fields import Categories, Closed, Id, ResultCount
from app.schemas.properties import Properties, PropertyTime
from app.schemas.recommendations import PersonalSearch
from app.schemas.scored_items import ScoredItem
from storage.items.vectors import MAX_NUMBERS

MAX_ITEMS = 1_000  # of one request


def _with_direction(numbers: list[float]) -> list[float]:
    if not any(numbers):
        raise PydanticCustomError("no_direction", "needs a number that is not 0")
    return numbers


Vector = Annotated[
    list[Annotated[float, Field(allow_inf_nan=False)]],
    Field(min_length=1, max_length=MAX_NUMBERS, fail_fast=True),
    AfterValidator(_with_direction),
]


class PopularQuery(Closed):
    """How many popular items are wanted."""

    k: ResultCount = 10


class PopularItems(BaseModel):
    """Items by their number of training events, most first; that number is the score."""

    generation: str
    items: list[ScoredItem]

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"generation": "shop", "items": [{"item_id": "tea-2", "score": 311.0, "title": "Green tea"}]}]
        }
    )


class TrendingQuery(PopularQuery):
    """How many trending items are wanted, and of which categories."""

    categories: Categories = Field([], description="an item needs one of them")


class TrendingItems(BaseModel):
    """Items by how often they are used just now, most first: the score counts events, each half as much a week on."""

    generation: str
    items: list[ScoredItem]

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"generation": "shop", "items": [{"item_id": "tea-2", "score": 17.5, "title": "Green tea"}]}]
        }
    )


class SearchQuery(Closed):
    """What items are searched for."""

    query: Annotated[str, StringConstraints(max_length=256)] = Field(
        "",
        description="part of a title or id, or words of a title in any order; where fewer than `limit` items match, "
        "words of four letters or more may have one typo each",
    )
    limit: ResultCount = 20
    user_id: Id | None = Field(
        None,
        description="rank what matches for this user: by the recommendations' scores, less 1 for each step by which an "
        "item matches less closely; without items that are not available",
    )

    def for_user(self) -> PersonalSearch | None:
        """Return what ranks the items for the user; None without a user."""
        if self.user_id is None:
            return None
        return PersonalSearch(user_id=self.user_id, k=self.limit, exclude_seen="none", text=self.query)


class FoundItem(BaseModel):
    """An item as it is now; one that is not available is never recommended."""

    item_id: str
    title: str
    categories: list[str]
    available: bool = True
    known: bool = Field(
        True,
        description="false while no model has learned it; events, its title and categories tell of it until then",
    )


class Item(FoundItem):
    """An item as it is now, with its properties."""

    properties: dict[str, Any] = Field({}, description="by name, as they were put")
    available_from: str | None = Field(None, description="left out where it was not put, as are the following")
    available_until: str | None = None
    published_at: str | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "item_id": "tea-2",
                    "title": "Green tea",
                    "categories": ["tea", "organic"],
                    "available": True,
                    "known": True,
                    "properties": {"price": 4.5, "brand": "Hill"},
                    "published_at": "2026-05-01T08:00:00Z",
                }
            ]
        }
    )


class Items(BaseModel):
    """Items that match, the closest first, then the most popular, or the best for a user. Each alone has properties."""

    items: list[FoundItem]

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
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
            ]
        }
    )


class ItemWords(Closed):
    """What a shop says of an item. What is left out stays as it was."""

    model_config = ConfigDict(strict=True)

    title: Annotated[str, StringConstraints(max_length=1024)] | None = None
    categories: Categories | None = Field(None, description="all of them; an empty list takes them away")
    available: bool | None = Field(None, description="false: never recommended, until it is true again")
    available_from: PropertyTime | None = Field(None, description="null takes it away")
    available_until: PropertyTime | None = Field(None, description="null takes it away")
    published_at: PropertyTime | None = Field(None, description="null takes it away")
    vector: Vector | None = Field(
        None,
        description="of its text or images, as the shop has computed it: as many numbers for all items; its direction "
        "counts; null takes it away",
    )
    properties: Properties = Field(default_factory=dict)


def _no_list(item_id: str) -> str:
    if item_id in ("popular", "trending"):
        raise PydanticCustomError("a_list", "is where a list of items is found; give the item another id")
    return item_id


StockedId = Annotated[Id, AfterValidator(_no_list)]


class PostedItem(ItemWords):
    """The same, with the item it is about."""

    item_id: StockedId


class ItemsTaken(BaseModel):
    """What was said is durable, and every process goes by it within a second."""

    accepted: int
    unknown_items: int = Field(description="of these, no model has learned so many yet")

    model_config = ConfigDict(json_schema_extra={"examples": [{"accepted": 2, "unknown_items": 0}]})
