"""Ids of users, items, events and orders may be any text; unusual ones stay distinct on every store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from app.schemas.cursor import cursor_after
from model.data.readers import read_interactions
from storage.archive.writer import ArchiveWriter
from storage.archiver.archiver import archive_log
from storage.archiver.redis_source import RedisSource
from storage.archiver.sqlite_source import SQLiteSource
from tests.app.conftest import Client, item_id
from tests.app.support import ODD_IDS

LATE = 1_700_000_000


@pytest.fixture(scope="module")
def shop(
    store_url: str | None, start: Callable[..., Client], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A service for all tests of this file; each test has users of its own."""
    directory = tmp_path_factory.mktemp("odd")
    client = start(directory / "state", archive_dir=directory / "archive", redis_url=store_url)
    yield client
    client.close()


def as_part(name: str) -> str:
    return quote(name, safe="")


def event(user_id: str, item: str, event_id: str, n: int = 0, **fields: object) -> dict[str, Any]:
    return {"event_id": event_id, "user_id": user_id, "item_id": item, "timestamp": LATE + n, **fields}


def post(client: Client, *events: dict[str, Any]) -> Any:
    response = client.post("/v1/events", json=[*events])
    assert response.status_code == 200, response.text
    return response.json()


def recommend(client: Client, user_id: str) -> Any:
    return client.post("/v1/recommendations", json={"user_id": user_id}).json()


def log_of(client: Client, user_id: str) -> list[tuple[str, str]]:
    found = client.get(f"/v1/users/{as_part(user_id)}/events").json()["events"]
    return [(entry["user_id"], entry.get("event_id") or f"undone: {entry['undo']}") for entry in found]


def undo(client: Client, user_id: str, event_id: str) -> Any:
    response = client.request("DELETE", f"/v1/users/{as_part(user_id)}/events/{as_part(event_id)}")
    return response.json().get("changed", response.status_code)


@pytest.mark.parametrize("odd", ODD_IDS)
def test_all_calls_accept_an_unusual_user_id(shop: Client, odd: str) -> None:
    path = f"/v1/users/{as_part(odd)}"
    assert shop.get(path).status_code == 404
    sent = [event(odd, item_id(1), f"{odd[:100]}{n}", n, order_id=odd) for n in range(3)]
    assert post(shop, *sent)["accepted"] == 3
    assert post(shop, *sent)["duplicates"] == 3
    user = shop.get(path).json()
    assert (user["user_id"], user["event_count"]) == (odd, 3)
    in_path, in_body = shop.get(f"{path}/recommendations").json(), recommend(shop, odd)
    assert in_path["items"] == in_body["items"]
    assert in_path["source"] == in_body["source"] == "personalised"
    assert shop.request("PUT", f"{path}/properties", json={"properties": {"size": odd}}).status_code == 200
    assert shop.get(f"{path}/properties").json()["properties"] == {"size": odd}
    assert undo(shop, odd, sent[1]["event_id"]) is True
    assert undo(shop, odd, sent[1]["event_id"]) is False
    assert shop.get(path).json()["event_count"] == 2
    assert shop.request("DELETE", path).status_code == 202
    assert shop.get(path).status_code == 404


@pytest.mark.parametrize("odd", ODD_IDS)
def test_all_calls_accept_an_unusual_item_id(shop: Client, odd: str) -> None:
    path = f"/v1/items/{as_part(odd)}"
    assert shop.request("PUT", path, json={"title": odd, "available": True}).status_code == 200
    assert shop.post("/v1/items", json=[{"item_id": odd, "categories": [odd]}]).status_code == 200
    item = shop.get(path).json()
    assert (item["item_id"], item["title"], item["categories"]) == (odd, odd, [odd])
    similar = shop.get(f"{path}/similar")  # no model has learned the item
    assert (similar.status_code, similar.json()["error"]["code"]) == (404, "item_not_found")
    user = f"reader of {odd}"[:128]
    assert post(shop, event(user, odd, "e1"), event(user, item_id(1), "e2", 1))["accepted"] == 2
    shown = {"event_id": "e3", "user_id": user, "type": "impression", "items": [odd, item_id(2)]}
    assert post(shop, shown)["accepted"] == 1
    found = shop.get(f"/v1/users/{as_part(user)}/events").json()["events"]
    assert [one.get("item_id") or one["items"] for one in found] == [odd, item_id(1), [odd, item_id(2)]]
    asked = urlencode({"exclude": odd, "basket": odd, "current_item": odd, "because": odd})
    assert shop.get(f"/v1/users/{as_part(user)}/recommendations?{asked}").status_code == 200
    body = {"user_id": user, "candidates": [odd, item_id(3), item_id(4)], "cursor": cursor_after([odd, item_id(3)])}
    page = shop.post("/v1/recommendations", json=body).json()
    assert [one["item_id"] for one in page["items"]] == [item_id(4)]


def merge(client: Client, user_id: str, visitor: str) -> Any:
    return client.post(f"/v1/users/{as_part(user_id)}/merge", json={"from": visitor}).json()["changed"]


