"""`lisarec publish` sends the log to the topic in order, with the recommendation behind each event."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import orjson
import pytest

from app.jobs.kafka.attribution import Attribution
from app.jobs.kafka.publisher import message_of
from app.settings import StoreSettings
from benchmarks.kafka.brokers import MockBrokers
from storage.state.corrections import readdressed
from storage.state.event import Undo, logged_id
from tests.app.conftest import item_id
from tests.app.jobs.kafka.topics import PublisherProcess, read_all
from tests.app.service_process import Process
from tests.storage.oracles.random_events import click as logged_click
from tests.storage.redis.servers import RedisServer
from tests.waiting import PATIENCE_S, wait_until

Launch = Callable[..., Process]


@pytest.fixture(params=["sqlite", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, object]:
    if request.param == "sqlite":
        return {"data_dir": tmp_path / "state"}
    server: RedisServer = request.getfixturevalue("redis_server")
    return {"redis_url": server.url}


def click(service: Process, user: str, *numbers: int, **fields: object) -> None:
    events = [{"user_id": user, "item_id": item_id(n), "event_id": f"{user}-{n}", **fields} for n in numbers]
    assert httpx.post(f"{service.url}/v1/events", json=events).json()["accepted"] == len(numbers)


def wait_for_change(path: Path, before: bytes) -> None:
    wait_until(lambda: path.exists() and path.read_bytes() != before)


def values(brokers: MockBrokers, topic: str, count: int) -> list[dict[str, Any]]:
    records = read_all(brokers.addresses, topic, count)
    found: list[dict[str, Any]] = []
    for record in records:
        found.append(orjson.loads(record.value() or b""))
        assert record.key() == found[-1]["user_id"].encode()
    return found


def test_entries_are_published_once_in_order_with_their_recommendation(
    brokers: MockBrokers, topic: str, launch: Launch, tmp_path: Path, store: dict[str, object]
) -> None:
    service = launch(**store)
    click(service, "ada", 1, 2, 3)
    shown = httpx.get(f"{service.url}/v1/users/ada/recommendations").json()
    third = shown["items"][2]["item_id"]
    click(service, "ada", int(third.removeprefix("item-")), recommendation_id=shown["recommendation_id"])
    click(service, "bob", 5, recommendation_id="made-up", order_id="o-17")
    assert httpx.delete(f"{service.url}/v1/users/ada/events/ada-2").is_success
    first = PublisherProcess(tmp_path, brokers.addresses, topic, store, "--once")
    assert first.process.wait(PATIENCE_S) == 0, first.log()
    assert httpx.put(f"{service.url}/v1/admin/scenarios/home", json={"k": 3}).is_success
    asked = {"user_id": "bob", "scenario": "home"}
    of_home = httpx.post(f"{service.url}/v1/recommendations", json=asked).json()
    best = int(of_home["items"][0]["item_id"].removeprefix("item-"))
    click(service, "bob", best, recommendation_id=of_home["recommendation_id"])
    click(service, "ada", 40, 41)
    impressions = [{"user_id": "cid", "type": "impression", "items": items} for items in ([third, "new"], [third])]
    of_list = [one | {"recommendation_id": shown["recommendation_id"]} for one in impressions]
    assert httpx.post(f"{service.url}/v1/events", json=of_list).json()["accepted"] == 2
    again = PublisherProcess(tmp_path, brokers.addresses, topic, store, "--once")
    assert again.process.wait(PATIENCE_S) == 0, again.log()
    found = values(brokers, topic, 11)
    assert len(found) == 11
    logged = httpx.get(f"{service.url}/v1/admin/audit").json()["entries"]
    starts = [(one["actor"], one["subject"]) for one in logged if one["action"] == "export.publish"]
    assert starts == [("command line", topic)] * 2
    ada = [one for one in found if one["user_id"] == "ada"]
    assert [one["event_id"] for one in ada] == [
        "ada-1",
        "ada-2",
        "ada-3",
        ada[3]["event_id"],
        "ada-2",
        "ada-40",
        "ada-41",
    ]
    assert [one["kind"] for one in ada] == ["event"] * 4 + ["undo"] + ["event"] * 2
    assert ada[3]["item_id"] == third
    assert [one["order_id"] for one in found if one["user_id"] == "bob"] == ["o-17", None]
    generation = shown["generation"]
    assert ada[3]["recommended"] == {"generation": generation, "experiment": None, "scenario": None, "place": 3}
    (of_bob,) = [one["recommended"] for one in found if one["event_id"] == f"bob-{best}"]
    assert of_bob == {"generation": generation, "experiment": None, "scenario": "home", "place": 1}
    of_cid = [one for one in found if one["user_id"] == "cid"]
    assert [(one["items"], one["recommended"]) for one in of_cid] == [
        ([third, "new"], None),
        ([third], ada[3]["recommended"]),
    ]
    assert not any("item_id" in one for one in of_cid)
    assert [one["recommended"] for one in found if one["kind"] == "event"].count(None) == 7


def test_a_running_publisher_follows_experiments(launch: Launch, store: dict[str, object]) -> None:
    service = launch(**store)
    for name in ("home", "home-2"):
        assert httpx.put(f"{service.url}/v1/admin/scenarios/{name}", json={"k": 3}).is_success
    attribution = Attribution(StoreSettings.model_validate(store))
    experiment = f"{service.url}/v1/admin/experiment"
    compared = {"name": "prices", "over": "scenarios", "shares": {"home": 1, "home-2": 1}}
    assert httpx.put(experiment, json=compared).is_success
    shown = httpx.get(f"{service.url}/v1/users/ada/recommendations?scenario=home").json()
    chosen = {"item_id": shown["items"][0]["item_id"], "recommendation_id": shown["recommendation_id"]}
    event = replace(logged_click("e1", "ada"), **chosen)
    expected = {
        "generation": shown["generation"],
        "experiment": "prices",
        "scenario": shown["scenario"],
        "place": 1,
    }
    assert attribution.of("main", event) == expected
    assert httpx.delete(experiment).is_success
    assert httpx.get(f"{service.url}/v1/stats").is_success  # has written the counts
    assert Attribution(StoreSettings.model_validate(store)).of("main", event) == expected


def test_a_killed_publisher_resumes_without_gaps(
    brokers: MockBrokers, topic: str, launch: Launch, tmp_path: Path, store: dict[str, object]
) -> None:
    service = launch(**store)
    positions = tmp_path / "positions"
    for number in range(3):
        click(service, f"user-{number}", *range(50))
        running = PublisherProcess(tmp_path, brokers.addresses, topic, store, "--every", 0.05)
        wait_for_change(positions, positions.read_bytes() if positions.exists() else b"")
        assert running.end(signal.SIGKILL) == -signal.SIGKILL
    last = PublisherProcess(tmp_path, brokers.addresses, topic, store, "--every", 0.05)
    click(service, "user-9", *range(50))
    found = values(brokers, topic, 200)
    last.wait_for("lisarec_publish_through_timestamp_seconds")
    assert 50 <= last.metrics()["lisarec_publish_entries_total"] <= 200  # the last user's, and what kills left
    assert last.metrics()["lisarec_publish_failures_total"] == 0
    assert last.end() == 0, last.log()
    for user in ("user-0", "user-1", "user-2", "user-9"):
        in_order = dict.fromkeys(one["event_id"] for one in found if one["user_id"] == user)
        assert list(in_order) == [f"{user}-{number}" for number in range(50)]


def test_audit_entries_that_redis_refuses_are_written_later(
    brokers: MockBrokers, topic: str, launch: Launch, tmp_path: Path, redis_server: RedisServer
) -> None:
    service = launch(redis_url=redis_server.url)
    click(service, "ada", 1)
    redis_server.client.config_set("min-replicas-to-write", 1)
    publisher = PublisherProcess(tmp_path, brokers.addresses, topic, {"redis_url": redis_server.url}, "--every", 0.1)
    wait_until(lambda: "does not have this export yet" in publisher.log(), publisher.log)
    redis_server.client.config_set("min-replicas-to-write", 0)
    wait_until(lambda: "export.publish" in httpx.get(f"{service.url}/v1/admin/audit").text, publisher.log)
    publisher.end()


def test_offsets_of_another_topic_are_refused(brokers: MockBrokers, topic: str, tmp_path: Path) -> None:
    (tmp_path / "positions").write_text('{"topic": "other", "positions": {}}')
    refused = PublisherProcess(tmp_path, brokers.addresses, topic, {"data_dir": tmp_path}, "--once")
    assert refused.process.wait(PATIENCE_S) == 1
    assert "has the positions of the topic 'other'" in refused.log()


def test_events_and_undos_with_similar_ids_stay_distinct() -> None:
    """Event "a/b" of the user, and "b" of the merged visitor "a"."""
    attribution = Mock(spec=Attribution)  # of events that no recommendation led to
    for own, of_visitor in (
        (logged_click(logged_id("a/b"), "u"), logged_click("b", "a")),
        (Undo("u", logged_id("a/b"), 0), Undo("a", "b", 0)),
    ):
        records = own, readdressed(of_visitor, "u")
        assert len({message_of("main", record, attribution)["event_id"] for record in records}) == 2
