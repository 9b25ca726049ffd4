"""The costliest calls that each endpoint allows: each field of a request at its limit, alone and together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from app.recommendation import cost
from app.recommendation.cost import charge_for
from app.schemas.cursor import cursor_after
from app.schemas.events import MAX_EVENTS
from app.schemas.fields import MAX_BOOSTS, MAX_CATEGORIES, MAX_ITEM_IDS, MAX_K
from app.schemas.items import MAX_ITEMS
from app.schemas.recommendations import MAX_REQUESTS, RecommendationRequest
from app.settings import Settings

BOUND = 4.0  # at least twice what was measured, since processor time varies
LOG_BOUND = 60.0  # of the longest log, of which few are read at a time
OPERATOR_BOUND = 12.0  # of numbers that only operators read
USER = "user-1"
LONG_USER = "user-long"
MOST = Settings().max_cost
UNLIMITED = 1 << 30


@dataclass(frozen=True)
class Call:
    """A call of the service.

    body    its JSON, by how often it was sent before; None for none
    charge  what it counts against a key's rate
    bound   plain requests that a unit of the charge may take
    """

    name: str
    method: str
    path: str
    body: Callable[[int], Any] | None = None
    charge: int = 1
    bound: float = BOUND


def plain(user: str = USER) -> Call:
    """Return the call that all others are compared with: ten items for a user."""
    return Call("plain", "GET", f"/v1/users/{user}/recommendations")


def recommendations(item_ids: Sequence[str], categories: Sequence[str]) -> list[Call]:
    """Return calls for recommendations with each field at its limit, and batches that cost as much as is allowed."""
    ids = [item_ids[n % len(item_ids)] for n in range(MAX_ITEM_IDS)]
    distinct = list(dict.fromkeys(ids))
    labels = [*categories, *(f"unknown {n}" for n in range(MAX_K))][:MAX_K]
    largest: dict[str, dict[str, Any]] = {
        "k": {"k": MAX_K},
        "explain": {"k": MAX_K, "explain": True},
        "diversity": {"k": MAX_K, "diversity": 0.5},
        "max_per_category": {"k": MAX_K, "max_per_category": 1},
        "history": {"history": ids},
        "unknown history": {"history": [f"unknown-{n}" for n in range(MAX_ITEM_IDS)]},
        "candidates": {"candidates": ids, "k": MAX_K},
        "exclude": {"exclude": ids},
        "cursor": {"cursor": cursor_after(distinct[: MAX_ITEM_IDS - 1]), "diversity": 0.5},
        "pin": {"k": MAX_K, "pin": [{"item_id": one, "place": n + 1} for n, one in enumerate(distinct[:MAX_K])]},
        "boost": {"boost": dict.fromkeys(labels[:MAX_BOOSTS], 0.5)},
        "categories": {"categories": labels},
        "categories_all": {"categories_all": labels[:MAX_CATEGORIES]},
        "categories_none": {"categories_none": labels},
        "exclude_seen": {"user_id": LONG_USER, "exclude_seen": "all"},
        "because": {"because": ""},
        "of nobody": {"user_id": "nobody", "k": MAX_K, "diversity": 0.5, "max_per_category": 1},
    }
    together: dict[str, Any] = {}
    for fields in largest.values():
        together |= fields
    together |= {"user_id": USER}
    del together["history"], together["because"], together["exclude"]
    requests = {
        name: fields if "history" in fields else {"user_id": USER, **fields} for name, fields in largest.items()
    }
    requests["together"] = {**together, "exclude": ids[:1_000]}
    calls = [_post(name, request) for name, request in requests.items()]
    batches = {"plain": {}, "k": largest["k"], "explain": largest["explain"], "candidates": largest["candidates"]}
    for name, fields in batches.items():
        request = {"user_id": USER, **fields}
        count = min(MAX_REQUESTS, int(MOST / (_charge([request] * 100) / 100)))
        calls.append(_post(f"batch of {count}: {name}", {"requests": [request] * count}))
    return calls


def _post(name: str, body: dict[str, Any]) -> Call:
    bound = LOG_BOUND if body.get("exclude_seen") == "all" else BOUND
    charge = _charge(body.get("requests", [body]))
    return Call(name, "POST", "/v1/recommendations", lambda _: body, charge, bound)


def _charge(requests: Sequence[dict[str, Any]]) -> int:
    return charge_for([RecommendationRequest.model_validate(one) for one in requests], UNLIMITED)


def other_reads(item_ids: Sequence[str], categories: Sequence[str]) -> list[Call]:
    """Return the costliest calls of what else can be read."""
    item = item_ids[0]
    listed = "&".join(f"categories={quote(one)}" for one in categories[:100])
    similar = RecommendationRequest(history=[], k=MAX_K, explain=True)
    return [
        Call("similar", "GET", f"/v1/items/{item}/similar?k={MAX_K}&explain=true", None, charge_for([similar], MOST)),
        Call("popular", "GET", f"/v1/items/popular?k={MAX_K}", None, 1 + MAX_K // cost.LISTED_ITEMS),
        Call("trending", "GET", f"/v1/items/trending?k={MAX_K}&{listed}", None, 1 + MAX_K // cost.LISTED_ITEMS),
        Call("search", "GET", f"/v1/items?limit={MAX_K}&query=e", None, 1 + MAX_K // cost.FOUND_ITEMS),
        Call("item", "GET", f"/v1/items/{item}"),
        Call("state", "GET", f"/v1/users/{LONG_USER}"),
        Call("log", "GET", f"/v1/users/{LONG_USER}/events?limit={MAX_K}", None, 1 + MAX_K // cost.LOGGED_EVENTS),
        Call("model", "GET", "/v1/model"),
        Call("stats", "GET", "/v1/stats"),
        Call("metrics", "GET", "/metrics", bound=OPERATOR_BOUND),
        Call("description", "GET", "/openapi.json"),
        Call("health", "GET", "/healthz"),
        Call("readiness", "GET", "/readyz"),
    ]


def writes(item_ids: Sequence[str]) -> list[Call]:
    """Return the costliest calls that write."""

    def events(number: int) -> list[dict[str, str]]:
        return [
            {"event_id": f"e{number}-{n}", "user_id": f"user-{n}", "item_id": item_ids[n % len(item_ids)]}
            for n in range(MAX_EVENTS)
        ]

    def items(number: int) -> list[dict[str, Any]]:
        chosen = item_ids[:MAX_ITEMS]
        return [{"item_id": one, "title": f"title {number}", "categories": ["tea", "cup"]} for one in chosen]

    return [
        Call("events", "POST", "/v1/events", events, MAX_EVENTS),
        Call("event", "POST", "/v1/events", lambda number: events(number)[0] | {"event_id": f"one-{number}"}),
        Call("items", "POST", "/v1/items", items, 1 + MAX_ITEMS // cost.UPDATED_ITEMS),
        Call("undo", "DELETE", f"/v1/users/{USER}/events/history-40"),
        Call("erase", "DELETE", "/v1/users/nobody-at-all"),
        Call("merge", "POST", f"/v1/users/{USER}/merge", lambda number: {"from": f"visitor-{number}"}),
    ]
