"""A scenario's fallback fills the lists that its filter leaves short."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.schemas.cursor import cursor_after
from tests.app.conftest import ITEMS, Client, item_id
from tests.app.serving.scenario_shop import PREVIEW, URL, Shop, answer, filters, listed, narrowing, pins
from tests.app.support import item_ids

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
def test_a_list_goes_on_with_what_the_fallback_allows_as_with_a_next_page(
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


def test_everything_else_holds_of_what_fills_the_list_too(shop: Shop) -> None:
    shop.put("page", **SHORT, k=20, categories_none=["tea"], max_per={"brand": 1}, exclude_seen="all")
    found = answer(shop.first, scenario="page", filter="item.price != 0.5", exclude=["item-6"])
    assert not {"item-3", "item-4", "item-5", "item-6", "item-9"} & set(item_ids(found))
    plain = {"filter": "item.price < 0.75 && item.price != 0.5", "exclude": ["item-6"], "exclude_seen": "all"}
    allowed = answer(shop.first, **plain, categories_none=["tea"], k=20)
    assert set(item_ids(found)) <= set(item_ids(allowed))
    assert found["short"] == {"reason": "filter", "left": len(allowed["items"])}


def test_it_is_told_explained_previewed_and_counted(client: Client) -> None:
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
