"""Short lists name the reason, and `debug` counts the items removed by each option, against a slow count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.http.auth.keys import Scope, add, make
from app.schemas.cursor import cursor_after, shown_before
from app.settings import Settings
from storage.state.layout import ITEM_RING
from tests.app.conftest import CATEGORIES, CLICKS, ITEMS, Client, categories_of, item_id
from tests.app.support import ALL_ITEMS, assert_refused, bearer, item_ids, recommend

NAMES = ("current.brand", "current.price")
LABELS = [*CATEGORIES, "new", "unknown"]
NOW = datetime.now(UTC)
AHEAD, BEFORE = NOW + timedelta(days=400), NOW - timedelta(days=1)
PLAIN = {"price": None, "brand": None, "available": True, "available_from": None, "available_until": None}
CONDITIONS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "item.price < 3.0": lambda item: item["price"] is not None and item["price"] < 3.0,
    "!(item.price < 3.0)": lambda item: item["price"] is not None and item["price"] >= 3.0,
    '(("tea" in item.categories && "&& é)" != "") || !known(item.price))': lambda item: (
        "tea" in item["categories"] or item["price"] is None
    ),
    "(item.price > 1.0 && item.available)": lambda item: (
        item["price"] is not None and item["price"] > 1.0 and item["available"]
    ),
    'item.categories.exists(c, c == "cup" && true)': lambda item: "cup" in item["categories"],
    "known(item.price)": lambda item: item["price"] is not None,
}

some_items = st.lists(st.sampled_from([*ALL_ITEMS, "unheard-of"]), max_size=40)
changes = st.lists(
    st.tuples(
        st.sampled_from(ALL_ITEMS),
        st.fixed_dictionaries(
            {
                "price": st.none() | st.sampled_from([1.0, 2.0, 3.0]),
                "brand": st.none() | st.sampled_from(["Hill", "Vale"]),
                "categories": st.lists(st.sampled_from(LABELS[:-1]), unique=True, max_size=3),
                "available": st.booleans(),
                "available_from": st.sampled_from([None, BEFORE, AHEAD]),
                "available_until": st.sampled_from([None, BEFORE, AHEAD]),
            }
        ),
    ),
    max_size=20,
)
wishes = {
    "candidates": some_items,
    "exclude": some_items,
    "exclude_events": st.just(["click"]),
    "categories": st.lists(st.sampled_from(LABELS), min_size=1, max_size=3),
    "categories_all": st.lists(st.sampled_from(LABELS), min_size=1, max_size=2),
    "categories_none": st.lists(st.sampled_from(LABELS), min_size=1, max_size=2),
    "filter": st.lists(st.sampled_from(sorted(CONDITIONS)), min_size=1, max_size=3, unique=True),
    "fallback": st.lists(st.sampled_from(sorted(CONDITIONS)), min_size=1, max_size=2, unique=True),
    "current_item": st.sampled_from([*ALL_ITEMS, "unheard-of"]),
    "because": st.sampled_from(["", *ALL_ITEMS]),
    "cursor": some_items.map(lambda ids: cursor_after(list(dict.fromkeys(ids))) if ids else ""),
    "max_per": st.fixed_dictionaries({"brand": st.integers(1, 8)}),
    "max_per_category": st.integers(1, 8),
    "diversity": st.just(0.4),
    "pin": st.lists(st.sampled_from(ALL_ITEMS), unique=True, max_size=3).map(
        lambda ids: [{"item_id": one, "place": 3 * n + 1} for n, one in enumerate(ids)]
    ),
}
requests = st.tuples(
    st.fixed_dictionaries(
        {
            "exclude_seen": st.sampled_from(["none", "recent", "all"]),
            "k": st.integers(1, 40),
            "user_id": st.sampled_from(["clicker", "nobody"]),
        }
    ),
    st.sets(st.sampled_from(sorted(wishes)), max_size=4).flatmap(
        lambda names: st.fixed_dictionaries({name: wishes[name] for name in sorted(names)})
    ),
).map(lambda parts: {**parts[0], **parts[1]})


class Shop:
    """A service, and the data of its items by id."""

    def __init__(self, client: Client) -> None:
        self.client = client
        client.click("clicker", *CLICKS)
        declared = client.request("PUT", "/v1/admin/properties", json={"items": {"price": "number", "brand": "text"}})
        assert declared.status_code == 200
        self.items = {one: {**PLAIN, "categories": categories_of(row)} for row, one in enumerate(ALL_ITEMS)}

    def change(self, changes: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self.items |= dict(changes)
        posted = [
            {
                "item_id": one,
                "properties": {"price": item["price"], "brand": item["brand"]},
                "available": item["available"],
                "categories": item["categories"],
                **{name: item[name] and item[name].isoformat() for name in ("available_from", "available_until")},
            }
            for one, item in dict(changes).items()
        ]
        if posted:
            assert self.client.post("/v1/items", json=posted).status_code == 200
        self.client.runner.run(self.client.service.switcher.poll())


@pytest.fixture(scope="module")
def changing_shop(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    client = Client(Settings(model_dir=model_dir, data_dir=tmp_path_factory.mktemp("state")))
    yield Shop(client)
    client.close()


def has_room(taken: set[str], labels: dict[str, set[Any]], most: int) -> Callable[[str], bool]:
    """Whether each label of an item still has room among the chosen ones."""
    counts = Counter(label for one in taken for label in labels[one])
    full = {label for label, count in counts.items() if count >= most}
    return lambda one: one in taken or not labels[one] & full


def parts_by_definition(
    items: dict[str, Any], request: dict[str, Any], answer: dict[str, Any], *, with_fallback: bool = False
) -> list[tuple[str, str | None, Callable[[str], bool]]]:
    """Each part of the request in order, the condition of a filter, and whether an item passes.

    with_fallback  the filter lets pass what the fallback does, too
    """
    labels = {one: set(item["categories"]) for one, item in items.items()}
    clicks = CLICKS if request["user_id"] == "clicker" else []
    seen = {"none": [], "recent": clicks[-ITEM_RING:], "all": clicks}[request["exclude_seen"]]
    shown = request["shown"]
    pinned = {pin["item_id"] for pin in request.get("pin", ())}
    listed = [item["item_id"] for item in answer["items"] if with_fallback or "fallback" not in item]
    parts: list[tuple[str, str | None, Callable[[str], bool]]] = [
        ("available", None, lambda one: items[one]["available"]),
        ("dates", None, lambda one: items[one]["available_from"] != AHEAD and items[one]["available_until"] != BEFORE),
    ]
    if "candidates" in request:
        parts.append(("candidates", None, lambda one: one in request["candidates"]))
    if request.get("exclude"):
        parts.append(("exclude", None, lambda one: one not in request["exclude"]))
    if "exclude_events" in request:
        parts.append(("exclude_events", None, lambda one: one not in clicks))
    if "categories" in request:
        parts.append(("categories", None, lambda one: bool(labels[one] & set(request["categories"]))))
    if "categories_all" in request:
        parts.append(("categories_all", None, lambda one: labels[one] >= set(request["categories_all"])))
    if "categories_none" in request:
        parts.append(("categories_none", None, lambda one: not labels[one] & set(request["categories_none"])))
    conditions = request.get("filter", ())
    if with_fallback:
        either = [[CONDITIONS[text] for text in request[field]] for field in ("filter", "fallback")]
        parts.append(("filter", None, lambda one: any(all(meets(items[one]) for meets in all_) for all_ in either)))
    else:
        parts += [("filter", text, lambda one, meets=CONDITIONS[text]: meets(items[one])) for text in conditions]  # type: ignore[misc]
    if "because" in answer:
        parts.append(("because", None, lambda one: one != answer["because"]["item_id"]))
    passed = {one for one in items if all(passes(one) for _, _, passes in parts)}
    pinned &= passed - set(shown)
    if "current_item" in request and answer.get("because", {}).get("item_id") != request["current_item"]:
        of_page = ("current_item", None, lambda one: one != request["current_item"] or one in pinned)
        parts.insert(2 + ("candidates" in request), of_page)
    if request["exclude_seen"] != "none":
        parts.append(("exclude_seen", None, lambda one: one not in seen or one in pinned))
    if shown:
        parts.append(("cursor", None, lambda one: one not in shown))
    taken = {one for one in [*listed, *pinned, *shown] if one in items}
    brands = {one: {item["brand"]} - {None} for one, item in items.items()}
    if "max_per" in request:
        parts.append(("max_per", "brand", has_room(taken, brands, request["max_per"]["brand"])))
    if "max_per_category" in request:
        parts.append(("max_per_category", None, has_room(taken, labels, request["max_per_category"])))
    return parts


def asked(client: Client, request: dict[str, Any], **wish: Any) -> Any:
    """The response to a request with these conditions as filter and fallback; a scenario sets the fallback."""
    expressions = {name: " && ".join(request[name]) for name in ("filter", "fallback") if name in request}
    posted = {name: value for name, value in request.items() if name not in expressions} | wish
    if "fallback" not in expressions:
        return recommend(client, **posted, **expressions)
    response = client.post("/v1/admin/preview", json={"settings": expressions, "request": posted})
    assert response.status_code == 200, response.text
    return response.json()


def slow_count(
    parts: list[tuple[str, str | None, Callable[[str], bool]]], k: int
) -> tuple[list[dict[str, Any]], set[str], dict[str, Any]]:
    """Items removed by each part, the remaining items, and why there are fewer than k."""
    left, removed, reason, before_limit = set(ALL_ITEMS), [], None, None
    for part, condition, passes in parts:
        kept = {one for one in left if passes(one)}
        removed.append({"part": part, "items": len(left - kept)} | ({"condition": condition} if condition else {}))
        if len(kept) < k <= len(left):
            reason = part
        if part.startswith("max_per") and before_limit is None:
            before_limit = len(left)
        left = kept
    return removed, left, {"reason": reason, "left": len(left) if before_limit is None else before_limit}


@given(changes, requests)
@settings(max_examples=100)
def test_removal_counts_equal_a_slow_count(
    changing_shop: Shop, found: Sequence[tuple[str, dict[str, Any]]], request_: dict[str, Any]
) -> None:
    changing_shop.change(found)
    shown = shown_before(request_["cursor"]) if request_.get("cursor") else []
    if "filter" not in request_:
        request_.pop("fallback", None)
    request = {**request_, "shown": shown}
    answer = asked(changing_shop.client, request_, debug=True)
    removed, left, short = slow_count(parts_by_definition(changing_shop.items, request, answer), request_["k"])
    assert answer["debug"] == {"items": ITEMS, "removed": removed, "left": len(left)}
    assert {item["item_id"] for item in answer["items"] if "fallback" not in item} <= left
    if "fallback" in request_:
        parts = parts_by_definition(changing_shop.items, request, answer, with_fallback=True)
        _, left, short = slow_count(parts, request_["k"])
    listed = item_ids(answer)
    assert set(listed) <= left
    if len(listed) < request_["k"]:
        assert len(left) == len(listed)
        assert answer["short"] == short
    else:
        assert "short" not in answer
    assert asked(changing_shop.client, request_).get("short") == answer.get("short")


def test_every_kind_of_request_reports_removals(client: Client) -> None:
    client.click("ada", item_id(3))
    wish = {"categories": ["nothing"], "k": 5}
    short = {"reason": "categories", "left": 0}
    for user in ("ada", "nobody"):
        answers = [client.recommend(user, **wish), recommend(client, user_id=user, **wish)]
        answers += client.post("/v1/recommendations", json={"requests": [{"user_id": user, **wish}] * 2}).json()[
            "results"
        ]
        assert [answer["short"] for answer in answers] == [short] * 4
        debug = client.recommend(user, **wish, debug="true")["debug"]
        assert debug["removed"][2] == {"part": "categories", "items": ITEMS}
        assert "short" not in client.recommend(user, k=5)
    similar = client.get("/v1/items/item-1/similar", params={**wish, "debug": "true"}).json()
    assert (similar["short"], similar["debug"]["left"]) == (short, 0)
    removed = client.get("/v1/items/item-1/similar", params={"debug": "true"}).json()["debug"]["removed"]
    assert [one["part"] for one in removed] == ["available", "dates", "because", "exclude_seen"]
    assert removed[2]["items"] == 1
    assert client.recommend("nobody", k=100)["short"] == {"reason": "catalogue", "left": ITEMS}


@pytest.mark.parametrize("user", ["ada", "nobody"])
@pytest.mark.parametrize(
    ("wish", "reasons", "of_page"),
    [
        ({}, dict.fromkeys(NAMES, "no current_item"), "missing"),
        ({"current_item": "unheard-of"}, dict.fromkeys(NAMES, "unknown current_item"), "unknown"),
        ({"current_item": item_id(1)}, dict.fromkeys(NAMES, "not set"), None),
        ({"current_item": item_id(0)}, {"current.price": "not set"}, None),
    ],
)
def test_a_property_without_values_is_named_in_the_reason(
    client: Client, user: str, wish: dict[str, Any], reasons: dict[str, str], of_page: str | None
) -> None:
    types = {"items": {"brand": "text", "price": "number"}, "users": {"region": "text"}}
    assert client.request("PUT", "/v1/admin/properties", json=types).status_code == 200
    posted = [{"item_id": one, "properties": {"brand": "Hill"}} for one in (item_id(0), item_id(2))]
    assert client.post("/v1/items", json=posted).status_code == 200
    client.runner.run(client.service.switcher.poll())
    expressions = {"filter": "item.brand == current.brand", "boost": 'user.region == "north" ? current.price : 0.0'}
    answer = recommend(client, user_id=user, debug=True, **expressions, **wish)
    told = {one["name"]: one["reason"] for one in answer["debug"]["without_value"]}
    assert told == {**reasons, "user.region": "not set"}
    assert answer["short"].get("current_item") == of_page
    assert item_ids(answer) == ([item_id(2)] if wish.get("current_item") == item_id(0) else [])
    of_nobody = recommend(client, history=[item_id(3)], debug=True, **expressions)
    assert {"name": "user.region", "reason": "no user_id"} in of_nobody["debug"]["without_value"]
    assert "without_value" not in recommend(client, user_id=user, debug=True, filter="item.price > 1.0")["debug"]


@pytest.mark.parametrize("user", ["ada", "nobody"])
def test_the_current_item_is_excluded_unless_pinned(client: Client, user: str) -> None:
    client.click("ada", item_id(5))
    client.runner.run(client.service.signals.sync())
    whole = recommend(client, user_id=user, k=ITEMS, exclude_seen="none")
    first = item_ids(whole)[0]
    of_page = {"user_id": user, "k": ITEMS, "exclude_seen": "none", "current_item": first}
    assert item_ids(recommend(client, **of_page)) == item_ids(whole)[1:]
    assert item_ids(recommend(client, **of_page, candidates=item_ids(whole)[:3])) == item_ids(whole)[1:3]
    pinned = recommend(client, **of_page, pin=[{"item_id": first, "place": 2}])
    assert item_ids(pinned) == [item_ids(whole)[1], first, *item_ids(whole)[2:]]
    assert item_ids(client.recommend(user, k=ITEMS, exclude_seen="none", current_item=first)) == item_ids(whole)[1:]


def test_debug_needs_the_scope_of_scenarios_or_admin(start: Callable[..., Client], tmp_path: Path) -> None:
    def key(*scopes: Scope) -> str:
        text, made = make("main", list(scopes))
        add(tmp_path / "keys", made)
        return text

    few = [key("recs:read"), key("admin"), key("recs:read", "catalogue:write", "users:admin")]
    enough = [key("recs:read", "admin"), key("recs:read", "scenarios:write")]
    client = start(tmp_path / "state", keys_file=tmp_path / "keys")
    try:
        wish = {"user_id": "ada", "debug": True}
        calls: list[tuple[str, str, dict[str, Any]]] = [
            ("GET", "/v1/users/ada/recommendations", {"params": {"debug": "true"}}),
            ("GET", "/v1/items/item-1/similar", {"params": {"debug": "true"}}),
            ("POST", "/v1/recommendations", {"json": wish}),
            ("POST", "/v1/recommendations", {"json": {"requests": [{"user_id": "ada"}, wish]}}),
        ]
        for method, path, options in calls:
            for text in few:
                assert_refused(client.request(method, path, headers=bearer(text), **options), 403)
            for text in enough:
                assert client.request(method, path, headers=bearer(text), **options).status_code == 200
    finally:
        client.close()
