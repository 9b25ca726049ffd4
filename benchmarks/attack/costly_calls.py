"""The costliest calls that each endpoint allows: each field of a request at its limit, alone and together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, urlencode

from app.recommendation import cost
from app.recommendation.cost import (
    charge_for,
    correction_charge,
    scenario_charge,
    update_charge,
    user_properties_charge,
)
from app.recommendation.scenarios import with_settings
from app.recommendation.state_reader import log_queries
from app.schemas.cursor import cursor_after
from app.schemas.events import MAX_EVENTS
from app.schemas.fields import (
    MAX_BASKET,
    MAX_BOOST_EXPRESSIONS,
    MAX_BOOSTS,
    MAX_CATEGORIES,
    MAX_CATEGORY_CHARS,
    MAX_ITEM_IDS,
    MAX_K,
    MAX_PARAM_TEXTS,
    MAX_PARAMS,
)
from app.schemas.items import MAX_ITEMS, SearchQuery
from app.schemas.properties import MAX_VALUE_BYTES
from app.schemas.recommendations import MAX_REQUESTS, RecommendationRequest
from app.schemas.scenarios import ScenarioSettings
from app.settings import Settings
from storage.items.vectors import MAX_NUMBERS
from storage.records import MAX_PROPERTIES

BOUND = 4.0  # nearly twice what was measured, or more, since processor time varies
SINGLE_EVENT_BOUND = 6.0  # it has a transaction of its own, whose cost other calls share
USER = "user-1"
LONG_USER = "user-long"
UNDONE_USER = "user-undone"
ARCHIVED_USER = "user-archived"
LONG_LOG = Settings().max_seen_events  # entries of LONG_USER
MOST = Settings().max_cost
UNLIMITED = 1 << 30
MAX_VALUES = 1_000_000  # different ones, which so have few digits: a body of them has to stay below the size limit
OPERATIONS = " || ".join(f"size(item.categories) > {n}" for n in range(31))  # as many as an expression may have
EXPRESSIONS: Mapping[str, Mapping[str, Any]] = {
    "filter": {"filter": f"params.n >= 0.0 && ({OPERATIONS})"},
    "debug": {"filter": f"params.n >= 0.0 && ({OPERATIONS})", "debug": True},
    "short filter": {"filter": 'params.n >= 0.0 && "a" in item.categories'},
    "boost by expressions": {
        "boost": [f"params.n < -{n}.5 || {OPERATIONS} ? 0.7 : 0.0" for n in range(MAX_BOOST_EXPRESSIONS)]
    },
    "short boost by an expression": {"boost": "double(size(item.categories)) * params.n"},
}
ARMS = "arm-1", "arm-2"  # copies of the model
PROPERTIES = [f"p{number}" for number in range(MAX_PROPERTIES)]
SHORT_HISTORY = 30  # entries of USER and others
LOG_LENGTHS = {LONG_USER: LONG_LOG, ARCHIVED_USER: LONG_LOG, USER: SHORT_HISTORY}


@dataclass(frozen=True)
class Log:
    """A log that a call requires; {number} in the user's name is how often the call was sent before."""

    user_id: str
    events: int


@dataclass(frozen=True)
class Call:
    """A call of the service.

    path     {number} in it is how often it was sent before
    body     its JSON, by the same number; None for none
    charge   what it counts against a key's rate
    bound    plain requests that a unit of the charge may take
    log      what is posted before each such call
    settled  the user whose state is folded again in the background, with {number} as in the path; "" for none
    """

    name: str
    method: str
    path: str
    body: Callable[[int], Any] | None = None
    charge: int = 1
    bound: float = BOUND
    log: Log | None = None
    settled: str = ""


def plain(user: str = USER) -> Call:
    """Return the reference call: ten items for a user."""
    return Call("plain", "GET", f"/v1/users/{user}/recommendations")


