"""What requests may say and what answers look like."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Annotated, Any, Literal, NotRequired, Self, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from app.cursor import BadCursor, shown_before
from model.config import SeenRule
from model.data_table import LAST_SECOND

MAX_EVENTS = 1_000
MAX_ITEMS = 1_000
MAX_REQUESTS = 100
MAX_ITEM_IDS = 10_000
MAX_K = 1_000
MAX_CATEGORY_CHARS = 256
MAX_CATEGORIES = 100  # that an item needs all of
MAX_BOOSTS = 20  # categories
MAX_BOOST = 20.0  # either way; e to its power times any odds is more than enough
MAX_ARMS = 8  # of an experiment
MAX_SHARE = 1_000_000.0
MAX_AHEAD_US = 5 * 60 * 1_000_000  # a client's clock may be this far ahead of ours

_RFC_3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?([Zz]|[+-][0-9]{2}:[0-9]{2})?"
)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _no_path_step(value: str) -> str:
    if value in (".", ".."):
        raise PydanticCustomError("path_step", "'.' and '..' are not ids")
    return value


def is_id(value: object) -> TypeGuard[str]:
    """Whether an `Id` takes the value."""
    return type(value) is str and _is_in_alphabet(value) is not None and value not in (".", "..")


def _are_ids(values: Sequence[str]) -> bool:
    """Whether each of any number is an `Id`, which one look tells sooner than many."""
    return not values or (_are_in_alphabet("\n".join(values)) is not None and {".", ".."}.isdisjoint(values))


def _timestamp_us(value: object, info: ValidationInfo) -> int:
    """Microseconds since the epoch, at most MAX_AHEAD_US after the context's ``now_us``."""
    time_us = _rfc_3339_us(value) if isinstance(value, str) else _unix_seconds_us(value)
    assert info.context is not None
    if time_us > info.context["now_us"] + MAX_AHEAD_US:
        raise PydanticCustomError("ahead", "is more than 5 minutes ahead of the server's clock (the unit is seconds)")
    return time_us


def _rfc_3339_us(text: str) -> int:
    match = _RFC_3339.fullmatch(text)
    if match is None:
        raise PydanticCustomError("not_a_time", "is neither an RFC 3339 time nor a number of Unix seconds")
    if match[2] is None:
        raise PydanticCustomError("no_zone", "has no time zone; end it with Z or an offset such as +01:00")
    try:
        return (datetime.fromisoformat(text.upper()) - EPOCH) // timedelta(microseconds=1)
    except ValueError:
        raise PydanticCustomError("not_a_time", "names a date or time that does not exist") from None


def _unix_seconds_us(seconds: object) -> int:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise PydanticCustomError("not_a_time", "is neither an RFC 3339 time nor a number of Unix seconds")
    if not abs(seconds) <= LAST_SECOND:  # so that NaN is refused too
        raise PydanticCustomError("not_a_time", "is out of range for a number of Unix seconds")
    return round(seconds * 1_000_000)


def _plain_digits(value: object) -> object:
    """Of a query string's spellings of a number take only the plain one, not 1_0, +5 or 5.0. In JSON 5.0 is 5."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and not (value.isascii() and value.isdigit()):
        raise PydanticCustomError("not_digits", "is not a whole number in plain digits")
    return value


def _plain_flag(value: object) -> object:
    """Of a query string's spellings of a boolean take only true and false, not 1, yes or on."""
    if isinstance(value, str) and value not in ("true", "false"):
        raise PydanticCustomError("not_a_flag", "is neither true nor false")
    return value


def _plain_number(value: object) -> object:
    """Of a query string's spellings of a number take only those that JSON has, not inf, 1_0 or +.5."""
    if isinstance(value, str) and not _PLAIN_NUMBER.fullmatch(value):
        raise PydanticCustomError("not_plain", "is not a plain number such as 0.5")
    return value


def _shown_before(value: object) -> tuple[str, ...]:
    """The ids in a cursor."""
    if isinstance(value, tuple):
        return value  # they were read before
    try:
        if not isinstance(value, str) or not _are_ids(ids := shown_before(value)):
            raise BadCursor
    except BadCursor:
        raise PydanticCustomError(
            "not_a_cursor", "is none; take `cursor` of the page before as it is, or an empty one for the first page"
        ) from None
    return tuple(ids)


