"""Properties of items over HTTP: typed, validated, and the same in every process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.settings import Settings
from tests.app.conftest import Client, item_id, write_model
from tests.storage.redis.servers import RedisServer
from tests.waiting import wait_until

VALUES: dict[str, Any] = {
    "brand": "Hill",
    "price": 4.5,
    "organic": True,
    "expires": "2026-05-01T08:00:00.5Z",
    "tags": ["green", "loose"],
}
TYPES = {"brand": "text", "price": "number", "organic": "boolean", "expires": "time", "tags": "set"}


def put(client: Client, name: str, **words: object) -> httpx.Response:
    return client.request("PUT", f"/v1/items/{name}", content=json.dumps(words))


def shown(client: Client, name: str) -> Any:
    return client.get(f"/v1/items/{name}").json()["properties"]


def reason(answer: httpx.Response) -> str:
    assert answer.status_code == 422, answer.text
    return str(answer.json()["error"]["details"][0]["reason"])


def test_values_round_trip_and_null_removes_them(client: Client) -> None:
    for name in (item_id(1), "new"):
        assert put(client, name, title="Tea", properties=VALUES).json()["properties"] == {
            **VALUES,
            "expires": "2026-05-01T08:00:00.500000Z",
        }
        answer = put(client, name, properties={"expires": None, "price": 5, "never": None, "tags": []})
        assert answer.json()["properties"] == {"brand": "Hill", "price": 5.0, "organic": True, "tags": []}
        assert shown(client, name) == answer.json()["properties"]
        assert client.get(f"/v1/items/{name}").json()["title"] == "Tea"
    found = client.get("/v1/items", params={"query": "Tea"}).json()["items"][0]
    assert found.keys() == {"item_id", "title", "categories", "available", "known"}  # a thousand could be 64 MB
    assert client.get("/v1/admin/properties").json() == {"items": TYPES, "users": {}}


def test_built_in_times_are_fields_of_the_item(client: Client) -> None:
    answer = put(client, item_id(1), available_from="2026-05-01T10:00:00+02:00", published_at="2026-01-01T00:00:00Z")
    assert answer.json()["available_from"] == "2026-05-01T08:00:00Z"
    answer = put(client, item_id(1), available_from=None)
    assert {"available_from", "available_until"}.isdisjoint(answer.json())
    assert answer.json()["published_at"] == "2026-01-01T00:00:00Z"
    assert answer.json()["properties"] == {}
    for wrong in ("2026-05-01T10:00:00", "tomorrow", 1777622400, True):
        assert "time" in reason(put(client, item_id(1), available_until=wrong))
    assert client.get("/v1/admin/properties").json() == {"items": {}, "users": {}}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("price", "much", 'price is a number, and "much" is a text'),
        ("price", True, "price is a number, and true is a boolean"),
        ("brand", 3, "brand is a text, and 3 is a number"),
        ("brand", ["a"], 'brand is a text, and ["a"] is a set'),
        ("organic", "x" * 100, f'organic is a boolean, and "{"x" * 39}... is a text'),
        ("tags", "green", 'tags is a set, and "green" is a text'),
        ("expires", 1777622400, "expires is a time, and 1777622400 is a number"),
        (
            "expires",
            "2026-05-01",
            'expires is neither an RFC 3339 time nor a number of Unix seconds, but is "2026-05-01"',
        ),
        ("other", {"a": 1}, "other must be a text, a number"),
        ("other", [1], "other must be a text, a number"),
        ("other", "é" * 513, "other must have at most 1,024 bytes of text"),
        ("other", ["é" * 256, "e" * 513], "other must have at most 1,024 bytes of text"),
        ("other", "\ud800", "other must be text without unpaired surrogates"),
        ("other", 10**400, "other must be a number up to 1.8e308, but is 1000"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_its_property(
    client: Client, name: str, value: object, said: str
) -> None:
    put(client, item_id(1), properties=VALUES)
    wrong = {"item_id": "pot", "properties": {name: value}}
    before = client.get("/v1/admin/properties").json()
    for answer in (
        put(client, item_id(2), title="Other", properties={"fine": 1, name: value}),
        client.request("POST", "/v1/items", content=json.dumps([{"item_id": "cup"}, wrong])),
    ):
        assert reason(answer).startswith(said)
        assert answer.json()["error"]["details"][0]["field"] == "properties"
    assert client.get("/v1/items/cup").status_code == 404
    assert client.get(f"/v1/items/{item_id(2)}").json()["title"] != "Other"
    assert client.get("/v1/admin/properties").json() == before


@pytest.mark.parametrize(
    "name", ["", "1st", "a-b", "é", "a b", "in", "while", "title", "published_at", "a" * 65, "a\n"]
)
def test_names_that_expressions_cannot_use_are_refused(client: Client, name: str) -> None:
    assert "a property's name may have only English letters" in reason(put(client, item_id(1), properties={name: 1}))
    declared = client.request("PUT", "/v1/admin/properties", json={"items": {name: "text"}})
    assert "a property's name may have only English letters" in reason(declared)


def test_the_first_value_in_a_request_decides_the_type(client: Client) -> None:
    items = [{"item_id": "cup", "properties": {"size": 1}}, {"item_id": "pot", "properties": {"size": "L"}}]
    answer = client.post("/v1/items", json=items)
    assert reason(answer) == 'size is a number, and "L" is a text'
    assert answer.json()["error"]["details"][0]["index"] == 1
    assert client.get("/v1/admin/properties").json() == {"items": {}, "users": {}}


def test_a_text_that_looks_like_a_time_becomes_a_time_unless_declared(client: Client) -> None:
    moment = "2026-05-01T08:00:00Z"
    assert client.request("PUT", "/v1/admin/properties", json={"items": {"batch": "text"}}).status_code == 200
    put(client, item_id(1), properties={"batch": moment, "made": moment})
    assert client.get("/v1/admin/properties").json()["items"] == {"batch": "text", "made": "time"}
    assert shown(client, item_id(1)) == {"batch": moment, "made": moment}


def test_declarations_are_atomic_and_limited_to_64(client: Client) -> None:
    def declare(**types: object) -> httpx.Response:
        return client.request("PUT", "/v1/admin/properties", json=types)

    names = [f"p{number}" for number in range(63)]
    types = dict.fromkeys(names, "number")
    assert declare(items=types, users={"member": "boolean"}).json() == {"items": types, "users": {"member": "boolean"}}
    assert reason(declare(users={"age": "number", "member": "text"})).startswith(
        "member is a boolean, and cannot be a text"
    )
    assert "cannot be" in reason(declare(items={"new": "text"}, users={"member": "text"}))
    assert "is not an object" in reason(declare(items=dict.fromkeys([*names, "a", "b"], "number")))
    assert "must have one of the types text, number" in reason(declare(items={"a": "integer"}))
    assert declare(what={}).status_code == declare(items=None).status_code == 422
    assert reason(put(client, "cup", properties={"a": 1, "b": 1})).endswith("exceeds the maximum of 64 properties")
    assert put(client, "cup", properties={"a": 1}).status_code == 200
    assert "b exceeds the maximum" in reason(put(client, "cup", properties={"b": "x"}))
    assert put(client, "cup", published_at="2026-01-01T00:00:00Z").status_code == 200
    assert client.get("/v1/admin/properties").json()["items"] == {**types, "a": "number"}


def test_every_process_shows_values_and_types_within_a_second(tmp_path: Path, redis_server: RedisServer) -> None:
    write_model(tmp_path / "model", 0)
    settings = Settings(model_dir=tmp_path / "model", redis_url=redis_server.url)
    one, other = Client(settings), Client(settings)
    try:
        wait_until(lambda: put(one, item_id(3), properties={"price": 2}).is_success)
        wait_until(lambda: shown(other, item_id(3)) == {"price": 2.0})
        assert reason(put(other, item_id(4), properties={"price": "2"})) == 'price is a number, and "2" is a text'
    finally:
        one.close()
        other.close()