def recommendations(item_ids: Sequence[str], categories: Sequence[str]) -> list[Call]:
    """Return calls for recommendations with each field at its limit, and batches at the cost limit."""
    ids = [item_ids[n % len(item_ids)] for n in range(MAX_ITEM_IDS)]
    distinct = list(dict.fromkeys(ids))
    labels = [*categories, *(f"unknown {n}" for n in range(MAX_K))][:MAX_K]
    largest: dict[str, dict[str, Any]] = {
        "k": {"k": MAX_K},
        "explain": {"k": MAX_K, "explain": True},
        "diversity": {"k": MAX_K, "diversity": 0.5},
        "rotation": {"k": MAX_K, "rotation": 1.0},
        "max_per_category": {"k": MAX_K, "max_per_category": 1},
        "max_per": {"k": MAX_K, "max_per": {"categories": 1, "title": 1}},
        "history": {"history": ids},
        "unknown history": {"history": [f"unknown-{n}" for n in range(MAX_ITEM_IDS)]},
        "candidates": {"candidates": ids, "k": MAX_K},
        "exclude": {"exclude": ids},
        "basket": {"basket": ids[:MAX_BASKET], "k": MAX_K},
        "basket_only": {"basket": ids[:MAX_BASKET], "basket_only": True, "k": MAX_K},
        "cursor": {"cursor": cursor_after(distinct[: MAX_ITEM_IDS - 1]), "diversity": 0.5},
        "cursor and diversity": {"cursor": cursor_after(distinct[: MAX_ITEM_IDS // 3]), "diversity": 0.5, "k": MAX_K},
        "pin": {"k": MAX_K, "pin": [{"item_id": one, "place": n + 1} for n, one in enumerate(distinct[:MAX_K])]},
        "boost": {"boost": dict.fromkeys(labels[:MAX_BOOSTS], 0.5)},
        "boost of nobody": {
            "user_id": "nobody",
            "boost": {"unknown": 20.0} | dict.fromkeys(labels[: MAX_BOOSTS - 1], 1.0),
        },
        "params": {
            "filter": "size(params.p0) > 0",
            "params": {f"p{n}": [n + m / 100 for m in range(MAX_PARAM_TEXTS)] for n in range(MAX_PARAMS)},
        },
        "categories": {"categories": labels},
        "categories_all": {"categories_all": labels[:MAX_CATEGORIES]},
        "categories_none": {"categories_none": labels},
        "exclude_seen": {"user_id": LONG_USER, "exclude_seen": "all"},
        "exclude_seen of a short log": {"exclude_seen": "all"},
        "exclude_events": {"user_id": LONG_USER, "exclude_events": ["click", "purchase"], "within": "90d"},
        "repeat": {"user_id": LONG_USER, "mode": "repeat", "k": MAX_K, "diversity": 0.5},
        "because": {"because": ""},
        "of nobody": {"user_id": "nobody", "k": MAX_K, "diversity": 0.5, "max_per_category": 1},
    }
    together: dict[str, Any] = {}
    for fields in largest.values():
        together |= fields
    together |= {"user_id": USER}
    del together["history"], together["because"], together["exclude"], together["basket_only"], together["mode"]
    requests = {
        name: fields if "history" in fields else {"user_id": USER, **fields} for name, fields in largest.items()
    }
    requests["together"] = {**together, "exclude": ids[:1_000]}
    calls = [_post(name, request) for name, request in requests.items()]
    calls += [_evaluated(name, dict(wishes)) for name, wishes in EXPRESSIONS.items()]
    batched = "k", "explain", "candidates", "exclude_seen of a short log"
    batches: dict[str, dict[str, Any]] = {"plain": {}} | {name: largest[name] for name in batched}
    for name, fields in batches.items():
        request = {"user_id": USER, **fields}
        count = min(MAX_REQUESTS, int(MOST / (_charge([request] * 100) / 100)))
        calls.append(_post(f"batch of {count}: {name}", {"requests": [request] * count}))
    return calls


def _post(name: str, body: dict[str, Any]) -> Call:
    return Call(name, "POST", "/v1/recommendations", lambda _: body, _charge(body.get("requests", [body])))


def _evaluated(name: str, wishes: dict[str, Any]) -> Call:
    """Return a call whose expressions are evaluated again each time."""

    def body(number: int) -> dict[str, Any]:
        return {"user_id": USER, **wishes, "params": {"n": number}}

    return Call(name, "POST", "/v1/recommendations", body, _charge([body(0)]))


def _charge(requests: Sequence[dict[str, Any]]) -> int:
    parsed = [RecommendationRequest.model_validate(one) for one in requests]
    return charge_for(parsed, UNLIMITED, [LOG_LENGTHS[log.user_id] for log in log_queries(parsed)])


def portable(state: str, item_ids: Sequence[str]) -> list[Call]:
    """Return calls with this sealed state."""
    recent = [item_ids[number % len(item_ids)] for number in range(MAX_EVENTS)]
    few = {"state": state, "events": [{"event_id": "new", "item_id": item_ids[0]}]}
    many = {"state": state, "events": [{"event_id": f"new-{n}", "item_id": item} for n, item in enumerate(recent)]}
    plain_list = {"state": state}
    return [
        Call("portable event", "POST", "/v1/portable/events", lambda _: few),
        Call("portable events", "POST", "/v1/portable/events", lambda _: many, MAX_EVENTS),
        Call("portable list", "POST", "/v1/portable/recommendations", lambda _: plain_list),
    ]


def searches(items: int) -> list[Call]:
    """Return the costliest searches of a catalogue of this size: many items have these letters."""
    words = "e a i o t n r s"
    queries = {
        "search": SearchQuery(query="e", limit=MAX_K),
        "words": SearchQuery(query=words),
        "personal search": SearchQuery(query="e", limit=MAX_K, user_id=USER),
        "personal words": SearchQuery(query=words, user_id=USER),
    }
    return [
        Call(
            name,
            "GET",
            f"/v1/items?{urlencode(query.model_dump(exclude_unset=True))}",
            None,
            cost.search_charge(query, len(query.query.split()), items, MOST),
        )
        for name, query in queries.items()
    ]


def other_reads(item_ids: Sequence[str], categories: Sequence[str]) -> list[Call]:
    """Return the costliest calls of all other reads."""
    item = item_ids[0]
    labels = [*categories, *map(str, range(MAX_K))][:600]  # as many as fit into an address
    listed = "&".join(f"categories={quote(one)}" for one in labels)
    similar = RecommendationRequest(history=[], k=MAX_K, explain=True)
    with_item = RecommendationRequest(history=[], k=MAX_K, basket=[item], basket_only=True)
    by_query = RecommendationRequest(user_id=USER, k=MAX_K, explain=True, diversity=0.5)
    query = f"k={MAX_K}&explain=true&diversity=0.5"
    return [
        Call("by query", "GET", f"/v1/users/{USER}/recommendations?{query}", None, charge_for([by_query], MOST)),
        Call("similar", "GET", f"/v1/items/{item}/similar?k={MAX_K}&explain=true", None, charge_for([similar], MOST)),
        Call("goes with", "GET", f"/v1/items/{item}/together?k={MAX_K}", None, charge_for([with_item], MOST)),
        Call("popular", "GET", f"/v1/items/popular?k={MAX_K}", None, cost.list_charge(MAX_K)),
        Call("trending", "GET", f"/v1/items/trending?k={MAX_K}&{listed}", None, cost.list_charge(MAX_K, len(labels))),
        *searches(len(item_ids)),
        Call("item", "GET", f"/v1/items/{item}", None, cost.ITEM),
        Call("state", "GET", f"/v1/users/{LONG_USER}"),
        Call("log", "GET", f"/v1/users/{LONG_USER}/events?limit={MAX_K}", None, 1 + MAX_K // cost.LOGGED_EVENTS),
        Call("user properties", "GET", f"/v1/users/{USER}/properties"),
        Call("model", "GET", "/v1/model"),
        Call("stats", "GET", "/v1/stats", None, cost.statistics_charge(1)),
        Call("metrics", "GET", "/metrics", None, cost.METRICS),
        Call("experiment", "GET", "/v1/admin/experiment"),
        Call("types", "GET", "/v1/admin/properties"),
        Call("audit log", "GET", f"/v1/admin/audit?limit={MAX_K}", None, 1 + MAX_K // cost.LOGGED_EVENTS),
        Call("description", "GET", "/openapi.json"),
        Call("script", "GET", "/client.js"),
        Call("health", "GET", "/healthz"),
        Call("readiness", "GET", "/readyz"),
    ]


def archived_reads(files: int) -> list[Call]:
    """Return calls that read the log of ARCHIVED_USER, which is in this many files of the archive."""
    from_files = cost.archive_charge(files) - 1
    page = Call("log", "GET", f"/v1/users/{ARCHIVED_USER}/events?limit={MAX_K}", charge=1 + MAX_K // cost.LOGGED_EVENTS)
    seen = _post("exclude_seen", {"user_id": ARCHIVED_USER, "exclude_seen": "all"})
    again = _post("repeat", {"user_id": ARCHIVED_USER, "mode": "repeat", "k": MAX_K})
    calls = page, seen, again
    return [replace(call, name=f"archived {call.name}", charge=call.charge + from_files) for call in calls]


def writes(item_ids: Sequence[str]) -> list[Call]:
    """Return the costliest writes of events and items, with bodies close to the size limit."""

    def events(number: int) -> list[dict[str, Any]]:
        return [
            {
                "event_id": f"e{number}-{n}".ljust(128, "-"),
                "user_id": f"user-{n}".ljust(128, "-"),
                "item_id": item_ids[n % len(item_ids)],
                "timestamp": f"2026-01-01T00:00:{n % 60:02}.{n:06}Z",
                "recommendation_id": "x" * 128,
                "value": n,
            }
            for n in range(MAX_EVENTS)
        ]

    def event(number: int) -> dict[str, Any]:
        return events(number)[0] | {"event_id": f"one-{number}"}

    def items(number: int) -> list[dict[str, Any]]:
        labels = [f"label {number} {n}".ljust(50) for n in range(10)]
        chosen = item_ids[:MAX_ITEMS]
        return [{"item_id": one, "title": f"title {number}".ljust(400), "categories": labels} for one in chosen]

    def item(number: int) -> dict[str, Any]:
        labels = [f"label {number} {n}".ljust(MAX_CATEGORY_CHARS) for n in range(MAX_K)]
        return {"title": f"title {number}".ljust(1_024), "categories": labels}

    def labelled_items(number: int) -> list[dict[str, Any]]:
        labels = [f"{n:x}{number}" for n in range(100)]
        return [{"item_id": one, "categories": labels} for one in item_ids[:MAX_ITEMS]]

    def items_with_properties(number: int) -> list[dict[str, Any]]:
        values = dict.fromkeys(PROPERTIES, number % MAX_VALUES)
        return [{"item_id": one, "properties": values} for one in item_ids[:MAX_ITEMS]]

    def items_with_vectors(number: int) -> list[dict[str, Any]]:
        first = number % MAX_VALUES
        vector = [n / 1000 for n in range(first, first + MAX_NUMBERS)]
        return [{"item_id": one, "vector": vector} for one in item_ids[:100]]

    def properties(number: int) -> dict[str, Any]:
        return {"properties": dict.fromkeys(PROPERTIES, f"{number}".ljust(MAX_VALUE_BYTES))}

    of_user = f"/v1/users/{USER}/properties"
    return [
        Call("event", "POST", "/v1/events", event, bound=SINGLE_EVENT_BOUND),
        Call("events", "POST", "/v1/events", events, MAX_EVENTS),  # whose trends are counted for a while
        Call("items", "POST", "/v1/items", items, update_charge(items(0))),
        Call("items of many categories", "POST", "/v1/items", labelled_items, update_charge(labelled_items(0))),
        Call("properties", "POST", "/v1/items", items_with_properties, update_charge(items_with_properties(0))),
        Call("vectors", "POST", "/v1/items", items_with_vectors, update_charge(items_with_vectors(0))),
        Call("put user properties", "PUT", of_user, properties, user_properties_charge(properties(0))),
        Call("put item", "PUT", f"/v1/items/{item_ids[0]}", item, update_charge([item(0)])),
    ]


def corrections(log: int) -> list[Call]:
    """Return calls that correct logs, each of them with this many entries."""
    charge = correction_charge(log)
    undone, erased = f"/v1/users/{UNDONE_USER}/events/{UNDONE_USER}-{{number}}", "/v1/users/erased-{number}"
    visitor = Log("visitor-{number}", log)
    return [
        Call("undo", "DELETE", undone, charge=charge, settled=UNDONE_USER),
        Call(
            "merge",
            "POST",
            "/v1/users/merged-{number}/merge",
            lambda number: {"from": f"visitor-{number}"},
            correction_charge(log, cost.MERGED_EVENTS),
            log=visitor,
            settled="merged-{number}",
        ),
        Call("erase", "DELETE", erased, charge=charge, log=Log("erased-{number}", log)),
    ]


def operations() -> list[Call]:
    """Return the calls of operators; the last one ends what the others started."""
    shares = dict.fromkeys(ARMS, 1.0)

    def weighed(number: int) -> dict[str, Any]:
        return {"user_id": USER, "objective": {"property": PROPERTIES[0], "strength": (1 + number % 999) / 1_000}}

    types = {"items": dict.fromkeys(PROPERTIES, "number")}
    return [
        Call("activate", "POST", "/v1/admin/generations/shop/activate", charge=cost.LOADED_MODEL),
        Call(
            "begin experiment",
            "PUT",
            "/v1/admin/experiment",
            lambda number: {"name": f"n{number}", "shares": shares},
            cost.LOADED_MODEL * len(ARMS),
        ),
        Call("end experiment", "DELETE", "/v1/admin/experiment", None, cost.OPERATION),
        Call("declare types", "PUT", "/v1/admin/properties", lambda _: types, cost.OPERATION),
        Call("objective", "POST", "/v1/recommendations", weighed, _charge([weighed(0)])),
        *scenario_calls(),
    ]


def scenario_calls() -> list[Call]:
    """Return calls about a scenario whose versions are close to the size limit. Each needs the previous ones."""

    def largest(number: int) -> dict[str, Any]:
        padding = {"exclude": [f"{number}-{n}".ljust(128, "-") for n in range(40)]}
        declared = {"n": {"type": "number", "default": number}}
        filters = {"filter": f"params.n < 0.0 && ({OPERATIONS})", "fallback": f"params.n >= 0.0 && ({OPERATIONS})"}
        objective = {"property": PROPERTIES[0], "strength": 0.5}
        boosts = EXPRESSIONS["boost by expressions"]
        return {**boosts, **padding, **filters, "objective": objective, "params": declared}

    def previewed(number: int) -> dict[str, Any]:
        return {"settings": largest(number), "request": {"user_id": USER}}

    every, one = "/v1/admin/scenarios", "/v1/admin/scenarios/home"
    put = scenario_charge(ScenarioSettings.model_validate(largest(0)))
    request = with_settings(RecommendationRequest(user_id=USER), ScenarioSettings.model_validate(largest(0)))
    return [
        Call("put scenario", "PUT", one, largest, put),
        Call("scenario", "GET", one),
        Call("scenarios", "GET", every, None, cost.SCENARIOS),
        Call("versions", "GET", f"{one}/versions", None, cost.SCENARIOS),
        Call("roll back", "POST", f"{one}/rollback", lambda _: {}, put),
        Call("preview", "POST", "/v1/admin/preview", previewed, charge_for([request], MOST)),
        Call("remove scenario", "DELETE", one, None, cost.SCENARIOS),
    ]


def endpoint_of(call: Call, paths: Iterable[str]) -> str:
    """Return the method and the path template of a call, as in the OpenAPI document."""
    path = call.path.partition("?")[0]
    found = [one for one in paths if re.fullmatch(re.sub(r"{\w+}", "[^/]+", one), path)]
    return f"{call.method} {min(found, key=lambda one: one.count('{'), default=path)}"


def unmeasured(paths: Mapping[str, Mapping[str, Any]], calls: Sequence[Call]) -> list[str]:
    """Return the endpoints of an OpenAPI document that no call covers."""
    measured = {endpoint_of(call, paths) for call in calls}
    documented = [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    return [one for one in documented if one not in measured]
