"""Properties of users over HTTP: merged, erased, backed up, counted against quotas, and never written elsewhere."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import httpx
import pytest

from app.http.auth.keys import add, make
from app.settings import Settings
from tests.app.conftest import Client, item_id, write_model
from tests.app.support import SECRET, bearer


def put(client: Client, user_id: str, **properties: object) -> httpx.Response:
    return client.request("PUT", f"/v1/users/{user_id}/properties", content=json.dumps({"properties": properties}))


def known(client: Client, user_id: str) -> object:
    answer = client.get(f"/v1/users/{user_id}/properties").json()
    assert answer["user_id"] == user_id
    return answer["properties"]


def test_properties_are_set_read_removed_merged_and_erased(client: Client) -> None:
    assert known(client, "ada") == {}
    assert put(client, "ada", age=30, city="Ulm", member=True).json() == {
        "user_id": "ada",
        "properties": {"age": 30.0, "city": "Ulm", "member": True},
    }
    assert put(client, "ada", city=None).json()["properties"] == {"age": 30.0, "member": True}
    put(client, "visitor", age=20, region="south")
    client.click("visitor", item_id(1))
    assert client.post("/v1/users/ada/merge", json={"from": "visitor"}).status_code == 200
    assert known(client, "ada") == known(client, "visitor") == {"age": 30.0, "member": True, "region": "south"}
    put(client, "visitor", age=31)
    assert known(client, "ada") == {"age": 31.0, "member": True, "region": "south"}
    assert client.request("DELETE", "/v1/users/visitor").status_code == 202
    assert known(client, "ada") == known(client, "visitor") == {}
    held = {"age": "number", "city": "text", "member": "boolean", "region": "text"}
    assert client.get("/v1/admin/properties").json() == {"items": {}, "users": held}


def test_types_are_separate_from_those_of_items(client: Client) -> None:
    client.request("PUT", "/v1/items/cup", json={"properties": {"size": "L"}})
    assert put(client, "ada", size=1).status_code == 200
    answer = put(client, "ada", size="L", fine=1)
    assert answer.status_code == 422
    assert answer.json()["error"]["details"] == [
        {"index": None, "field": "properties", "reason": 'size is a number, and "L" is a text'}
    ]
    assert known(client, "ada") == {"size": 1.0}
    for body in ("{}", '{"size": 1}', '{"properties": null}', '{"properties": {"a b": 1}}', "[]", '"x"'):
        answer = client.request("PUT", "/v1/users/ada/properties", content=body)
        assert answer.status_code == 422, body


def test_properties_appear_in_no_logs_metrics_or_other_responses(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        put(client, "ada", secret=SECRET)
        put(client, "ada", secret=[SECRET])
        client.get("/v1/users/ada/properties")
    assert SECRET not in caplog.text
    for path in ("/metrics", "/v1/stats", "/v1/admin/properties", "/v1/users/bob/properties"):
        assert SECRET not in client.get(path).text


def test_puts_are_charged_and_count_new_users(tmp_path: Path) -> None:
    write_model(tmp_path / "model", 0)
    text, key = make("main", ["users:admin"], requests_per_minute=100)
    add(tmp_path / "keys", key)
    settings = Settings(
        model_dir=tmp_path / "model", data_dir=tmp_path / "data", keys_file=tmp_path / "keys", new_users_per_hour=2
    )
    client = Client(settings)
    try:

        def put_with_key(user_id: str, count: int) -> httpx.Response:
            body = {"properties": {f"p{number}": 1 for number in range(count)}}
            return client.request("PUT", f"/v1/users/{user_id}/properties", json=body, headers=bearer(text))

        assert [put_with_key(f"u{number}", 1).status_code for number in (1, 2, 1, 2, 3)] == [200, 200, 200, 200, 429]
        statuses = [put_with_key("u1", 64).status_code for _ in range(60)]
        assert statuses.count(200) < 50  # each counts twice
        assert statuses[-1] == 429
    finally:
        client.close()
