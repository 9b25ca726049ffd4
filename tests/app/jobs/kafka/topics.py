"""Topics of mock brokers, and commands that run on them in their own processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from benchmarks.harness.service_process import fetch, free_port
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[4]
PARTITIONS = 4
# whoever is killed is missed soon, and finds its way back soon
PROPERTIES = {
    "session.timeout.ms": 1_500,
    "heartbeat.interval.ms": 300,
    "reconnect.backoff.ms": 10,
    "reconnect.backoff.max.ms": 100,
}
# whoever is busy for seconds is not missed, and does nothing twice
PATIENT_PROPERTIES = PROPERTIES | {"session.timeout.ms": 200_000}


def produce(addresses: str, topic: str, records: Iterable[tuple[str | bytes | None, Any]]) -> None:
    """Write records with key and value in order; values other than bytes are encoded as JSON."""
    config = {"bootstrap.servers": addresses, "enable.idempotence": True, "message.max.bytes": 10_000_000}
    producer = Producer(config)
    failed: list[object] = []

    def noted(error: object, _: Message) -> None:
        if error is not None:
            failed.append(error)

    for key, value in records:
        content = value if value is None or isinstance(value, bytes) else orjson.dumps(value)
        producer.produce(topic, content, key, on_delivery=noted)
    assert producer.flush(PATIENCE_S) == 0
    assert failed == []


def read_all(addresses: str, topic: str, is_enough: int) -> list[Message]:
    """Read a topic from the beginning until it has this many records."""
    consumer = Consumer({"bootstrap.servers": addresses, "group.id": "reader", "auto.offset.reset": "earliest"})
    found: list[Message] = []
    try:
        numbers = consumer.list_topics(topic, timeout=PATIENCE_S).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, 0) for number in numbers])

        def read() -> bool:
            found.extend(record for record in consumer.consume(1_000, 0.1) if record.error() is None)
            return len(found) >= is_enough

        wait_until(read, lambda: f"{len(found)} of {is_enough} records in {topic}")
        return found
    finally:
        consumer.close()


def headers_of(record: Message) -> dict[str, str]:
    """The headers of a record as text."""
    return {name: value.decode() for name, value in dict(record.headers() or []).items() if isinstance(value, bytes)}


@contextmanager
def group_lag(addresses: str, topic: str) -> Iterator[Callable[[], int]]:
    """Yield a function that counts the records that the topic's consumer group has not committed."""
    client = Consumer({"bootstrap.servers": addresses, "group.id": topic})

    def lag() -> int:
        committed = client.committed(
            [TopicPartition(topic, number) for number in range(PARTITIONS)], timeout=PATIENCE_S
        )
        ends = [client.get_watermark_offsets(place, timeout=PATIENCE_S)[1] for place in committed]
        return sum(end - max(0, place.offset) for end, place in zip(ends, committed, strict=True))

    yield lag
    client.close()


class Command:
    """A lisarec command in its own process, with log and metrics."""

    def __init__(self, log: Path, *arguments: object) -> None:
        self.metrics_address = f"127.0.0.1:{free_port()}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LISAREC_")}
        command = [sys.executable, "-m", "app", *map(str, arguments), "--metrics", self.metrics_address]
        self._log = log
        with log.open("a") as file:
            self.process = subprocess.Popen(command, cwd=ROOT, env=inherited, stdout=file, stderr=file)

    def log(self) -> str:
        return self._log.read_text()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def wait_for(self, name: str) -> None:
        """Wait until a metric of the process is above zero."""
        wait_until(lambda: self.metrics().get(name, 0) > 0, self.log)

    def metrics(self) -> dict[str, float]:
        """Samples of the process by name and labels; empty before it listens."""
        try:
            lines = fetch(f"http://{self.metrics_address}/metrics").text.splitlines()
        except httpx.TransportError:
            return {}
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name: float(value) for name, _, value in pairs}


class ConsumerProcess(Command):
    """``lisarec consume`` with a consumer group named after the topic."""

    def __init__(
        self,
        directory: Path,
        addresses: str,
        topic: str,
        url: str,
        *options: object,
        properties: Mapping[str, object] = PROPERTIES,
    ) -> None:
        file = directory / "properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        super().__init__(
            directory / f"{topic}.log",
            *("consume", "--brokers", addresses, "--topic", topic, "--group", topic, "--url", url),
            *("--dead-letters", f"{topic}-dead", "--properties", file, "--linger", 0.02, *options),
        )


class PublisherProcess(Command):
    """``lisarec publish`` of a store, with its offsets in the directory."""

    def __init__(
        self, directory: Path, addresses: str, topic: str, store: Mapping[str, object], *options: object
    ) -> None:
        place = [part for name, value in store.items() for part in (f"--{name.replace('_', '-')}", value)]
        super().__init__(
            directory / "publish.log",
            *("publish", "--brokers", addresses, "--topic", topic, "--positions", directory / "positions"),
            *(*place, *options),
        )
