"""Requests for recommendations, and the lists that answer them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from app.schemas.event_rules import EventRule, EventTypes, EventTypesText, Within
from app.schemas.events import SealedStateText
from app.schemas.fields import (
    MAX_K,
    Basket,
    Boost,
    Categories,
    Closed,
    Cursor,
    Diversity,
    Expression,
    Expressions,
    FewCategories,
    Flag,
    Id,
    IdOrEmpty,
    ItemIds,
    Params,
    ParamsText,
    ResultCount,
    Rotation,
    RotationDays,
    plain_digits,
)
from app.schemas.limits import MaxPer, MaxPerTexts, ObjectiveOrText, ObjectiveText
from app.schemas.scored_items import NamedItem, Removals, ScoredItem, Short
from model.config import SeenRule

MAX_REQUESTS = 100  # of one batch


SCENARIO = Field(
    None,
    description="the list's settings, by the name under which the shop keeps them; what the request says beside them "
    "narrows the list",
)


Mode = Literal["next", "repeat"]
TWO_LISTS = "has `mode` repeat beside `because` or `basket_only`, which list something else"


class ListSettings(Closed):
    """What a request or a scenario may say of a list, and fits into a query string."""

    k: ResultCount = 10
    mode: Mode = Field(
        "next",
        description="`repeat` lists nothing but what the user has bought before, by how due it is to be bought again; "
        "it needs a user, goes by as many events as `exclude_seen=all`, and leaves out nothing that was seen unless "
        "`exclude_seen` says so",
    )
    exclude_seen: SeenRule = Field(
        "recent",
        description="leave out what the user has seen lately, or all that the newest events are about: 10,000 of them, "
        "unless the service is set to another number, which the answer then says in `seen_events_limit`",
    )
    exclude_events: EventTypes = Field(
        default_factory=list,
        description="leave out the items of the user's events of these types, pinned or not; needs a user, and goes by "
        "as many events as `exclude_seen=all`",
    )
    within: Within | None = Field(
        None,
        description="of the events of `exclude_events`, go by those of this time until now; without it by all of them",
    )
    categories: Categories = Field(default_factory=list, description="an item needs one of them")
    categories_all: FewCategories = Field(default_factory=list, description="an item needs all of them")
    categories_none: Categories = Field(default_factory=list, description="an item may have none of them")
    exclude: ItemIds = Field(default_factory=list)
    filter: Expression | None = Field(
        None,
        description="an expression of CEL that is true for items that may be recommended, such as "
        "`item.price < params.max_price`",
    )
    objective: ObjectiveOrText | None = Field(
        None,
        description="a number of items, such as their margin, by which scores are weighed: the odds of an item are "
        "multiplied by its value to the power of the strength, in units of the median of the values above 0; an item "
        "without a value counts as the median, and one of 0 or less as worth nothing",
    )
    diversity: Diversity = Field(0.0, description="0: the best items; 1: the least alike among the best")
    rotation: Rotation = Field(
        0.0,
        description="how far items stand lower that the user was shown and has not chosen: the share of its odds that "
        "an item loses with each impression; it gets them back over `rotation_days`",
    )
    rotation_days: RotationDays = Field(7.0, description="after so many days without an impression, an item has rested")
    basket_only: Flag = Field(
        False, description="with a `basket`, list just what was bought together with its items, for whomever it is"
    )
    max_per_category: Annotated[int, Field(ge=1, le=MAX_K), BeforeValidator(plain_digits)] | None = Field(
        None, description="items of one category in all pages together"
    )
    max_per: MaxPer = Field(
        default_factory=dict, description="items with the same text in a property, in all pages together, by property"
    )

    @model_validator(mode="after")
    def _parts_belong_together(self) -> Self:
        if self.within is not None and not self.exclude_events:
            raise PydanticCustomError("within_nothing", "has `within` without `exclude_events`, to which it belongs")
        if self.mode == "repeat" and self.basket_only:
            raise PydanticCustomError("two_lists", TWO_LISTS)
        return self


class RecommendationQuery(ListSettings):
    """The wishes that fit into a query string."""

    scenario: Id | None = SCENARIO
    current_item: Id | None = Field(
        None,
        description="the item of the page, whose properties are `current` in expressions; left out unless pinned",
    )
    cursor: Cursor | None = Field(
        None, description="answer in pages: empty for the first one, then that of the page before"
    )
    basket: Basket = Field(
        default_factory=list,
        description="what is in the cart: left out, while what was bought together with it rises in the list",
    )
    because: IdOrEmpty | None = Field(
        None, description="instead, what is most like this item; empty: like the user's newest one"
    )
    explain: Flag = Field(False, description="say what made the score of each item")
    debug: Flag = Field(
        False,
        description="say how many items each part of the request left out; needs the scope `scenarios:write`",
    )

    @model_validator(mode="after")
    def _one_list(self) -> Self:
        if self.mode == "repeat" and self.because is not None:
            raise PydanticCustomError("two_lists", TWO_LISTS)
        return self


class RecommendationUrlQuery(RecommendationQuery):
    """The wishes of a query string whose form differs from that in a body."""

    max_per: MaxPerTexts = Field(  # type: ignore[assignment]
        default_factory=list, description="items with the same text in a property, in all pages together: `brand:2`"
    )

    objective: ObjectiveText | None = Field(  # type: ignore[assignment]
        None, description="as in a body: a property of items, and after a colon its strength, 1 without: `margin:0.5`"
    )
    boost: Expressions = Field(
        default_factory=list, description="each adds its number to the scores of the items that have one"
    )
    exclude_events: EventTypesText = Field(
        default_factory=list, description="as in a body; several types with commas between them"
    )
    params: ParamsText = Field(
        "{}", description='a JSON object of what is `params` in expressions, such as `{"max_price": 50}`'
    )


class Pin(Closed):
    """An item at a fixed place of the list, whatever its score; the first place is 1."""

    model_config = ConfigDict(strict=True)

    item_id: Id
    place: ResultCount


def _different_pins(pins: list["Pin"]) -> list["Pin"]:
    if len({pin.item_id for pin in pins}) < len(pins) or len({pin.place for pin in pins}) < len(pins):
        raise PydanticCustomError("pinned_twice", "pins an item twice, or two items at one place")
    return pins


Pins = Annotated[list[Pin], Field(max_length=MAX_K, fail_fast=True), AfterValidator(_different_pins)]

# exactly one of the three, and not by `oneOf`, which generators of clients take for the whole schema
USER_OR_HISTORY: dict[str, Any] = {
    "if": {"required": ["user_id"], "properties": {"user_id": {"type": "string"}}},
    "then": {"properties": {"history": {"type": "null"}, "state": {"type": "null"}}},
    "else": {
        "if": {"required": ["history"], "properties": {"history": {"type": "array"}}},
        "then": {
            "properties": {"exclude_events": {"maxItems": 0}, "mode": {"const": "next"}, "state": {"type": "null"}}
        },
        "else": {"required": ["state"], "properties": {"state": {"type": "string"}, "mode": {"const": "next"}}},
    },
}


class RecommendationRequest(RecommendationQuery):
    """Who asks, a known user or a history, and what may be answered."""

    model_config = ConfigDict(strict=True, json_schema_extra=USER_OR_HISTORY)

    user_id: Id | None = None
    history: ItemIds | None = Field(None, description="item ids, oldest first; nothing is stored")
    state: SealedStateText | None = Field(
        None, description="of a visitor who keeps it, as `POST /v1/portable/events` gave it; nothing is stored"
    )
    candidates: ItemIds | None = Field(None, description="rank just these")
    boost: Boost = Field(
        default_factory=dict,
        description="by category, added to the score of its items; 0.7 doubles the odds of an item, -0.7 halves them; "
        "or expressions of CEL, each of which adds its number to the scores of the items that have one, such as "
        "`item.margin > 0.3 ? 0.7 : 0.0`",
    )
    params: Params = Field(default_factory=dict, description="by name, what is `params` in expressions")
    pin: Pins = Field(default_factory=list)

    @property
    def filters(self) -> Sequence[str]:
        """The expressions that must be true for an item."""
        return [self.filter] if self.filter is not None else []

    @property
    def fallback(self) -> str | None:
        """The expression that takes the place of the first filter where a list would be short; None for no such."""
        return None

    @property
    def experiment(self) -> str:
        """The name of the experiment that the request itself takes part in, whatever generation answers it."""
        return ""

    @property
    def category_groups(self) -> Sequence[Sequence[str]]:
        """Lists of categories; an item needs one of each list."""
        return [self.categories] if self.categories else []

    @property
    def event_rules(self) -> Sequence[EventRule]:
        """Rules by the user's events; each leaves items out."""
        return [EventRule(self.exclude_events, self.within)] if self.exclude_events else []

    @property
    def seen_rule(self) -> SeenRule:
        """Which seen items are left out; with `mode` repeat none, unless the request or its scenario says so."""
        is_default = self.mode == "repeat" and "exclude_seen" not in self.model_fields_set
        return "none" if is_default else self.exclude_seen

    @property
    def repeat_fault(self) -> str | None:
        """Why there can be no list of what to buy again; None where there can be, or none is wanted."""
        if self.mode != "repeat":
            return None
        if self.user_id is None:
            return "has `mode` repeat and no `user_id`, whose log it goes by; a history and a sealed state have no log"
        if self.because is not None or self.basket_only:
            return TWO_LISTS
        return None

    @model_validator(mode="after")
    def _user_or_history(self) -> Self:
        if sum(one is not None for one in (self.user_id, self.history, self.state)) != 1:
            raise PydanticCustomError("user_or_history", "takes exactly one of user_id, history and state")
        if self.history is not None and self.exclude_events:
            raise PydanticCustomError(
                "events_of_nobody", "has `exclude_events` and no `user_id`, whose events they are"
            )
        if self.mode == "repeat" and (fault := self.repeat_fault) is not None:
            raise PydanticCustomError("no_repeat", fault)
        return self