def _boost(value: object) -> dict[str, float]:
    """What is added to the items of each category; checked as a whole, as a reason's field would be a category."""
    if not isinstance(value, dict) or len(value) > MAX_BOOSTS or not all(map(_is_boost, value.items())):
        raise PydanticCustomError(
            "no_boost",
            "takes at most {categories} categories, each with a number from -{most} to {most}",
            {"categories": MAX_BOOSTS, "most": int(MAX_BOOST)},
        )
    return {category: float(gain) for category, gain in value.items()}


def _is_boost(boost: tuple[object, object]) -> bool:
    category, gain = boost
    return (
        isinstance(category, str)
        and 1 <= len(category) <= MAX_CATEGORY_CHARS
        and isinstance(gain, int | float)
        and not isinstance(gain, bool)
        and abs(gain) <= MAX_BOOST  # so that NaN is refused too
    )


def _shares(value: object) -> dict[str, float]:
    """What share of the users each model gets; checked as a whole, as a reason's field would be a name."""
    if not isinstance(value, dict) or not 2 <= len(value) <= MAX_ARMS or not all(map(_is_share, value.items())):
        raise PydanticCustomError(
            "no_shares",
            "takes the names of 2 to {models} models, each with a number above 0 and at most {most}",
            {"models": MAX_ARMS, "most": int(MAX_SHARE)},
        )
    return {name: float(share) for name, share in value.items()}


def _is_share(share: tuple[object, object]) -> bool:
    name, part = share
    return (
        is_id(name)
        and isinstance(part, int | float)
        and not isinstance(part, bool)
        and 0 < part <= MAX_SHARE  # so that NaN is refused too
    )


def _different_pins(pins: list["Pin"]) -> list["Pin"]:
    if len({pin.item_id for pin in pins}) < len(pins) or len({pin.place for pin in pins}) < len(pins):
        raise PydanticCustomError("pinned_twice", "pins an item twice, or two items at one place")
    return pins


_PLAIN_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
_ID = r"[A-Za-z0-9_.:@-]{1,128}"
_DESCRIBED_ID = rf"^(?!\.{{1,2}}$){_ID}$"
_is_in_alphabet = re.compile(_ID).fullmatch
_are_in_alphabet = re.compile(rf"{_ID}(\n{_ID})*+").fullmatch
Id = Annotated[
    str,
    StringConstraints(pattern=f"^{_ID}$"),
    AfterValidator(_no_path_step),
    WithJsonSchema({"type": "string", "pattern": _DESCRIBED_ID}),
]
IdOrEmpty = Annotated[str, StringConstraints(pattern=f"^({_ID})?$"), AfterValidator(_no_path_step)]
# fail_fast: one bad id is reason enough, and a list of a million has no million reasons.
ItemIds = Annotated[list[Id], Field(max_length=MAX_ITEM_IDS, fail_fast=True)]
Category = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CATEGORY_CHARS)]
Categories = Annotated[list[Category], Field(max_length=MAX_K, fail_fast=True)]
FewCategories = Annotated[list[Category], Field(max_length=MAX_CATEGORIES, fail_fast=True)]
Cursor = Annotated[tuple[str, ...], PlainValidator(_shown_before), WithJsonSchema({"type": "string"})]
ResultCount = Annotated[int, Field(ge=1, le=MAX_K), BeforeValidator(_plain_digits)]
Boost = Annotated[
    dict[str, float],
    PlainValidator(_boost),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -MAX_BOOST, "maximum": MAX_BOOST},
            "maxProperties": MAX_BOOSTS,
        }
    ),
]
Shares = Annotated[
    dict[str, float],
    PlainValidator(_shares),
    WithJsonSchema(
        {
            "type": "object",
            "patternProperties": {_DESCRIBED_ID: {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SHARE}},
            "additionalProperties": False,
            "minProperties": 2,
            "maxProperties": MAX_ARMS,
        }
    ),
]
Diversity = Annotated[float, Field(ge=0, le=1), BeforeValidator(_plain_number)]
Flag = Annotated[bool, BeforeValidator(_plain_flag)]
Timestamp = Annotated[
    int,
    PlainValidator(_timestamp_us),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "format": "date-time"},
                {"type": "number", "minimum": -LAST_SECOND, "maximum": LAST_SECOND},
            ],
            "description": "RFC 3339 with a time zone, or Unix seconds; at most 5 minutes ahead of the server",
        }
    ),
]


