"""What lists may be asked for beside whose they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict


class Wishes(TypedDict, total=False):
    """What `POST /v1/recommendations` takes beside the user, under the same names.

    Without a store there are no properties of items beside `title` and `categories`, no scenarios and no users.
    """

    categories: Sequence[str]
    categories_all: Sequence[str]
    categories_none: Sequence[str]
    exclude: Sequence[str]
    exclude_seen: Literal["none", "recent", "all"]
    candidates: Sequence[str]
    filter: str
    boost: Mapping[str, float] | str | Sequence[str]
    params: Mapping[str, object]
    pin: Sequence[Mapping[str, object]]
    diversity: float
    max_per_category: int
    because: str
    basket: Sequence[str]
    basket_only: bool
    current_item: str
    cursor: str


def request_fields(history: Sequence[str], k: int, wishes: Wishes, *, explain: bool = False) -> dict[str, object]:
    """Return the fields of a request, as JSON has them; raise TypeError for a text in the place of a list."""
    if isinstance(history, str):
        raise TypeError("history is a list of item ids, oldest first, and not one text")
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in wishes.items()}
    return {"history": list(history), "k": k, "explain": explain, **lists}
