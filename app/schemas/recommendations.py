"""Requests for recommendations, and the lists that answer them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from app.schemas.cursor import Cursor, CursorText
from app.schemas.event_rules import EventRule, EventTypes, EventTypesText, Within
from app.schemas.events import SealedStateText
from app.schemas.fields import (
    MAX_K,
    Basket,
    Boost,
    Categories,
    Closed,
    Expression,
    Expressions,
    FewCategories,
    Flag,
    Fraction,
    Id,
    IdOrEmpty,
    ItemIds,
    Name,
    Params,
    ParamsText,
    ResultCount,
    RotationDays,
    plain_digits,
    with_example,
)
from app.schemas.limits import MaxPer, MaxPerTexts, ObjectiveOrText, ObjectiveText
from app.schemas.scored_items import NamedItem, Removals, ScoredItem, Short
from model.config import SeenRule

MAX_REQUESTS = 100  # of one batch


SCENARIO = Field(
    None,
    description="The name of stored settings for the list. Settings in the request narrow the list further. "
    "Leave out those that the scenario should decide.",
)
COUNT = Field(10, description="The number of items, by default 10.")
CURSOR = Field(
    None,
    description="Return the list in pages. Send an empty cursor for the first page, then the cursor of the "
    "previous page.",
)


Mode = Literal["next", "repeat"]
TWO_LISTS = "combines `mode` repeat with `because` or `basket_only`; use one of them"


class ListSettings(Closed):
    """Settings of a list that a request or a scenario may have, and that fit into a query string."""

    k: ResultCount = COUNT
    mode: Mode = Field(
        "next",
        description="`repeat` lists only items that the user has bought before, ordered by how due they are to "
        "be bought again. It needs a user and looks at as many events as `exclude_seen=all`. The default is `next`.",
    )
    exclude_seen: SeenRule = Field(
        "recent",
        description="Which seen items to leave out: those that the user saw recently, or all items in the "
        "user's newest events. These are 10,000 events, unless the service is configured otherwise; "
        "`seen_events_limit` in the response then has the number. The default is `recent`, or `none` with `mode` "
        "`repeat`.",
    )
    exclude_events: EventTypes = Field(
        default_factory=list,
        description="Leave out the items of the user's events of these types, even if they are pinned. It "
        "needs a user and looks at as many events as `exclude_seen=all`.",
    )
    within: Within | None = Field(
        None,
        description="For `exclude_events`, look only at events of this age or younger. Without it, look at all "
        "of them.",
    )
    categories: Categories = Field(default_factory=list, description="An item needs at least one of these categories.")
    categories_all: FewCategories = Field(default_factory=list, description="An item needs all of these categories.")
    categories_none: Categories = Field(default_factory=list, description="An item must have none of these categories.")
    exclude: ItemIds = Field(default_factory=list, description="Items to leave out, even if they are pinned.")
    filter: Expression | None = Field(
        None,
        description="A CEL expression that is true for items that may be recommended, such as `item.price < "
        "params.max_price`.",
    )
    objective: ObjectiveOrText | None = Field(
        None,
        description="A numeric property, such as the margin, that weighs the scores. The odds of an item are "
        "multiplied by its value to the power of the strength, in units of the median of all values above 0. An "
        "item without a value counts as the median, and one with a value of 0 or less as worthless.",
    )
    diversity: Fraction = Field(0.0, description="0, the default: the best items. 1: the least similar among the best.")
    rotation: Fraction = Field(
        0.0,
        description="How far to lower items that the user was shown and has not chosen: the share of its odds "
        "that an item loses with each impression. The item regains them over `rotation_days`. By default 0.",
    )
    rotation_days: RotationDays = Field(
        7.0, description="The number of days without an impression after which an item has rested, by default 7."
    )
    basket_only: Flag = Field(
        False, description="With a `basket`, list only what was bought together with its items, whoever the user is."
    )
    max_per_category: Annotated[int, Field(ge=1, le=MAX_K), BeforeValidator(plain_digits)] | None = Field(
        None, description="The maximum number of items of one category, over all pages."
    )
    max_per: MaxPer = Field(
        default_factory=dict,
        description="The maximum number of items with the same text in a property, over all pages, by property.",
    )

    @model_validator(mode="after")
    def _parts_belong_together(self) -> Self:
        if self.within is not None and not self.exclude_events:
            raise PydanticCustomError("within_nothing", "has `within` without `exclude_events`")
        if self.mode == "repeat" and self.basket_only:
            raise PydanticCustomError("two_lists", TWO_LISTS)
        return self


class RecommendationQuery(ListSettings):
    """Fields of a request that fit into a query string."""

    scenario: Name | None = SCENARIO
    current_item: Id | None = Field(
        None,
        description="The item of the current page. Expressions read its properties as `current`. The list "
        "leaves it out unless it is pinned.",
    )
    cursor: Cursor | None = CURSOR
    basket: Basket = Field(
        default_factory=list,
        description="The items in the cart. The list leaves them out, and ranks what goes with them higher.",
    )
    because: IdOrEmpty | None = Field(
        None, description="List the items most similar to this item instead. Empty: similar to the user's newest item."
    )
    explain: Flag = Field(False, description="Explain the score of each item.")
    debug: Flag = Field(
        False,
        description="Count how many items each part of the request left out. This needs the scope `scenarios:write`.",
    )

    @model_validator(mode="after")
    def _one_list(self) -> Self:
        if self.mode == "repeat" and self.because is not None:
            raise PydanticCustomError("two_lists", TWO_LISTS)
        return self


class RecommendationUrlQuery(RecommendationQuery):
    """Fields of a query string whose form differs from the body."""

    # the framework would pass a list for the ids of a `Cursor`
    cursor: CursorText | None = CURSOR  # type: ignore[assignment]
    max_per: MaxPerTexts = Field(  # type: ignore[assignment]
        default_factory=list,
        description="The maximum number of items with the same text in a property, over all pages, such as `brand:2`.",
    )

    objective: ObjectiveText | None = Field(  # type: ignore[assignment]
        None,
        description="A numeric property, optionally followed by a colon and its strength, such as "
        "`margin:0.5`. The default strength is 1. The meaning is as in a body.",
    )
    boost: Expressions = Field(
        default_factory=list,
        description="Expressions. Each adds its number to the scores of the items for which it has a value.",
    )
    exclude_events: EventTypesText = Field(
        default_factory=list, description="As in a body; separate several types with commas."
    )
    params: ParamsText = Field(
        "{}", description='A JSON object with the values of `params` in expressions, such as `{"max_price": 50}`.'
    )


class Pin(Closed, strict=True):
    """An item at a fixed place of the list, whatever its score. The first place is 1."""

    item_id: Id
    place: ResultCount


def _different_pins(pins: list["Pin"]) -> list["Pin"]:
    if len({pin.item_id for pin in pins}) < len(pins) or len({pin.place for pin in pins}) < len(pins):
        raise PydanticCustomError("pinned_twice", "pins an item twice, or two items at one place")
    return pins


Pins = Annotated[list[Pin], Field(max_length=MAX_K, fail_fast=True), AfterValidator(_different_pins)]

# exactly one of the three, but not by `oneOf`, which client generators mistake for the whole schema
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


class RecommendationRequest(RecommendationQuery, strict=True, json_schema_extra=USER_OR_HISTORY):
    """A request for recommendations for a user, a history or a sealed state."""

    user_id: Id | None = Field(None, description="A user, known or not, unless the request has `history` or `state`.")
    history: ItemIds | None = Field(None, description="Item ids, oldest first. Nothing is stored.")
    state: SealedStateText | None = Field(
        None, description="The sealed state that a visitor keeps, from `POST /v1/portable/events`. Nothing is stored."
    )
    candidates: ItemIds | None = Field(None, description="Rank only these items.")
    boost: Boost = Field(
        default_factory=dict,
        description="Boosts by category, added to the scores of its items: 0.7 doubles the odds of an item, "
        "-0.7 halves them. Or CEL expressions, each of which adds its number to the scores of the items for "
        "which it has a value, such as `item.margin > 0.3 ? 0.7 : 0.0`.",
    )
    params: Params = Field(default_factory=dict, description="The values of `params` in expressions, by name.")
    pin: Pins = Field(default_factory=list)

    @property
    def filters(self) -> Sequence[str]:
        """The expressions that must be true for an item."""
        return [self.filter] if self.filter is not None else []

    @property
    def fallback(self) -> str | None:
        """The expression that replaces the first filter if a list would be short; None if there is none."""
        return None

    @property
    def experiment(self) -> str:
        """The name of the experiment over scenarios that the request takes part in; "" for none."""
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
    def weighs_properties(self) -> bool:
        """Whether the scores depend on properties of the items, such as margins."""
        return self.objective is not None or isinstance(self.boost, tuple)

    @property
    def seen_rule(self) -> SeenRule:
        """Which seen items are left out; with `mode` repeat none, unless the request or its scenario says so."""
        is_default = self.mode == "repeat" and "exclude_seen" not in self.model_fields_set
        return "none" if is_default else self.exclude_seen

    @property
    def repeat_fault(self) -> str | None:
        """Why `mode` repeat is not possible for this request; None if it is, or for another mode."""
        if self.mode != "repeat":
            return None
        if self.user_id is None:
            return "has `mode` repeat without `user_id`; a history and a sealed state have no event log"
        if self.because is not None or self.basket_only:
            return TWO_LISTS
        return None

    @model_validator(mode="after")
    def _user_or_history(self) -> Self:
        if sum(one is not None for one in (self.user_id, self.history, self.state)) != 1:
            raise PydanticCustomError("user_or_history", "must have exactly one of user_id, history and state")
        if self.history is not None and self.exclude_events:
            raise PydanticCustomError("events_of_nobody", "has `exclude_events` without `user_id`")
        if self.mode == "repeat" and (fault := self.repeat_fault) is not None:
            raise PydanticCustomError("no_repeat", fault)
        return self


class PersonalSearch(RecommendationRequest):
    """A search for a user: titles or ids of items must match the text, and closer matches rank higher."""

    text: str


class RecommendationBatch(Closed, strict=True):
    """Up to 100 requests, answered in order."""

    requests: Annotated[list[RecommendationRequest], Field(min_length=1, max_length=MAX_REQUESTS)]


class ItemListQuery(Closed):
    """Parameters of a list that belongs to an item."""

    scenario: Name | None = SCENARIO
    k: ResultCount = COUNT
    categories: Categories = Field([], description="An item needs at least one of these categories.")
    exclude: ItemIds = Field([], description="Items to leave out.")
    filter: Expression | None = Field(None, description="As for recommendations. `current` is this item.")
    params: ParamsText = Field("{}", description="As for recommendations.")
    debug: Flag = Field(False, description="As for recommendations.")


class SimilarQuery(ItemListQuery):
    """Parameters of a list of similar items."""

    explain: Flag = Field(False, description="Explain which codewords each item shares.")


Source = Literal["personalised", "popular", "blended", "similar", "together", "repeat"]


@with_config(
    with_example(
        {
            "recommendation_id": "AaIneFnlSli3kUqRAs8AAAABHFuMHlNEE0AVJwTr",
            "user_id": "ada",
            "generation": "shop",
            "source": "personalised",
            "items": [{"item_id": "tea-2", "score": 4.25, "title": "Green tea"}],
        }
    )
)
class Recommendations(TypedDict):
    """A list of items, best first.

    It has fewer than `k` items if no more were allowed; `short` then says why.
    """

    recommendation_id: str
    user_id: str | None
    generation: str
    source: Source
    items: Sequence[ScoredItem]
    cursor: NotRequired[
        Annotated[str | None, Field(description="The cursor of the next page. Null after the last page.")]
    ]
    scenario: NotRequired[Annotated[str, Field(description="The scenario whose settings the list has.")]]
    experiment: NotRequired[str]
    seen_events_limit: NotRequired[
        Annotated[
            int,
            Field(
                description="With `exclude_seen=all`, `exclude_events` or `mode=repeat`: only this many of the "
                "user's newest events were looked at."
            ),
        ]
    ]
    because: NotRequired[Annotated[NamedItem, Field(description="The item that these are most similar to.")]]
    short: NotRequired[Short]
    debug: NotRequired[Removals]


class RecommendationResults(TypedDict):
    """One response for each request of a batch, in order."""

    results: list[Recommendations]