class Closed(BaseModel):
    """Takes the fields it names and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, data: Any) -> Any:
        # Pydantic's own refusal would name each unknown field: the request's words, and any number of them.
        if isinstance(data, Mapping) and not _field_names(cls).issuperset(data):
            known = ", ".join(sorted(_field_names(cls)))
            raise PydanticCustomError(
                "unknown_field", "has an unknown field; the known ones are: {known}", {"known": known}
            )
        return data


@cache
def _field_names(schema: type[Closed]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in schema.model_fields.items())


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
    """What became of the events; accepted and duplicates add up to the number sent."""

    accepted: int
    duplicates: int
    unknown_items: int

    model_config = ConfigDict(json_schema_extra={"examples": [{"accepted": 2, "duplicates": 1, "unknown_items": 0}]})


class RecommendationQuery(Closed):
    """The wishes that fit into a query string."""

    k: ResultCount = 10
    exclude_seen: SeenRule = "recent"
    categories: Categories = Field(default_factory=list, description="an item needs one of them")
    categories_all: FewCategories = Field(default_factory=list, description="an item needs all of them")
    categories_none: Categories = Field(default_factory=list, description="an item may have none of them")
    exclude: ItemIds = Field(default_factory=list)
    diversity: Diversity = Field(0.0, description="0: the best items; 1: the least alike among the best")
    max_per_category: Annotated[int, Field(ge=1, le=MAX_K), BeforeValidator(_plain_digits)] | None = Field(
        None, description="items of one category in all pages together"
    )
    cursor: Cursor | None = Field(
        None, description="answer in pages: empty for the first one, then that of the page before"
    )
    because: IdOrEmpty | None = Field(
        None, description="instead, what is most like this item; empty: like the user's newest one"
    )
    explain: Flag = Field(False, description="say what made the score of each item")


class Pin(Closed):
    """An item at a fixed place of the list, whatever its score; the first place is 1."""

    model_config = ConfigDict(strict=True)

    item_id: Id
    place: ResultCount


ONE_ASKER: dict[str, Any] = {
    "oneOf": [
        {"required": ["user_id"], "properties": {"user_id": {"type": "string"}}},
        {"required": ["history"], "properties": {"history": {"type": "array"}}},
    ]
}


class RecommendationRequest(RecommendationQuery):
    """Who asks, a known user or a history, and what may be answered."""

    model_config = ConfigDict(strict=True, json_schema_extra=ONE_ASKER)

    user_id: Id | None = None
    history: ItemIds | None = Field(None, description="item ids, oldest first; nothing is stored")
    candidates: ItemIds | None = Field(None, description="rank just these")
    boost: Boost = Field(
        {},
        description="by category, added to the score of its items; 0.7 doubles the odds of an item, -0.7 halves them",
    )
    pin: Annotated[list[Pin], Field(max_length=MAX_K, fail_fast=True), AfterValidator(_different_pins)] = Field(
        default_factory=list
    )

    @model_validator(mode="after")
    def _one_asker(self) -> Self:
        if (self.user_id is None) == (self.history is None):
            raise PydanticCustomError("one_asker", "takes exactly one of user_id and history")
        return self


class RecommendationBatch(Closed):
    """Up to 100 requests, answered in order."""

    model_config = ConfigDict(strict=True)

    requests: Annotated[list[RecommendationRequest], Field(min_length=1, max_length=MAX_REQUESTS)]


class TargetCodeword(TypedDict):
    """One of the item's codewords, and what it adds to the score."""

    codebook: int
    codeword: int
    adds: float


class HistoryCodeword(TypedDict):
    """One of the item's codewords of the histogram, and the share of the user's history that has it too."""

    codebook: int
    codeword: int
    share: float


