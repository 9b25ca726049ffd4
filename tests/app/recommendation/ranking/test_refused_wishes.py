"""Invalid list options get a 422 that names the field, and no combination of options causes a bug."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.schemas.fields import MAX_BOOSTS, MAX_K
from app.schemas.limits import MAX_LIMITS
from tests.app.conftest import Client
from tests.app.support import recommend


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ({"boost": {"tea": float("nan")}}, "boost"),
        ({"boost": {"tea": float("inf")}}, "boost"),
        ({"boost": {"tea": 20.1}}, "boost"),
        ({"boost": {"tea": True}}, "boost"),
        ({"boost": {"tea": "1"}}, "boost"),
        ({"boost": {"": 1}}, "boost"),
        ({"boost": {"c" * 257: 1}}, "boost"),
        ({"boost": {f"c{n}": 1 for n in range(MAX_BOOSTS + 1)}}, "boost"),
        ({"boost": [["tea", 1]]}, "boost"),
        ({"diversity": float("nan")}, "diversity"),
        ({"diversity": -0.1}, "diversity"),
        ({"diversity": 1.1}, "diversity"),
        ({"diversity": True}, "diversity"),
        ({"diversity": "0.5"}, "diversity"),
        ({"max_per_category": 0}, "max_per_category"),
        ({"max_per_category": 1.5}, "max_per_category"),
        ({"max_per_category": MAX_K + 1}, "max_per_category"),
        ({"max_per": {"brand": 0}}, "max_per"),
        ({"max_per": {"brand": 1.5}}, "max_per"),
        ({"max_per": {"brand": True}}, "max_per"),
        ({"max_per": {"brand": "2"}}, "max_per"),
        ({"max_per": {"brand": MAX_K + 1}}, "max_per"),
        ({"max_per": {"brand": 10**400}}, "max_per"),
        ({"max_per": {"a b": 1}}, "max_per"),
        ({"max_per": {f"p{n}": 1 for n in range(MAX_LIMITS + 1)}}, "max_per"),
        ({"max_per": ["brand"]}, "max_per"),
        ({"max_per": ["brand:2", "brand:3"]}, "max_per"),
        ({"max_per": 2}, "max_per"),
        ({"max_per": {"bland": 2}}, "max_per"),
        ({"max_per": {"price": 2}}, "max_per"),
        ({"objective": {"property": "price", "strength": 1.1}}, "objective"),
        ({"objective": {"property": "price", "strength": -0.1}}, "objective"),
        ({"objective": {"property": "price", "strength": float("nan")}}, "objective"),
        ({"objective": {"property": "price", "strength": True}}, "objective"),
        ({"objective": {"property": "price", "strength": "1"}}, "objective"),
        ({"objective": {"property": "price", "strength": None}}, "objective"),
        ({"objective": {"property": "price", "power": 1}}, "objective"),
        ({"objective": {"property": "a b"}}, "objective"),
        ({"objective": {"strength": 0.5}}, "objective"),
        ({"objective": ["price"]}, "objective"),
        ({"objective": 1}, "objective"),
        ({"objective": "price:2"}, "objective"),
        ({"objective": {"property": "brand"}}, "objective"),
        ({"objective": {"property": "brand", "strength": 0}}, "objective"),
        ({"objective": {"property": "published_at"}}, "objective"),
        ({"objective": {"property": "bland"}}, "objective"),
        ({"pin": [{"item_id": "item-1", "place": 0}]}, "pin.0.place"),
        ({"pin": [{"item_id": "item-1", "place": MAX_K + 1}]}, "pin.0.place"),
        ({"pin": [{"item_id": "item-1"}]}, "pin.0.place"),
        ({"pin": [{"item_id": "a\x85b", "place": 1}]}, "pin.0.item_id"),
        ({"pin": [{"item_id": "item-1", "place": 1}, {"item_id": "item-1", "place": 2}]}, "pin"),
        ({"pin": [{"item_id": "item-1", "place": 1}, {"item_id": "item-2", "place": 1}]}, "pin"),
        ({"pin": [{"item_id": f"item-{n}", "place": 1} for n in range(10_000)]}, "pin"),
        ({"pin": {"item-1": 1}}, "pin"),
        ({"cursor": 5}, "cursor"),
        ({"cursor": ["item-1"]}, "cursor"),
        ({"categories_all": ["c"] * 101}, "categories_all"),
        ({"categories_none": [""]}, "categories_none.0"),
    ],
)
def test_invalid_options_are_refused(shop: Client, wish: dict[str, Any], field: str) -> None:
    response = shop.post("/v1/recommendations", content=json.dumps({"user_id": "clicker", **wish}))
    assert response.status_code == 422
    assert [detail["field"] for detail in response.json()["error"]["details"]] == [field]


@pytest.mark.parametrize(
    "query",
    [
        "diversity=nan",
        "diversity=1e1",
        "diversity=.5",
        "diversity=",
        "diversity=%2B1",
        "max_per_category=1.0",
        "max_per=brand",
        "max_per=brand:2.0",
        "max_per=brand:%2B2",
        "max_per=brand:2&max_per=brand:3",
        "max_per=bland:2",
        "objective=price:1.1",
        "objective=price:",
        "objective=price:0.5:0.5",
        "objective=price:1e-1",
        "objective=price&objective=price",
        "objective=brand",
        "boost=tea",
    ],
)
def test_invalid_options_of_a_query_are_refused(shop: Client, query: str) -> None:
    assert shop.get(f"/v1/users/clicker/recommendations?{query}").status_code == 422


@pytest.mark.parametrize("written", ["0.1", "1e-1", "1E-01", "10e-2"])
def test_numbers_may_be_written_as_in_json(shop: Client, written: str) -> None:
    shown = shop.get(f"/v1/users/clicker/recommendations?diversity={written}").json()["items"]
    assert shown == recommend(shop, user_id="clicker", diversity=0.1)["items"]


def test_invalid_limits_are_named(shop: Client) -> None:
    for name, reason in (("bland", "items have no property 'bland'"), ("price", "'price' is a number")):
        bodies = [
            {"user_id": "ann", "max_per": {name: 2}},
            {"requests": [{"user_id": "ann"}, {"user_id": "ann", "max_per": {name: 2}}]},
        ]
        for body, field in zip(bodies, ("max_per", "requests.1.max_per"), strict=True):
            response = shop.post("/v1/recommendations", json=body)
            assert response.status_code == 422
            (detail,) = response.json()["error"]["details"]
            assert detail["field"] == field
            assert detail["reason"].startswith(reason)


values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from([0.5, "tea", "item-1"])
)
anything = st.recursive(
    values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["tea", "item_id", "place"]), inner),
)
wild = st.dictionaries(
    st.sampled_from(
        [
            "boost",
            "pin",
            "diversity",
            "max_per_category",
            "max_per",
            "cursor",
            "because",
            "explain",
            "categories_all",
            "k",
            "history",
        ]
    ),
    anything,
)


@given(wish=wild)
@settings(max_examples=100)
@pytest.mark.slow
def test_any_options_cause_no_bug(shared_client: Client, wish: dict[str, Any]) -> None:
    """Exceptions of the app reach the test and fail it."""
    body = {"user_id": "clicker", **wish}
    assert shared_client.post("/v1/recommendations", content=json.dumps(body)).status_code in (200, 422)