class PersonalSearch(RecommendationRequest):
    """A search for a user: titles or ids of items have to match the text, and the closer the better."""

    text: str


class RecommendationBatch(Closed):
    """Up to 100 requests, answered in order."""

    model_config = ConfigDict(strict=True)

    requests: Annotated[list[RecommendationRequest], Field(min_length=1, max_length=MAX_REQUESTS)]


class ItemListQuery(Closed):
    """What a list that belongs to an item may be answered for."""

    scenario: Id | None = SCENARIO
    k: ResultCount = 10
    categories: Categories = Field([], description="an item needs one of them")
    exclude: ItemIds = Field([])
    filter: Expression | None = Field(None, description="as of recommendations; `current` is this item")
    params: ParamsText = Field("{}", description="as of recommendations")
    debug: Flag = Field(False, description="as of recommendations")


class SimilarQuery(ItemListQuery):
    """What similar items may be answered for."""

    explain: Flag = Field(False, description="say which codewords each item shares")


Source = Literal["personalised", "popular", "blended", "similar", "together", "repeat"]


class Recommendations(TypedDict):
    """The best items that were allowed, best first; fewer than k where fewer were, and then `short` says why."""

    recommendation_id: str
    user_id: str | None
    generation: str
    source: Source
    items: Sequence[ScoredItem]
    cursor: NotRequired[Annotated[str | None, Field(description="of the next page; null after the last")]]
    scenario: NotRequired[Annotated[str, Field(description="whose settings the list has")]]
    experiment: NotRequired[str]
    seen_events_limit: NotRequired[
        Annotated[
            int,
            Field(
                description="with exclude_seen=all, exclude_events or mode=repeat: only so many of the user's newest "
                "events were looked at"
            ),
        ]
    ]
    because: NotRequired[Annotated[NamedItem, Field(description="the item that these are most like")]]
    short: NotRequired[Short]
    debug: NotRequired[Removals]


# inside the class a type checker would take it for a key
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