class RecentItem(TypedDict):
    """One of the user's recent items that has something to do with the item."""

    item_id: str
    title: NotRequired[str]
    shared: Annotated[int, Field(description="how many target codewords both have")]
    shared_history: Annotated[int, Field(description="how many history codewords both have")]
    adds: Annotated[float, Field(description="what the shared target codewords add to the score")]
    follows: Annotated[float, Field(description="what is added since the item has often followed this one")]


class Explanation(TypedDict):
    """What the score is the sum of (`codewords`, `other_codewords`, `bias`, `follows`, `boost`), and why it is so."""

    codewords: Annotated[list[TargetCodeword], Field(description="the three that add most")]
    other_codewords: Annotated[float, Field(description="what the others add")]
    bias: Annotated[float, Field(description="what the item has for everybody")]
    follows: Annotated[float, Field(description="what is added since the item has often followed recent ones")]
    history: Annotated[list[HistoryCodeword], Field(description="the three that most of the user's history has")]
    recent_items: Annotated[list[RecentItem], Field(description="the three that add most")]
    boost: NotRequired[Annotated[float, Field(description="what the request adds for its categories")]]


class ScoredItem(TypedDict):
    """The higher the score, the better; scores of one answer compare with each other only."""

    item_id: str
    score: float
    title: NotRequired[str]
    pinned: NotRequired[Annotated[Literal[True], Field(description="stands here since the request wants it")]]
    cold: NotRequired[bool]  # true: no model has learned the item, live events or its categories tell of it
    explanation: NotRequired[Explanation]


class NamedItem(TypedDict):
    item_id: str
    title: NotRequired[str]


Source = Literal["personalised", "popular", "blended", "similar"]


class Recommendations(TypedDict):
    """The best items that were allowed, best first; fewer than k where fewer were."""

    recommendation_id: str
    user_id: str | None
    generation: str
    source: Source
    items: list[ScoredItem]
    cursor: NotRequired[Annotated[str | None, Field(description="of the next page; null after the last")]]
    experiment: NotRequired[str]
    because: NotRequired[Annotated[NamedItem, Field(description="the item that these are most like")]]


# on the class itself a type checker would take it for a key
Recommendations.__pydantic_config__ = ConfigDict(  # type: ignore[attr-defined]
    json_schema_extra={
        "examples": [
            {
                "recommendation_id": "01932c07-5e00-7d4b-a1c3-2f8e6b9d0a11",
                "user_id": "ada",
                "generation": "shop",
                "source": "personalised",
                "items": [{"item_id": "tea-2", "score": 4.25, "title": "Green tea"}],
            }
        ]
    }
)


class RecommendationResults(TypedDict):
    """One answer for each request of a batch, in order."""

    results: list[Recommendations]


class UserState(BaseModel):
    """What the service remembers of a user, whatever the length of the history."""

    user_id: str
    generation: str
    event_count: int
    last_item_id: str | None
    recent_items: list[str] = Field(description="newest first")
    histogram: list[list[list[float]]] = Field(description="[R][B][W]: uses of each codeword, decayed")

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "user_id": "ada",
                    "generation": "shop",
                    "event_count": 2,
                    "last_item_id": "tea-2",
                    "recent_items": ["tea-2", "cup-1"],
                    "histogram": [[[1.0, 0.95], [0.0, 1.95]]],
                }
            ]
        }
    )


class UserEventsQuery(Closed):
    """A page of a user's log."""

    after: Annotated[int, Field(ge=0, le=2**53), BeforeValidator(_plain_digits)] = Field(
        0, description="`next` of the page before"
    )
    limit: ResultCount = 100


class LoggedEvent(TypedDict):
    """An event as it was taken in; what it did not say is left out. It can be posted again as it stands."""

    event_id: str
    user_id: str
    item_id: str
    type: str
    timestamp: float
    value: NotRequired[float]
    recommendation_id: NotRequired[str]


class LoggedUndo(TypedDict):
    """From here on, the event that was posted with this user and id no longer counts."""

    undo: str
    user_id: str
    timestamp: float


class UserEvents(BaseModel):
    """Events and undos in log order. Who has become the user shows in the events' own user ids."""

    user_id: str
    events: list[LoggedEvent | LoggedUndo]
    next: int | None = Field(description="`after` of the next page; null after the last")

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
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
            ]
        }
    )


