"""Items of an answer, with their scores and explanations."""

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict


class TargetCodeword(TypedDict):
    """One of the item's codewords, and what it adds to the score."""

    codebook: int
    codeword: int
    adds: float


class HistoryCodeword(TypedDict):
    """One of the item's history codewords, and the share of the user's history that has it too."""

    codebook: int
    codeword: int
    share: float


class RecentItem(TypedDict):
    """One of the user's recent items that is related to the item."""

    item_id: str
    title: NotRequired[str]
    shared: Annotated[int, Field(description="The number of target codewords that both items have.")]
    shared_history: Annotated[int, Field(description="The number of history codewords that both items have.")]
    adds: Annotated[float, Field(description="What the shared target codewords add to the score.")]
    follows: Annotated[float, Field(description="What is added because the item has often followed this one.")]


class Explanation(TypedDict):
    """The parts of a score, and the reasons for it.

    The score is the sum of the parts from `codewords` to `follows` and from `boost` to `basket`.
    """

    codewords: Annotated[list[TargetCodeword], Field(description="The three target codewords that add most.")]
    other_codewords: Annotated[
        float, Field(description="What the other codewords add. Of history codewords only in lists of similar items.")
    ]
    bias: Annotated[float, Field(description="The item's bias, the same for every user.")]
    follows: Annotated[float, Field(description="What is added because the item has often followed recent items.")]
    history: Annotated[
        list[HistoryCodeword],
        Field(description="The three of the item's history codewords that the user's history has most."),
    ]
    recent_items: Annotated[list[RecentItem], Field(description="The three recent items that add most.")]
    boost: NotRequired[Annotated[float, Field(description="What the request's boost adds.")]]
    objective: NotRequired[
        Annotated[
            float, Field(description="What is added for the item's value. Below 0 if the value is below the median.")
        ]
    ]
    rotation: NotRequired[
        Annotated[float, Field(description="What the item loses because it was shown and not chosen; 0 or less.")]
    ]
    basket: NotRequired[Annotated[float, Field(description="What is added because the item goes with the basket.")]]


class Repeat(TypedDict):
    """Why an item that the user has bought before is due."""

    times: Annotated[int, Field(description="How often the user has bought it.")]
    last_days: Annotated[float, Field(description="The number of days since the last purchase.")]
    interval_days: Annotated[float, Field(description="The median number of days after which the user buys it again.")]


class ScoredItem(TypedDict):
    """An item with its score. A higher score is better; scores compare only within one response."""

    item_id: str
    score: float
    title: NotRequired[str]
    pinned: NotRequired[
        Annotated[Literal[True], Field(description="The request or the scenario put the item at this place.")]
    ]
    fallback: NotRequired[
        Annotated[
            Literal[True], Field(description="Only the scenario's `fallback` allows the item; its filter does not.")
        ]
    ]
    cold: NotRequired[bool]  # true: no model has learned the item; live events or its categories represent it
    repeat: NotRequired[Annotated[Repeat, Field(description="With `mode` `repeat`: why the item is due.")]]
    explanation: NotRequired[Explanation]


Part = Literal[
    "catalogue",
    "available",
    "dates",
    "candidates",
    "current_item",
    "exclude",
    "basket",
    "exclude_events",
    "categories",
    "categories_all",
    "categories_none",
    "filter",
    "because",
    "basket_only",
    "mode",
    "log",
    "exclude_seen",
    "cursor",
    "max_per",
    "max_per_category",
]
"""Reasons to leave items out: the catalogue's size, availability and dates, fields of the request, an unread log."""


CurrentItem = Literal["missing", "unknown"]
"""Why expressions have no data about the page's item: the request names none, or one without any data."""


class Short(TypedDict):
    """Why a list has fewer items than requested."""

    reason: Annotated[
        Part,
        Field(
            description="The part of the request that left fewer than `k` items. `filter` includes its "
            "scenario's `fallback`. `cursor` means the previous pages. `available` and `dates` are those of the "
            "items. `catalogue`: it has fewer items itself. `log`: the log that `mode` `repeat` needs cannot be "
            "read now."
        ),
    ]
    left: Annotated[
        int, Field(description="The number of items that all parts except `max_per` and `max_per_category` left.")
    ]
    current_item: NotRequired[
        Annotated[
            CurrentItem,
            Field(description="The filter uses `current`, but the request's `current_item` is missing or unknown."),
        ]
    ]


class Removed(TypedDict):
    """How many items one part of a request left out, of those that the earlier parts had left."""

    part: Part
    condition: NotRequired[
        Annotated[
            str,
            Field(
                description="For a filter: one of the conditions that `&&` joins, which count one by one. "
                "For `max_per`: the property."
            ),
        ]
    ]
    items: int


WithoutValueReason = Literal["no current_item", "unknown current_item", "no user_id", "not set"]


class WithoutValue(TypedDict):
    """A name in an expression that has no value. Parts of the expression that need it are errors."""

    name: str
    reason: Annotated[
        WithoutValueReason,
        Field(description="Why there is no value. `not set`: not for this item, or not for this user."),
    ]


class Removals(TypedDict):
    """What each part of a request left of the catalogue."""

    items: Annotated[int, Field(description="The number of items in the catalogue.")]
    removed: list[Removed]
    left: int
    without_value: NotRequired[
        Annotated[
            list[WithoutValue],
            Field(description="Names of `current` and `user` in the request's expressions that have no value."),
        ]
    ]


class NamedItem(TypedDict):  # /openapi.json would show a docstring  # noqa: D101
    item_id: str
    title: NotRequired[str]
