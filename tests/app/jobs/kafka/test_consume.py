"""`lisarec consume` delivers each record once, from brokers over sockets to a real service."""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.http.auth.keys import add, make
from app.settings import Settings
from benchmarks.harness.service_process import free_port
from benchmarks.kafka.brokers import FETCH, HEARTBEAT, OFFSET_COMMIT, MockBrokers
from storage.state.event import Event
from tests.app.conftest import item_id, logged_events
from tests.app.jobs.kafka.topics import (
    PATIENT_PROPERTIES,
    ConsumerProcess,
    group_lag,
    headers_of,
    produce,
    read_all,
)
from tests.app.service_process import Process
from tests.waiting import PATIENCE_S, wait_until

USERS = 20

Launch = Callable[..., Process]
Consume = Callable[..., ConsumerProcess]


def events(count: int, first: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Numbered events; every second one lacks an id, a user or a time."""
    for number in range(first, first + count):
        user = f"user-{number % USERS}"
        plain = {"item_id": item_id(number % 50), "value": float(number)}
        own = {"event_id": f"own-{number}", "user_id": user, "timestamp": 1_750_000_000 + number}
        yield user, plain if number % 2 else plain | own


def logged(model_dir: Path, data_dir: Path) -> dict[str, list[Event]]:
    settings = Settings(model_dir=model_dir, data_dir=data_dir)
    return {user: asyncio.run(logged_events(settings, user)) for user in (f"user-{number}" for number in range(USERS))}


def require_each_once(model_dir: Path, data_dir: Path, count: int) -> None:
    """Assert that each event is in the log of its user once, in the order of the topic."""
    for user, log in logged(model_dir, data_dir).items():
        number = int(user.removeprefix("user-"))
        assert [event.value for event in log] == [float(n) for n in range(number, count, USERS)], user


def settled(brokers: MockBrokers, topic: str, *consumers: ConsumerProcess) -> None:
    """Wait until all records of the topic are committed."""
    with group_lag(brokers.addresses, topic) as lag:
        wait_until(lambda: lag() == 0, lambda: "".join(one.log() for one in consumers))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def test_records_are_logged_and_invalid_ones_become_dead_letters(
    brokers: MockBrokers, topic: str, launch: Launch, consume: Consume, model_dir: Path, state: Path
) -> None:
    poison: list[tuple[str | None, Any]] = [
        ("user-1", b"{"),
        (None, {"item_id": "tea"}),
        ("user-1", {"item_id": "tea", "colour": "blue"}),
        ("user-1", {"item_id": "tea", "timestamp": 32_000_000_000}),
        ("user-1", {"item_id": "x" * 1_500_000}),
        ("user-1", None),
    ]
    good = list(events(60))
    produce(brokers.addresses, topic, [*good[:30], *poison[:4], *good[30:], *poison[4:]])
    consumer = consume(launch(), properties=PATIENT_PROPERTIES)
    settled(brokers, topic, consumer)
    metrics = consumer.metrics()
    assert consumer.end() == 0, consumer.log()
    require_each_once(model_dir, state, 60)
    assert metrics['lisarec_consume_records_total{outcome="accepted"}'] == 60
    assert metrics['lisarec_consume_records_total{outcome="dead_letter"}'] == len(poison)
    letters = read_all(brokers.addresses, f"{topic}-dead", len(poison))
    headers = [headers_of(letter) for letter in letters]
    assert len(letters) == len(poison)
    assert {header["lisarec-topic"] for header in headers} == {topic}
    assert len({(header["lisarec-partition"], header["lisarec-offset"]) for header in headers}) == len(poison)
    reasons = sorted(header["lisarec-reason"] for header in headers)
    assert [reason.partition(":")[0] for reason in reasons] == sorted(
        ["is not JSON", "user_id", "event", "timestamp", "the body exceeds 1,048,576 bytes; split it", "has no value"]
    ), reasons


def test_refused_records_leave_the_others_in_order(
    brokers: MockBrokers, topic: str, launch: Launch, consume: Consume, model_dir: Path, state: Path
) -> None:
    """More invalid records in a request than the service lists."""
    mixed = [
        one
        for number, pair in enumerate(events(400))
        for one in ([pair, ("user-1", {})] if number % 4 == 0 else [pair])
    ]
    produce(brokers.addresses, topic, mixed)
    consumer = consume(launch(), properties=PATIENT_PROPERTIES)
    settled(brokers, topic, consumer)
    assert consumer.end() == 0, consumer.log()
    require_each_once(model_dir, state, 400)
    assert len(read_all(brokers.addresses, f"{topic}-dead", 100)) == 100


def test_events_count_once_across_repeated_kills(
    brokers: MockBrokers, topic: str, launch: Launch, consume: Consume, model_dir: Path, state: Path
) -> None:
    service = launch()
    kills, more = 6, 300
    for number in range(kills):
        produce(brokers.addresses, topic, events(more, number * more))
        consumer = consume(service, "--batch-size", 20)
        consumer.wait_for('lisarec_consume_records_total{outcome="accepted"}')
        assert consumer.end(signal.SIGKILL) == -signal.SIGKILL
    consumer = consume(service)
    settled(brokers, topic, consumer)
    assert consumer.end() == 0, consumer.log()
    require_each_once(model_dir, state, kills * more)


def test_events_count_once_across_rebalances(
    brokers: MockBrokers, topic: str, launch: Launch, consume: Consume, model_dir: Path, state: Path
) -> None:
    service = launch()
    first = consume(service, "--batch-size", 50)
    total = 0
    for _ in range(3):
        produce(brokers.addresses, topic, events(400, total))
        total += 400
        second = consume(service, "--batch-size", 50)
        second.wait_for('lisarec_consume_rebalances_total{change="assigned"}')
        produce(brokers.addresses, topic, events(400, total))
        total += 400
        assert second.end() == 0, second.log()
    settled(brokers, topic, first)
    metrics = first.metrics()
    # a member that is too late for a heartbeat loses its partitions, instead of giving them back
    assert sum(metrics[f'lisarec_consume_rebalances_total{{change="{change}"}}'] for change in ("revoked", "lost")) > 0
    assert first.end() == 0, first.log()
    require_each_once(model_dir, state, total)


def test_broker_failures_and_cut_connections_lose_nothing(
    brokers: MockBrokers, topic: str, launch: Launch, consume: Consume, model_dir: Path, state: Path
) -> None:
    consumer = consume(launch(), "--batch-size", 50)
    total = 0
    for broker in (1, 2, 3):
        for request in (FETCH, HEARTBEAT, OFFSET_COMMIT):
            brokers.cut(broker, request, 5)
        produce(brokers.addresses, topic, events(300, total))
        total += 300
        brokers.stop(broker)
        brokers.move(topic, broker - 1, broker % 3 + 1)
        brokers.start(broker)
    settled(brokers, topic, consumer)
    assert consumer.end() == 0, consumer.log()
    require_each_once(model_dir, state, total)


def test_an_unavailable_service_causes_no_dead_letters(
    brokers: MockBrokers, topic: str, launch: Launch, consume: Consume, model_dir: Path, state: Path
) -> None:
    port = free_port()
    service = launch(port=port)
    consumer = consume(service)
    produce(brokers.addresses, topic, events(100))
    settled(brokers, topic, consumer)
    service.kill()
    produce(brokers.addresses, topic, events(300, 100))
    wait_until(lambda: consumer.metrics()["lisarec_consume_paused"] == 1, consumer.log)
    wait_until(lambda: sum(lags(consumer).values()) == 300, lambda: str(lags(consumer)))
    launch(port=port)
    settled(brokers, topic, consumer)
    wait_until(lambda: sum(lags(consumer).values()) == 0, lambda: str(lags(consumer)))
    assert consumer.metrics()["lisarec_consume_paused"] == 0
    assert consumer.metrics()['lisarec_consume_records_total{outcome="dead_letter"}'] == 0
    assert consumer.end() == 0, consumer.log()
    require_each_once(model_dir, state, 400)


def test_partitions_revoked_while_paused_are_read_after_they_return(
    brokers: MockBrokers, topic: str, launch: Launch, consume: Consume, model_dir: Path, state: Path
) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    produce(brokers.addresses, topic, events(200))
    first = consume(url)
    first.wait_for("lisarec_consume_paused")
    second = consume(url)
    second.wait_for('lisarec_consume_rebalances_total{change="assigned"}')
    launch(port=port)
    settled(brokers, topic, first, second)
    assert second.end() == 0, second.log()
    produce(brokers.addresses, topic, events(200, 200))
    settled(brokers, topic, first)
    assert first.end() == 0, first.log()
    require_each_once(model_dir, state, 400)


def lags(consumer: ConsumerProcess) -> dict[str, float]:
    return {name: value for name, value in consumer.metrics().items() if "lag_records" in name}


def test_sigterm_ends_it_at_once_while_the_service_is_unavailable(
    brokers: MockBrokers, topic: str, consume: Consume
) -> None:
    produce(brokers.addresses, topic, events(10))
    consumer = consume(f"http://127.0.0.1:{free_port()}")
    consumer.wait_for("lisarec_consume_failures_total")
    wait_until(lambda: sum(lags(consumer).values()) == 10, lambda: str(consumer.metrics()))
    assert consumer.end() == 0, consumer.log()
    with group_lag(brokers.addresses, topic) as lag:
        assert lag() == 10


def test_a_refused_request_ends_the_command(
    brokers: MockBrokers, topic: str, launch: Launch, consume: Consume, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.touch()
    produce(brokers.addresses, topic, events(10))
    consumer = consume(launch(keys_file=keys))
    assert consumer.process.wait(PATIENCE_S) == 1
    assert "answers 401" in consumer.log()
    assert "Traceback" not in consumer.log()
    with group_lag(brokers.addresses, topic) as lag:
        assert lag() == 10


def test_new_users_beyond_the_quota_are_sent_in_parts(
    brokers: MockBrokers, topic: str, launch: Launch, consume: Consume, tmp_path: Path
) -> None:
    text, key = make("main", ["events:write"], new_users_per_hour=USERS - 1)
    add(tmp_path / "keys", key)
    (tmp_path / "key").write_text(text)
    produce(brokers.addresses, topic, events(2 * USERS))
    consumer = consume(launch(keys_file=tmp_path / "keys"), "--linger", 2, "--key-file", tmp_path / "key")
    consumer.wait_for('lisarec_consume_records_total{outcome="accepted"}')
    consumer.wait_for("lisarec_consume_failures_total")  # the rest of the quota is too little for the rest of them
    assert consumer.metrics()['lisarec_consume_records_total{outcome="dead_letter"}'] == 0
    assert consumer.end() == 0, consumer.log()


def test_records_of_a_user_stay_in_order(
    brokers: MockBrokers, topic: str, launch: Launch, consume: Consume, model_dir: Path, state: Path
) -> None:
    places: defaultdict[str, list[float]] = defaultdict(list)
    for user, event in events(200):
        places[user].append(event["value"])
    produce(brokers.addresses, topic, events(200))
    consumer = consume(launch(), "--batch-size", 7)
    settled(brokers, topic, consumer)
    assert {user: [event.value for event in log] for user, log in logged(model_dir, state).items()} == places
