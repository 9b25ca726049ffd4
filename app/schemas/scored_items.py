"""Items of an answer, with their scores and what explains them."""

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict


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
    """What the score is the sum of (from `codewords` to `follows`, and from `boost` to `basket`), and why it is so."""

    codewords: Annotated[list[TargetCodeword], Field(description="the three that add most")]
    other_codewords: Annotated[float, Field(description="what the others add")]
    bias: Annotated[float, Field(description="what the item has for everybody")]
    follows: Annotated[float, Field(description="what is added since the item has often followed recent ones")]
    history: Annotated[list[HistoryCodeword], Field(description="the three that most of the user's history has")]
    recent_items: Annotated[list[RecentItem], Field(description="the three that add most")]
    boost: NotRequired[Annotated[float, Field(description="what the request adds for its categories")]]
    objective: NotRequired[
        Annotated[float, Field(description="what is added for the item's value, below 0 for less than the median")]
    ]
    rotation: NotRequired[
        Annotated[float, Field(description="what the item loses since it was shown and not chosen; 0 or less")]
    ]
    basket: NotRequired[Annotated[float, Field(description="what is added since it goes with the basket")]]


class Repeat(TypedDict):
    """What makes an item due that the user has bought before."""

    times: Annotated[int, Field(description="how often the user has bought it")]
    last_days: Annotated[float, Field(description="how many days ago for the last time")]
    interval_days: Annotated[float, Field(description="after how many days the user buys it again, in the median")]


class ScoredItem(TypedDict):
    """The higher the score, the better; scores of one answer compare with each other only."""

    item_id: str
    score: float
    title: NotRequired[str]
    pinned: NotRequired[Annotated[Literal[True], Field(description="stands here since the request wants it")]]
    fallback: NotRequired[
        Annotated[Literal[True], Field(description="the scenario's `fallback` allows it, its filter does not")]
    ]
    cold: NotRequired[bool]  # true: no model has learned the item, live events or its categories tell of it
    repeat: NotRequired[Annotated[Repeat, Field(description="with `mode` repeat: why it is due")]]
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
"""What leaves items out: the catalogue's size, items' availability and dates, fields of the request, an unread log."""


CurrentItem = Literal["missing", "unknown"]
"""Why expressions know nothing of the page's item: the request names none, or one that nobody has said anything of."""


class Short(TypedDict):
    """Why a list has fewer items than were requested."""

    reason: Annotated[
        Part,
        Field(
            description="after what fewer than `k` items were left: a field of the request; `filter` with its "
            "scenario's `fallback`; `cursor` are the pages before; `available` and `dates` are those of items; "
            "`catalogue` has fewer itself; the `log` that `mode` repeat goes by cannot be read now"
        ),
    ]
    left: Annotated[int, Field(description="how many items were left by all but `max_per` and `max_per_category`")]
    current_item: NotRequired[
        Annotated[CurrentItem, Field(description="the filter names `current`, and the request's `current_item` is so")]
    ]


class Removed(TypedDict):
    """How many items one part of a request left out, of those that the parts before it had left."""

    part: Part
    condition: NotRequired[
        Annotated[
            str, Field(description="of a filter: what `&&` joins is counted one by one; of `max_per` the property")
        ]
    ]
    items: int


WithoutValueReason = Literal["no current_item", "unknown current_item", "no user_id", "not set"]


class WithoutValue(TypedDict):
    """A name in an expression that has no value, which makes an error of what needs it."""

    name: str
    reason: Annotated[WithoutValueReason, Field(description="`not set`: of this item, or of this user")]


class Removals(TypedDict):
    """What became of the items of the catalogue, part by part."""

    items: Annotated[int, Field(description="of the catalogue")]
    removed: list[Removed]
    left: int
    without_value: NotRequired[
        Annotated[list[WithoutValue], Field(description="names of `current` and `user` in the request's expressions")]
    ]


class NamedItem(TypedDict):  # /openapi.json would show a docstring  # noqa: D101
    item_id: str
    title: NotRequired[str]
