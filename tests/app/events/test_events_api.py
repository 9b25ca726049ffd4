"""POST /v1/events: what is accepted, what is refused, and that requests are atomic."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from app.schemas.events import MAX_EVENTS
from storage.errors import PartlyApplied, StorageBusy, StorageUnavailable
from storage.records import AppendResult
from tests.app.conftest import Client
from tests.app.support import same_items

UUID7 = "01932c07-5e00-7d4b-a1c3-2f8e6b9d0a11"  # made in November 2024
UUID7_US = int("01932c075e00", 16) * 1_000
VALID = {"user_id": "ada", "item_id": "item-1"}


def test_one_event_or_an_array_is_accepted(client: Client) -> None:
    assert client.post("/v1/events", json=VALID).json() == {
        "accepted": 1,
        "duplicates": 0,
        "unknown_items": 0,
        "unknown_types": 0,
        "refused": 0,
    }
    several = client.post("/v1/events", json=[VALID, {"user_id": "bob", "item_id": "not-in-the-catalogue"}])
    assert several.status_code == 200
    assert several.json() == {"accepted": 2, "duplicates": 0, "unknown_items": 1, "unknown_types": 0, "refused": 0}
    assert [event.item_id for event in client.log("bob")] == ["not-in-the-catalogue"]


def test_all_fields_are_logged(client: Client) -> None:
    event = {
        "event_id": "e-1",
        "user_id": "ada",
        "item_id": "item-1",
        "type": "purchase",
        "timestamp": "2024-02-29T12:00:00.25+01:00",
        "value": 2.5,
        "recommendation_id": UUID7,
        "order_id": "o-17",
    }
    assert client.post("/v1/events", json=event).status_code == 200
    (logged,) = client.log("ada")
    assert (logged.event_id, logged.item_id, logged.type) == ("e-1", "item-1", "purchase")
    assert (logged.value, logged.recommendation_id, logged.order_id) == (2.5, UUID7, "o-17")
    assert logged.timestamp_us == 1_709_204_400_250_000


def test_missing_fields_have_defaults(client: Client) -> None:
    begin_us = time.time_ns() // 1_000
    client.post("/v1/events", json={**VALID, "event_id": None, "timestamp": None, "value": None})
    (logged,) = client.log("ada")
    assert logged.event_id[14] == "7"
    assert logged.type == "click"
    assert begin_us <= logged.timestamp_us <= time.time_ns() // 1_000
    assert (logged.id_time_us, logged.value, logged.recommendation_id) == (None, None, None)


@pytest.mark.parametrize(
    ("fields", "id_time_us"),
    [
        ({"event_id": UUID7, "timestamp": 1}, UUID7_US),
        ({"event_id": UUID7.upper()}, UUID7_US),
        ({"event_id": "e-1", "timestamp": 1.5}, 1_500_000),
        ({"event_id": "e-1"}, None),  # the server's clock is no id-time, a resend would carry another
        ({"timestamp": 1}, None),
    ],
)
def test_deduplication_uses_the_time_of_the_uuid_or_of_the_client(
    client: Client, fields: dict[str, Any], id_time_us: int | None
) -> None:
    assert client.post("/v1/events", json={**VALID, **fields}).status_code == 200
    assert client.log("ada")[0].id_time_us == id_time_us


def test_a_resend_is_a_duplicate_and_changes_nothing(client: Client) -> None:
    events = [{**VALID, "event_id": f"e-{n}"} for n in range(3)]
    client.post("/v1/events", json=events)
    before = client.get("/v1/users/ada").json()
    again = client.post("/v1/events", json=[*events, events[0]])
    assert again.json() == {"accepted": 0, "duplicates": 4, "unknown_items": 0, "unknown_types": 0, "refused": 0}
    assert client.get("/v1/users/ada").json() == before


def test_the_same_id_from_two_users_is_two_events(client: Client) -> None:
    both = [{**VALID, "event_id": "e"}, {**VALID, "event_id": "e", "user_id": "bob"}]
    assert client.post("/v1/events", json=both).json()["accepted"] == 2


@pytest.mark.parametrize(
    ("timestamp", "timestamp_us"),
    [
        (0, 0),
        (1_700_000_000, 1_700_000_000_000_000),
        (1_700_000_000.123456, 1_700_000_000_123_456),
        (-1, -1_000_000),
        ("1970-01-01T00:00:00Z", 0),
        ("1969-12-31t23:59:59z", -1_000_000),
        ("2023-11-14 22:13:20.123456789+00:00", 1_700_000_000_123_456),
        ("2023-11-14T22:13:20-05:30", 1_700_019_800_000_000),
        ("0001-01-01T00:00:00+23:59", -62_135_683_140_000_000),
    ],
)
def test_timestamps_are_unix_seconds_or_rfc_3339(client: Client, timestamp: Any, timestamp_us: int) -> None:
    assert client.post("/v1/events", json={**VALID, "timestamp": timestamp}).status_code == 200
    assert client.log("ada")[0].timestamp_us == timestamp_us


def test_a_clock_may_be_five_minutes_ahead(client: Client) -> None:
    assert client.post("/v1/events", json={**VALID, "timestamp": time.time() + 290}).status_code == 200
    ahead = client.post("/v1/events", json={**VALID, "timestamp": time.time() + 310})
    assert ahead.status_code == 422
    assert "ahead" in ahead.json()["error"]["details"][0]["reason"]
    assert len(client.log("ada")) == 1


# Each is refused on its own and within a batch; the field is what the answer names, None where it names none.
REFUSED: dict[str, tuple[str, str | None]] = {
    "no user": ('{"item_id": "item-1"}', "user_id"),
    "no item": ('{"user_id": "ada"}', "item_id"),
    "unknown field": ('{"user_id": "ada", "item_id": "item-1", "price": 1}', None),
    "lone surrogate as a field": (r'{"user_id": "ada", "item_id": "item-1", "\ud800": 1}', None),
    "null user": ('{"user_id": null, "item_id": "item-1"}', "user_id"),
    "number as a user": ('{"user_id": 7, "item_id": "item-1"}', "user_id"),
    "object as a user": ('{"user_id": {}, "item_id": "item-1"}', "user_id"),
    "empty id": ('{"user_id": "", "item_id": "item-1"}', "user_id"),
    "id with a control character": ('{"user_id": "a\\u0085b", "item_id": "item-1"}', "user_id"),
    "id with a newline at its end": (r'{"user_id": "ada\n", "item_id": "item-1"}', "user_id"),
    "id with a null": (r'{"user_id": "a\u0000", "item_id": "item-1"}', "user_id"),
    "id with a C1 control": ('{"user_id": "ad\\u0085", "item_id": "item-1"}', "user_id"),
    "lone surrogate as an id": (r'{"user_id": "\ud800", "item_id": "item-1"}', "user_id"),
    "dot": ('{"user_id": ".", "item_id": "item-1"}', "user_id"),
    "two dots": ('{"user_id": "ada", "item_id": ".."}', "item_id"),
    "id of 129 characters": ('{"user_id": "ada", "item_id": "%s"}' % ("i" * 129), "item_id"),
    "bad event id": ('{"user_id": "ada", "item_id": "item-1", "event_id": "a\\nb"}', "event_id"),
    "bad recommendation id": ('{"user_id": "ada", "item_id": "item-1", "recommendation_id": 5}', "recommendation_id"),
    "number as an order": ('{"user_id": "ada", "item_id": "item-1", "order_id": 17}', "order_id"),
    "order id with a control character": ('{"user_id": "ada", "item_id": "item-1", "order_id": "o\\t17"}', "order_id"),
    "order id of 129 characters": ('{"user_id": "a", "item_id": "item-1", "order_id": "%s"}' % ("o" * 129), "order_id"),
    "null type": ('{"user_id": "ada", "item_id": "item-1", "type": null}', "type"),
    "bad type": ('{"user_id": "ada", "item_id": "item-1", "type": "a b"}', "type"),
    "boolean value": ('{"user_id": "ada", "item_id": "item-1", "value": true}', "value"),
    "text value": ('{"user_id": "ada", "item_id": "item-1", "value": "1"}', "value"),
    "NaN": ('{"user_id": "ada", "item_id": "item-1", "value": NaN}', "value"),
    "infinity": ('{"user_id": "ada", "item_id": "item-1", "value": -Infinity}', "value"),
    "a number that overflows": ('{"user_id": "ada", "item_id": "item-1", "value": 1e999}', "value"),
    "a negative value": ('{"user_id": "ada", "item_id": "item-1", "value": -0.01}', "value"),
    "more than an event can be worth": ('{"user_id": "ada", "item_id": "item-1", "value": 1000000001}', "value"),
    "an integer that overflows": ('{"user_id": "ada", "item_id": "item-1", "value": 1%s}' % ("0" * 400), "value"),
    "boolean timestamp": ('{"user_id": "ada", "item_id": "item-1", "timestamp": false}', "timestamp"),
    "NaN timestamp": ('{"user_id": "ada", "item_id": "item-1", "timestamp": NaN}', "timestamp"),
    "infinite timestamp": ('{"user_id": "ada", "item_id": "item-1", "timestamp": -Infinity}', "timestamp"),
    "timestamp in milliseconds": ('{"user_id": "ada", "item_id": "item-1", "timestamp": 1700000000000}', "timestamp"),
    "huge timestamp": ('{"user_id": "ada", "item_id": "item-1", "timestamp": 1%s}' % ("0" * 400), "timestamp"),
    "year 2999": ('{"user_id": "ada", "item_id": "item-1", "timestamp": "2999-01-01T00:00:00Z"}', "timestamp"),
    "no time zone": ('{"user_id": "ada", "item_id": "item-1", "timestamp": "2024-01-01T00:00:00"}', "timestamp"),
    "seconds as text": ('{"user_id": "ada", "item_id": "item-1", "timestamp": "1700000000"}', "timestamp"),
    "a date": ('{"user_id": "ada", "item_id": "item-1", "timestamp": "2024-01-01"}', "timestamp"),
    "no such day": ('{"user_id": "ada", "item_id": "item-1", "timestamp": "2023-02-29T00:00:00Z"}', "timestamp"),
    "no such offset": (
        '{"user_id": "ada", "item_id": "item-1", "timestamp": "2023-01-01T00:00:00+99:00"}',
        "timestamp",
    ),
    "Arabic digits": (
        '{"user_id": "ada", "item_id": "item-1", "timestamp": "\u0662\u0660\u0662\u0663-01-01T00:00:00Z"}',
        "timestamp",
    ),
    "timestamp in an array": ('{"user_id": "ada", "item_id": "item-1", "timestamp": [1]}', "timestamp"),
    "null": ("null", None),
    "text": ('"ada"', None),
    "number": ("1", None),
    "array in the array": ("[[]]", None),
}


@pytest.mark.parametrize(("event", "field"), REFUSED.values(), ids=REFUSED)
def test_an_invalid_event_refuses_the_whole_request(shared_client: Client, event: str, field: str | None) -> None:
    shared_client.click("ada", "item-2")
    before = shared_client.get("/v1/users/ada").json(), shared_client.log("ada")
    valid = json.dumps(VALID)
    for body, index in ((event, 0), (f"[{valid}, {valid}, {event}, {valid}]", 2)):
        response = shared_client.post("/v1/events", content=body.encode(), headers={"content-type": "application/json"})
        assert response.status_code == 422
        error = response.json()["error"]
        assert error["code"] == "invalid_events"
        assert [(detail["index"], detail["field"]) for detail in error["details"]] == [(index, field)]
        assert all(detail["reason"] for detail in error["details"])
    assert (shared_client.get("/v1/users/ada").json(), shared_client.log("ada")) == before


def test_a_request_holds_1_to_1000_events(client: Client) -> None:
    assert client.post("/v1/events", json=[]).status_code == 422
    assert client.post("/v1/events", json=[VALID] * (MAX_EVENTS + 1)).status_code == 422
    assert client.get("/v1/users/ada").status_code == 404
    assert client.post("/v1/events", json=[VALID] * MAX_EVENTS).json()["accepted"] == MAX_EVENTS


def test_only_the_first_20_errors_are_listed(client: Client) -> None:
    events = [{**VALID, "user_id": "not\nvalid"} if n % 2 else VALID for n in range(100)]
    details = client.post("/v1/events", json=events).json()["error"]["details"]
    assert [detail["index"] for detail in details] == list(range(1, 41, 2))


def test_only_the_first_20_invalid_events_are_listed(client: Client) -> None:
    events = [VALID, *({"user_id": "a\x85b", "value": True, "timestamp": "now"} for _ in range(50))]
    details = client.post("/v1/events", json=events).json()["error"]["details"]
    assert [detail["index"] for detail in details] == list(range(1, 21))


def test_one_event_may_have_several_errors(client: Client) -> None:
    event = {"user_id": "a\x85b", "value": True, "timestamp": "now"}
    details = client.post("/v1/events", json=[VALID, event]).json()["error"]["details"]
    assert {(detail["index"], detail["field"]) for detail in details} == {
        (1, field) for field in ("user_id", "item_id", "value", "timestamp")
    }


def test_events_of_weight_zero_are_logged_and_seen_but_do_not_change_the_state(client: Client) -> None:
    client.click("ada", "item-1")
    before = client.get("/v1/users/ada").json()
    for event_type in ("dislike", "a-type-nobody-heard-of"):
        client.post("/v1/events", json={"user_id": "ada", "item_id": "item-2", "type": event_type})
    after = client.get("/v1/users/ada").json()
    assert (after["histogram"], after["last_item_id"]) == (before["histogram"], "item-1")
    assert (after["event_count"], after["recent_items"]) == (3, ["item-2", "item-1"])


def test_events_survive_a_restart(start: Callable[..., Client], tmp_path: Path) -> None:
    first = start(tmp_path)
    first.click("ada", "item-1", "item-2")
    before = first.get("/v1/users/ada").json()
    first.close()
    second = start(tmp_path)
    assert second.get("/v1/users/ada").json() == before
    second.close()


def test_events_of_a_request_are_applied_in_order_regardless_of_timestamps(client: Client) -> None:
    def events(user_id: str) -> list[dict[str, Any]]:
        return [{"user_id": user_id, "item_id": f"item-{n}", "timestamp": 1_000 + n} for n in (4, 1, 3, 2)]

    client.post("/v1/events", json=events("at-once"))
    for event in events("one-by-one"):
        client.post("/v1/events", json=event)
    client.post("/v1/events", json=sorted(events("by-time"), key=itemgetter("timestamp")))
    at_once, one_by_one, by_time = map(client.recommend, ("at-once", "one-by-one", "by-time"))
    assert [event.item_id for event in client.log("at-once")] == ["item-4", "item-1", "item-3", "item-2"]
    assert same_items(at_once, one_by_one)
    assert not same_items(at_once, by_time)


def test_a_closed_store_returns_503_with_retry_after(client: Client) -> None:
    client.close_store()
    response = client.post("/v1/events", json=VALID)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "storage_unavailable"
    assert int(response.headers["retry-after"]) >= 1


def test_a_busy_store_is_reported_as_busy(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise StorageBusy("8,192 events wait")

    monkeypatch.setattr(client.service.store, "append", refuse)
    response = client.post("/v1/events", json=VALID)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "storage_busy")
    assert int(response.headers["retry-after"]) > 0


def test_a_partly_applied_request_lists_the_applied_events(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail_in_part(*_: object) -> None:
        applied = dict.fromkeys([0, 1, 2, 7, *range(100, 1_000, 2)], AppendResult())
        raise PartlyApplied(StorageUnavailable("Redis is full", "memory_full"), applied)

    monkeypatch.setattr(client.service.store, "append", fail_in_part)
    response = client.post("/v1/events", json=[VALID] * 1_000)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, "partly_applied")
    assert "the store's memory is full; send all of them again" in error["message"]
    assert error["details"][0]["reason"].startswith("applied: 0-2, 7, 100, 102, ")
    assert int(response.headers["retry-after"]) > 0
    assert len(response.content) <= 4_096
