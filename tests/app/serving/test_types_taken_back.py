"""A property of a wrong type is removed over HTTP, and its name is free in every process."""

from __future__ import annotations

from typing import Any

import httpx

from tests.app.conftest import Client, item_id
from tests.app.serving.scenario_shop import URL, Shop, answer
from tests.app.support import item_ids

FILTERED = {"k": 100, "exclude_seen": "none"}


def declare(client: Client, **types: Any) -> httpx.Response:
    return client.request("PUT", "/v1/admin/properties", json=types)


def put(client: Client, number: int, size: Any) -> httpx.Response:
    return client.request("PUT", f"/v1/items/{item_id(number)}", json={"properties": {"size": size}})


def ask(client: Client, text: str) -> httpx.Response:
    return client.post("/v1/recommendations", json={"user_id": "ada", **FILTERED, "filter": text})


def test_a_removed_property_may_get_another_type(shop: Shop) -> None:
    first, other = shop
    for number in range(3):
        assert put(first, number, f"{number}0").status_code == 200
    first.request("PUT", "/v1/users/ada/properties", json={"properties": {"size": "30"}})
    other.runner.run(other.service.switcher.poll())
    assert len(ask(other, 'item.size != ""').json()["items"]) == 3
    assert len(answer(other, max_per={"size": 1}, **FILTERED)["items"]) > 3
    refused = declare(first, items={"size": "number"})
    assert refused.json()["error"]["details"][0]["reason"] == (
        "size is a text, and cannot be a number; pass null to remove size with all its values"
    )
    shop.put("sized", filter='item.size == "10"', max_per={"size": 1})
    used = declare(other, items={"size": None, "price": "number"}, users={"size": None})
    assert (used.status_code, used.json()["error"]["code"]) == (409, "property_in_use")
    assert [one["reason"] for one in used.json()["error"]["details"]] == [
        "scenario sized uses size; change the scenario first"
    ]
    shop.put("sized", filter="item.price > 1.0")

    taken = declare(first, items={"size": None, "never": None}, users={"size": None})
    assert taken.status_code == 200
    assert "size" not in taken.json()["items"].keys() | taken.json()["users"].keys()
    assert declare(first, items={"size": None}).json() == taken.json()  # once more changes nothing
    for client in (first, other):
        client.runner.run(client.service.switcher.poll())
        assert "there is no item.size" in ask(client, 'item.size == "10"').text
        assert client.get(f"/v1/items/{item_id(1)}").json()["properties"].keys() == {"price", "brand"}
        assert client.get("/v1/users/ada/properties").json()["properties"] == {}

    assert put(other, 1, 10).status_code == 200
    assert put(first, 2, "20").status_code == 422
    first.request("PUT", "/v1/users/ada/properties", json={"properties": {"size": 10}})
    for client in (first, other):
        client.runner.run(client.service.switcher.poll())
        assert item_ids(ask(client, "item.size == 10.0 && user.size == 10.0").json()) == [item_id(1)]
        assert client.get(f"/v1/items/{item_id(2)}").json()["properties"].keys() == {"price", "brand"}
    assert shop.put("sized", filter="item.size > 1.0", k=3)["version"] == 3
    assert item_ids(answer(other, scenario="sized")) == [item_id(1)]
    assert first.request("DELETE", f"{URL}/sized").status_code == 200
    assert declare(other, items={"size": None}, users={"size": None}).status_code == 200