def turn(client: Client) -> int:
    """Archive and trim everything."""
    url, archive = client.settings.redis_url, client.settings.archive
    assert archive is not None
    opened = SQLiteSource.open(client.settings.data_dir) if url is None else RedisSource.open(url)
    with opened as log, ArchiveWriter.open(archive) as writer:
        until = datetime.now(UTC) + timedelta(seconds=1)
        return archive_log(log, writer, until, keep_tail_s=0, keep_days=None).archived


def test_ids_that_look_like_internal_ids_are_distinct(shop: Client) -> None:
    """Internal ids of merged events, undos and merges are "v/e", "undo e" and "merge ada"."""
    for n, event_id in enumerate(["e", "undo e", "merge ada", "v/e", "undo v/e"]):
        post(shop, event("ada", item_id(n), event_id, n))
    post(shop, event("v", item_id(9), "e", 9))
    assert undo(shop, "ada", "e") is True
    assert merge(shop, "ada", "v") is True
    own = [("ada", name) for name in ("e", "undo e", "merge ada", "v/e", "undo v/e")]
    assert log_of(shop, "ada") == [*own, ("ada", "undone: e"), ("v", "e")]
    assert shop.get("/v1/users/ada").json()["event_count"] == 5
    assert undo(shop, "ada", "v/e") is True
    assert shop.get("/v1/users/ada").json()["event_count"] == 4
    assert undo(shop, "v", "e") is True
    assert shop.get("/v1/users/ada").json()["event_count"] == 3
    assert undo(shop, "ada", "undo e") is True
    assert log_of(shop, "ada")[-3:] == [("ada", "undone: v/e"), ("v", "undone: e"), ("ada", "undone: undo e")]


def test_users_with_slashes_in_their_ids_are_merged_correctly(shop: Client) -> None:
    users = ["p", "p/q", "p/q/r", "main/p"]
    for n, name in enumerate(users):
        post(shop, event(name, item_id(n), "r"), event(name, item_id(n), "q/r"))
    for name in users[1:3]:
        assert merge(shop, "p", name) is True
    expected = {(name, event_id) for name in users[:3] for event_id in ("r", "q/r")}
    assert {*log_of(shop, "p")} == {*log_of(shop, "p/q")} == expected
    assert {*log_of(shop, "main/p")} == {("main/p", "r"), ("main/p", "q/r")}
    assert post(shop, event("p/q", item_id(1), "r"), event("p/q/r", item_id(1), "q/r"))["duplicates"] == 2
    assert undo(shop, "p/q", "q/r") is True
    assert undo(shop, "p/q/r", "r") is True
    assert shop.get("/v1/users/p").json()["event_count"] == 4


def test_the_archive_contains_unusual_ids(shop: Client) -> None:
    users = [f"archived {odd}"[:128] for odd in ODD_IDS]
    for user, odd in zip(users, ODD_IDS, strict=True):
        post(shop, event(user, odd, odd, order_id=odd), event(user, item_id(1), f"{odd[:127]}2", 1))
        assert undo(shop, user, f"{odd[:127]}2") is True
    assert turn(shop) > 0
    for user, odd in zip(users, ODD_IDS, strict=True):
        assert log_of(shop, user)[0] == (user, odd)
        assert post(shop, event(user, odd, odd))["duplicates"] == 1
    archive = shop.settings.archive
    assert archive is not None
    found = read_interactions(Path(str(archive)))
    kept = {
        (found.user_ids[found.user[row]], found.item_ids[found.item[row]], found.order_id(row))
        for row in range(len(found))
    }
    assert {(user, odd, odd) for user, odd in zip(users, ODD_IDS, strict=True)} <= kept
    assert not any(user in users and item == item_id(1) for user, item, _ in kept)


@pytest.mark.parametrize("bad", ["", ".", "..", "a\x00", "a\nb", "\x1f", "\x7f", "a\x85", "x" * 129, "half \ud83d"])
def test_invalid_ids_are_refused_by_all_calls(shop: Client, bad: str) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        *(("/v1/events", event("ada", "i", "e") | {field: bad}) for field in ("user_id", "item_id", "order_id")),
        ("/v1/events", event("ada", "i", bad)),
        ("/v1/events", {"user_id": "ada", "type": "impression", "items": [bad]}),
        ("/v1/recommendations", {"user_id": bad}),
        ("/v1/recommendations", {"user_id": "ada", "exclude": [bad]}),
        ("/v1/users/ada/merge", {"from": bad}),
    ]
    for path, body in bodies:
        refused = shop.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
        assert refused.status_code in (400, 422), (path, body)


def test_the_longest_ids_fit_a_path(shop: Client) -> None:
    longest = "\U0001f376" * 128  # of no other test
    post(shop, event(longest, item_id(1), longest))
    assert undo(shop, longest, longest) is True
    too_long = shop.get(f"/v1/users/{'a' * 4_096}/recommendations")
    assert (too_long.status_code, "at most 4,096 bytes" in too_long.text) == (422, True)


def test_a_query_that_is_not_utf_8_is_refused(shop: Client) -> None:
    for path in ("/v1/items/similar?item_id=%E4", "/v1/users/ada/events?after=%FF", "/v1/items?search=gr%F6n"):
        refused = shop.get(path)
        assert (refused.status_code, "percent-encoded UTF-8" in refused.text) == (422, True), path
