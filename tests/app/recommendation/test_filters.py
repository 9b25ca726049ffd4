"""Filters and boosts as CEL expressions in requests, over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.app.conftest import ITEMS, Client, categories_of, item_id

EVERY = {"k": ITEMS, "exclude_seen": "none"}


def shown(client: Client, **options: Any) -> list[str]:
    response = client.post("/v1/recommendations", json={"user_id": "ada", **EVERY, **options})
    assert response.status_code == 200, response.text
    return [item["item_id"] for item in response.json()["items"]]


def with_categories(*names: str) -> set[str]:
    return {item_id(row) for row in range(ITEMS) if set(names) <= set(categories_of(row))}


@pytest.mark.parametrize("user", ["known", "nobody"])
@pytest.mark.parametrize(
    ("expression", "sugar"),
    [
        ('"tea" in item.categories', {"categories": ["tea"]}),
        ("item.categories.exists(c, c in params.wanted)", {"categories": ["tea", "pot"]}),
        ('"tea" in item.categories && "cup" in item.categories', {"categories_all": ["tea", "cup"]}),
        ('!("tea" in item.categories)', {"categories_none": ["tea"]}),
        ("true", {}),
        ("false", {"categories": ["nothing"]}),
    ],
)
def test_a_filter_equals_the_corresponding_fields(
    client: Client, expression: str, sugar: dict[str, Any], user: str
) -> None:
    client.click("known", "item-3", "item-4")
    params = {"wanted": ["tea", "pot"]}
    asked = [{"user_id": user, **EVERY, "filter": expression, "params": params}, {"user_id": user, **EVERY, **sugar}]
    by_expression, by_field = client.post("/v1/recommendations", json={"requests": asked}).json()["results"]
    assert by_expression["items"] == by_field["items"]
    query = {"filter": expression, "params": json.dumps(params), **EVERY}
    assert client.recommend(user, **query)["items"] == by_field["items"]


@pytest.mark.parametrize("user", ["known", "nobody"])
def test_a_boost_equals_a_category_boost(client: Client, user: str) -> None:
    client.click("known", "item-3", "item-4")
    boosts: list[Any] = [
        {"tea": 0.75, "cup": -0.5},
        ['"tea" in item.categories ? 0.75 : 0.0', '"cup" in item.categories ? -0.5 : 0.0'],
    ]
    asked = [{"user_id": user, **EVERY, "boost": boost, "diversity": 0.1} for boost in boosts]
    results = client.post("/v1/recommendations", json={"requests": asked}).json()["results"]
    assert results[0]["items"] == results[1]["items"]
    query = {"boost": boosts[1], "diversity": 0.1, **EVERY}
    assert client.recommend(user, **query)["items"] == results[0]["items"]


def test_changes_of_items_apply_at_once(client: Client) -> None:
    expression = {"filter": '"new" in item.categories || item.title.startsWith("Gift")'}
    assert shown(client, **expression) == []
    client.request("PUT", f"/v1/items/{item_id(5)}", json={"categories": ["new"]})
    client.request("PUT", f"/v1/items/{item_id(6)}", json={"title": "Gift card"})
    assert set(shown(client, **expression)) == {item_id(5), item_id(6)}
    client.request("PUT", f"/v1/items/{item_id(5)}", json={"categories": []})
    client.request("PUT", f"/v1/items/{item_id(6)}", json={"available": False})
    assert shown(client, **expression) == []


def test_current_is_the_item_of_the_page(client: Client) -> None:
    like_it = {"filter": "item.categories.exists(c, c in current.categories)"}
    assert set(shown(client, current_item="item-1", **like_it)) == with_categories(*categories_of(1)) - {"item-1"}
    assert shown(client, current_item="unheard-of", **like_it) == shown(client, **like_it) == []
    similar = client.get("/v1/items/item-1/similar", params={"filter": like_it["filter"], "k": ITEMS}).json()["items"]
    assert {item["item_id"] for item in similar} == with_categories(*categories_of(1)) - {"item-1"}


@pytest.mark.parametrize(
    ("wish", "field", "reason"),
    [
        ({"filter": "item.prize < 3.0"}, "filter", "at character 5: there is no item.prize"),
        ({"filter": "item.title <"}, "filter", "at character 13: the expression ends too early"),
        ({"filter": "(item.title < "}, "filter", "at character 15: the expression ends too early"),
        ({"filter": "('a' == item.title"}, "filter", "at character 19: the expression ends too early: ) is missing"),
        ({"filter": "item.title"}, "filter", "the expression must return a boolean, but returns a text"),
        ({"filter": "item.title == params.title"}, "filter", "there is no params.title"),
        ({"boost": "item.title"}, "boost", "must return a number"),
        ({"filter": "(" * 40 + "true" + ")" * 40}, "filter", "nested at most 32 levels deep"),
        ({"filter": "params.in > 1.0", "params": {"in": 1}}, "filter", ""),
    ],
)
def test_an_error_names_its_position(client: Client, wish: dict[str, Any], field: str, reason: str) -> None:
    response = client.post("/v1/recommendations", json={"user_id": "ada", **wish})
    assert response.status_code == 422
    (detail,) = response.json()["error"]["details"]
    assert detail["field"] == field
    assert reason in detail["reason"]
    both = client.post("/v1/recommendations", json={"requests": [{"user_id": "ada"}, {"user_id": "ada", **wish}]})
    assert both.json()["error"]["details"][0]["field"] == f"requests.1.{field}"


@pytest.mark.parametrize(
    "wish",
    [
        {"filter": ""},
        {"filter": "x" * 2_001},
        {"boost": ["1.0"] * 9},
        {"params": {"a b": 1}},
        {"params": {"a": None}},
        {"params": {"a": [[1]]}},
        {"params": {"a": [1, "b"]}},
        {"params": {"a": 10**400}},
        {"params": {"a": ["x" * 1_024] * 10}},
        {"params": {f"a{n}": n for n in range(33)}},
        {"params": "{"},
        {"params": []},
        {"current_item": "a\x85b"},
    ],
)
def test_invalid_expressions_and_parameters_are_refused(client: Client, wish: dict[str, Any]) -> None:
    response = client.post("/v1/recommendations", json={"user_id": "ada", **wish})
    assert response.status_code == 422, response.text
    query = {name: json.dumps(value) if name == "params" else value for name, value in wish.items()}
    assert client.get("/v1/users/ada/recommendations", params=query).status_code == 422


def test_rules_about_an_unreadable_user_return_503(client: Client) -> None:
    put = client.request("PUT", "/v1/users/ada/properties", json={"properties": {"child": True}})
    assert put.status_code == 200
    client.runner.run(client.service.switcher.poll())
    adults_only = {"filter": "!known(user.child)"}
    assert shown(client, **adults_only) == []
    client.close_store()
    for wish in (adults_only, {"boost": "known(user.child) ? 1.0 : 0.0"}):
        response = client.post("/v1/recommendations", json={"user_id": "ada", **wish})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "storage_unavailable")
        assert "retry-after" in response.headers
    assert client.recommend("ada", filter="!known(item.published_at)")["source"] == "popular"


labels = st.lists(st.sampled_from(["tea", "cup", "pot", "unknown"]), max_size=3)


def quoted(names: list[str]) -> str:
    return json.dumps(names)


@given(
    labels, labels, labels, st.dictionaries(st.sampled_from(["tea", "cup", "unknown"]), st.sampled_from([0.75, -2.0]))
)
@settings(max_examples=40)
def test_category_fields_equal_expressions(
    shared_client: Client, any_of: list[str], all_of: list[str], none_of: list[str], boost: dict[str, float]
) -> None:
    by_field = {"categories": any_of, "categories_all": all_of, "categories_none": none_of, "boost": boost}
    conditions = [f'"{name}" in item.categories' for name in all_of]
    conditions += [f"item.categories.exists(c, c in {quoted(any_of)})"] if any_of else []
    conditions += [f"!item.categories.exists(c, c in {quoted(none_of)})"] if none_of else []
    by_expression = {
        "filter": " && ".join(conditions) or "true",
        "boost": [f'"{name}" in item.categories ? {gain} : 0.0' for name, gain in boost.items()],
    }
    asked = [
        {"history": history, **EVERY, **wish}
        for history in ([], [item_id(3), item_id(4)])
        for wish in (by_field, by_expression)
    ]
    answers = [
        one["items"] for one in shared_client.post("/v1/recommendations", json={"requests": asked}).json()["results"]
    ]
    assert answers[0] == answers[1]
    assert [item["item_id"] for item in answers[2]] == [item["item_id"] for item in answers[3]]
    assert [item["score"] for item in answers[2]] == pytest.approx([item["score"] for item in answers[3]], abs=1e-5)