class Undone(BaseModel):
    """The event does not count, and its id stays known: sent again, it is a duplicate."""

    user_id: str
    event_id: str
    changed: bool = Field(description="false where it was undone before")

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"user_id": "ada", "event_id": "01932c07-5e00-7d4b-a1c3-2f8e6b9d0a11", "changed": True}]
        }
    )


class MergeRequest(Closed):
    """Who becomes the user."""

    model_config = ConfigDict(strict=True)

    visitor: Id = Field(alias="from", description="from now on another name of the user")


class Merged(BaseModel):
    """The visitor is the user: what was and will be posted or asked for the one is the other's."""

    user_id: str
    visitor: str = Field(serialization_alias="from")
    changed: bool = Field(description="false where it was so before")

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"user_id": "ada", "from": "visitor-7", "changed": True}]}
    )


class Erasure(BaseModel):
    """The user is forgotten; copies in files go by the deadline."""

    user_id: str
    files_by: datetime = Field(description="when the archive and the log's own files have nothing left of the user")

    model_config = ConfigDict(json_schema_extra={"examples": [{"user_id": "ada", "files_by": "2024-11-15T18:20:00Z"}]})


class PopularQuery(Closed):
    k: ResultCount = 10


class SimilarQuery(Closed):
    """What may be answered."""

    k: ResultCount = 10
    categories: Categories = Field([], description="an item needs one of them")
    exclude: ItemIds = []
    explain: Flag = Field(False, description="say which codewords each item shares")


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
    query: Annotated[str, StringConstraints(max_length=256)] = Field("", description="part of a title or id")
    limit: ResultCount = 20


class Item(BaseModel):
    """An item as it is now; one that is not available is never recommended."""

    item_id: str
    title: str
    categories: list[str]
    available: bool = True
    known: bool = Field(
        True,
        description="false while no model has learned it; events and categories tell of it until the next training",
    )

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
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


class Items(BaseModel):
    """Items that match, the closest match first, then the most popular."""

    items: list[Item]

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


class ServedModel(BaseModel):
    """The generation that is served, what it was trained on and how it measured."""

    generation: str
    tag: str
    device: str
    items: int
    state_bytes: int = Field(description="what is kept of one user, however long the history")
    config: dict[str, Any]
    metrics: dict[str, Any]

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "generation": "shop",
                    "tag": "9f86d081884c7d65",
                    "device": "cpu",
                    "items": 240,
                    "state_bytes": 3496,
                    "config": {"model": {"preset": "lisa-mini", "width": 128}},
                    "metrics": {"hr_at_10_full": 0.26},
                }
            ]
        }
    )


class PlaceStats(BaseModel):
    """Of one place of the lists that one generation made, in one experiment or outside of any."""

    generation: str
    experiment: str | None
    place: int = Field(description="from 1 to 20")
    shown: int = Field(description="lists that were as long")
    events: dict[str, int] = Field(description="by type, what was posted with the list's recommendation_id")


class Stats(BaseModel):
    """What came of recommendations: of all processes, some seconds ago, since the data were begun."""

    places: list[PlaceStats]

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "places": [
                        {
                            "generation": "shop",
                            "experiment": None,
                            "place": 1,
                            "shown": 1200,
                            "events": {"click": 96, "purchase": 7},
                        }
                    ]
                }
            ]
        }
    )


class Activated(BaseModel):
    """The generation that every process of the service is to serve from now on, and the one that this one served."""

    generation: str
    tag: str
    previous: str

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"generation": "shop-june", "tag": "9f86d081884c7d65", "previous": "shop-may"}]}
    )


class Experiment(Closed):
    """Generations that are live at the same time, each for its share of the users; shares need not add up to 1."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "june", "shares": {"shop-may": 0.9, "shop-june": 0.1}}]}
    )

    name: Id = Field(description="another name mixes the users anew")
    shares: Shares = Field(description="by the name of the model")


class Experiments(BaseModel):
    """The experiment that every process goes by within a second or so."""

    experiment: Experiment | None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"experiment": {"name": "june", "shares": {"shop-may": 0.9, "shop-june": 0.1}}}]
        }
    )


class Health(BaseModel):
    """What a load balancer asks for; the status code says it all."""

    status: Literal["ok", "ready"]

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "ok"}]})
