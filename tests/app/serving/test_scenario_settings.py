"""Settings that only scenarios have: a fallback for short lists, and declared parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.schemas.cursor import cursor_after
from tests.app.conftest import ITEMS, Client, item_id
from tests.app.serving.scenario_shop import PREVIEW, URL, Shop, answer, filters, listed, narrowing, pins
from tests.app.support import assert_refused, item_ids

SHORT = {"filter": "item.price < 0.25", "fallback": "item.price < 0.75"}  # items 0 to 2, then 3 to 7
EVERY = {"k": ITEMS, "exclude_seen": "none"}
rules = st.fixed_dictionaries(
    {},
    optional={
        **{name: narrowing[name] for name in ("exclude_seen", "exclude", "max_per_category", "max_per")},
        "diversity": st.sampled_from([0.0, 0.5]),
        "boost": st.just(["item.price"]),
        "pin": pins,
    },
)


def flags(answered: Any) -> list[bool]:
    return [item.get("fallback", False) for item in answered["items"]]


@given(rules, filters, filters, st.integers(1, ITEMS), st.sampled_from(["ada", "nobody"]))
@settings(max_examples=30)
def test_the_fallback_continues_a_list_like_a_next_page(
    shop: Shop, spelled: Mapping[str, Any], narrow: str, wide: str, k: int, user: str
) -> None:
    declared = {"max": {"type": "number"}, "brands": {"type": "set"}, "sizes": {"type": "numbers"}}
    asked = {"user_id": user, "params": {"max": 2.0, "brands": ["a", "ab"], "sizes": [2.5]}}
    shop.put("page", **spelled, filter=narrow, fallback=wide, params=declared)
    first = answer(shop.first, **asked, **spelled, filter=narrow, k=k)
    expected = listed(first)
    if len(expected) < k:
        after = {"k": k - len(expected), "cursor": cursor_after(item_ids(first)) if expected else ""}
        expected += listed(answer(shop.first, **asked, **spelled, filter=wide, **after))
    for client in (shop.first, shop.other):
        found = answer(client, **asked, scenario="page", k=k)
        assert listed(found) == expected
        assert flags(found) == [place >= len(first["items"]) for place in range(len(expected))]
        assert ("short" in found) == (len(expected) < k)
        assert "cursor" not in found


@pytest.mark.parametrize("user", ["ada", "nobody"])
def test_pages_end_where_the_fallback_ends(shop: Shop, user: str) -> None:
    shop.put("page", **SHORT, **EVERY)
    whole = answer(shop.first, user_id=user, scenario="page")
    for k in (1, 2, 3, 5, 8):
        pages, cursor = [], ""
        while cursor is not None:
            pages.append(answer(shop.first, user_id=user, scenario="page", k=k, cursor=cursor))
            cursor = pages[-1]["cursor"]
        assert [one for page in pages for one in listed(page)] == listed(whole)
        assert [len(page["items"]) for page in pages] == [k] * (8 // k) + [8 % k] * (8 % k > 0)
    assert flags(whole) == [False] * 3 + [True] * 5


def test_other_rules_apply_to_items_of_the_fallback(shop: Shop) -> None:
    shop.put("page", **SHORT, k=20, categories_none=["tea"], max_per={"brand": 1}, exclude_seen="all")
    found = answer(shop.first, scenario="page", filter="item.price != 0.5", exclude=["item-6"])
    assert not {"item-3", "item-4", "item-5", "item-6", "item-9"} & set(item_ids(found))
    plain = {"filter": "item.price < 0.75 && item.price != 0.5", "exclude": ["item-6"], "exclude_seen": "all"}
    allowed = answer(shop.first, **plain, categories_none=["tea"], k=20)
    assert set(item_ids(found)) <= set(item_ids(allowed))
    assert found["short"] == {"reason": "filter", "left": len(allowed["items"])}


def test_the_fallback_is_reported_explained_previewed_and_counted(client: Client) -> None:
    client.click("ada", "item-30", "item-40")
    for row in range(10):
        client.request("PUT", f"/v1/items/{item_id(row)}", json={"properties": {"price": row / 10}})
    client.runner.run(client.service.switcher.poll())
    wanted = {"user_id": "ada", "k": 5, "explain": True, "debug": True}
    previewed = client.post(PREVIEW, json={"settings": SHORT, "request": wanted}).json()
    for name in ("page", "short"):
        assert client.request("PUT", f"{URL}/{name}", json=SHORT).status_code == 200
    client.runner.run(client.service.signals.sync())
    found = answer(client, **wanted, scenario="page")
    assert listed(found) == listed(previewed)
    assert (flags(found), "short" in found) == ([False] * 3 + [True] * 2, False)
    assert all("explanation" in item for item in found["items"])
    (of_filter,) = [one for one in found["debug"]["removed"] if one["part"] == "filter"]
    assert (of_filter["condition"], of_filter["items"]) == (SHORT["filter"], ITEMS - 1 - 3)  # but the page's item
    assert answer(client, scenario="short", user_id="bob", k=9)["short"] == {"reason": "filter", "left": 8}
    assert answer(client, scenario="short", user_id="bob", k=3)["items"]
    counted = client.get("/v1/stats").json()["scenarios"]
    assert [[one[name] for name in ("scenario", "lists", "filled", "short")] for one in counted] == [
        ["page", 1, 1, 0],
        ["short", 2, 0, 1],
    ]
    line = 'lisarec_scenario_lists_total{outcome="filled",scenario="page",tenant="main"} 1.0'
    assert line in client.get("/metrics").text
    similar = client.get("/v1/items/item-30/similar", params={"scenario": "page", "k": 5}).json()
    assert (flags(similar), similar["source"]) == ([False] * 3 + [True] * 2, "similar")


BOUNDED = {"max_price": {"type": "number", "default": 2, "min": 1, "max": 3}, "floor": {"type": "number", "default": 0}}


@given(st.integers(-3, 8).map(lambda half: half / 2), st.sampled_from(["post", "get", "preview"]))
@settings(max_examples=20)
def test_parameters_are_bounded(shop: Shop, price: float, form: str) -> None:
    spelled = {"filter": "item.price < params.max_price && item.price >= params.floor", "k": ITEMS, "params": BOUNDED}
    shop.put("bounded", **spelled)
    wanted = {"user_id": "ada", "params": {"max_price": price}}
    if form == "get":
        query = {"scenario": "bounded", "params": json.dumps(wanted["params"])}
        response = shop.other.get("/v1/users/ada/recommendations", params=query)
    elif form == "post":
        response = shop.other.post("/v1/recommendations", json={**wanted, "scenario": "bounded"})
    else:
        response = shop.other.post(PREVIEW, json={"settings": spelled, "request": wanted})
    if 1 <= price <= 3:
        assert response.status_code == 200
        assert all(int(name.removeprefix("item-")) / 10 < price for name in item_ids(response.json()))
    else:
        assert_refused(response, 422)
        assert "must have max_price, a number from 1 to 3" in response.text


def test_unused_parameters_are_refused(shop: Shop) -> None:
    shop.put("bounded", filter="item.price < params.max_price", params=BOUNDED)
    shop.put("other", params={"other_price": {"type": "number", "default": 1}})
    good: dict[str, Any] = {"user_id": "ada", "scenario": "bounded"}
    own = {"filter": "item.price < params.most", "boost": ["params.gain * item.price"]}
    assert answer(shop.first, **good, **own, params={"most": 1, "gain": 2.0, "floor": 0})["items"]
    for params, reason in (
        ({"maxprice": 2}, "has maxprice, which no expression uses; did you mean max_price?"),
        ({"other_price": 2}, "has other_price, which no expression uses; did you mean max_price?"),
        ({"zz": 2, "floor": 0}, "has zz, which no expression uses; existing names: floor, max_price"),
        ({"most": 2}, "has most, which no expression uses; existing names: floor, max_price"),
    ):
        for path, body in (
            ("params", {**good, "params": params}),
            ("requests.1.params", {"requests": [good, {**good, "params": params}]}),
        ):
            response = shop.first.post("/v1/recommendations", json=body)
            assert_refused(response, 422)
            (detail,) = response.json()["error"]["details"]
            assert (detail["field"], detail["reason"]) == (path, reason)
    begun = {"name": "prices", "over": "scenarios", "shares": {"bounded": 1, "other": 1}}
    assert shop.first.request("PUT", "/v1/admin/experiment", json=begun).status_code == 200
    try:  # each arm takes what the other one declares
        for number in range(20):
            params = {"max_price": 2, "other_price": 2}
            answer(shop.first, **{**good, "user_id": f"user-{number}", "params": params})
    finally:
        assert shop.first.request("DELETE", "/v1/admin/experiment").status_code in (200, 204)
