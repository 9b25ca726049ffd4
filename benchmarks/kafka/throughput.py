"""Measure the records a second that `lisarec consume` processes, compared with the same events in HTTP batches.

Brokers, consumer, service and Redis share this machine. The topic is filled before; the rate is that of the middle of
the records, so starts do not count. Beside it stands what a record costs each process in CPU time, which tells more
where other programs want the same cores.

    python -m benchmarks.kafka.throughput --model models/ml-1m
    python -m benchmarks.kafka.throughput --model models/ml-1m --store sqlite
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import httpx
import orjson
import psutil
import typer
from confluent_kafka import Producer
from rich.console import Console
from uuid_utils import uuid7

from benchmarks import machine
from benchmarks.harness.compose import ROOT
from benchmarks.harness.service_process import free_port, running_service
from benchmarks.harness.topology import redis_server
from benchmarks.kafka.brokers import mock_brokers
from model.artifact import model_directory

TOPIC = "clicks"
PARTITIONS = 16
USERS = 10_000
BATCH = 1_000
MIDDLE = (0.1, 0.9)  # of the records

console = Console()
Event = dict[str, str]


def events(count: int, item_ids: Sequence[str]) -> list[Event]:
    """Return new events of random users and items."""
    rng = random.Random(count)
    return [
        {"event_id": str(uuid7()), "user_id": f"user-{rng.randrange(USERS)}", "item_id": rng.choice(item_ids)}
        for _ in range(count)
    ]


def fill(addresses: str, sent: Sequence[Event]) -> None:
    """Write the events to the topic."""
    producer = Producer({"bootstrap.servers": addresses, "enable.idempotence": True, "compression.type": "lz4"})
    for event in sent:
        producer.produce(TOPIC, orjson.dumps(event), event["user_id"].encode())
        while len(producer) > 50_000:
            producer.poll(0.1)
    if producer.flush(60):
        raise RuntimeError("the brokers do not take the records")


class CpuTimes:
    """CPU seconds of the child processes, by a word of their command."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def read(self) -> dict[str, float]:
        """Return the CPU seconds so far."""
        found = dict.fromkeys(self._words, 0.0)
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                command = process.cmdline()
                for word in self._words:
                    if any(part.partition(" ")[0].endswith(word) for part in command[:4]):  # Redis's is one part
                        found[word] += sum(process.cpu_times()[:2])
        return found


@dataclass(frozen=True)
class Measured:
    """Records a second, and µs of CPU time a record by process."""

    rate: float
    cpu_us: dict[str, float]

    @classmethod
    def between(
        cls, begin: tuple[float, float, dict[str, float]], end: tuple[float, float, dict[str, float]]
    ) -> Measured:
        """Return the differences of two moments: time, records and CPU times."""
        records = end[1] - begin[1]
        cpu_us = {name: (end[2][name] - begin[2][name]) * 1e6 / records for name in end[2]}
        return cls(records / (end[0] - begin[0]), cpu_us)

    def __str__(self) -> str:
        costs = ", ".join(f"{name} {cost:.0f}" for name, cost in self.cpu_us.items() if cost)
        return f"{self.rate:,.0f}/s ({costs} µs)"


def consumed(addresses: str, url: str, total: int) -> Measured:
    """Run one consumer over the topic, and measure the middle part of the records."""
    metrics = f"127.0.0.1:{free_port()}"
    command = ["consume", "--brokers", addresses, "--topic", TOPIC, "--url", url, "--metrics", metrics]
    consumer = subprocess.Popen([sys.executable, "-m", "app", *command], cwd=ROOT, stdout=subprocess.DEVNULL)

    def settled() -> float:
        if consumer.poll() is not None:
            raise RuntimeError(f"the consumer ended with {consumer.returncode}")
        try:
            lines = httpx.get(f"http://{metrics}/metrics").text.splitlines()
        except httpx.TransportError:
            return 0
        return sum(float(line.split()[-1]) for line in lines if line.startswith("lisarec_consume_records_total"))

    try:
        cpu, moments = CpuTimes("consume", "serve", "redis-server"), []
        for share in MIDDLE:
            while (count := settled()) < share * total:
                time.sleep(0.05)
            moments.append((time.monotonic(), count, cpu.read()))
        return Measured.between(*moments)
    finally:
        consumer.terminate()
        consumer.wait(30)


def posted(url: str, sent: Sequence[Event], connections: int) -> Measured:
    """Post the events in prepared batches."""
    bodies = [orjson.dumps(sent[begin : begin + BATCH]) for begin in range(0, len(sent), BATCH)]
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(connections) as executor:

        def post(body: bytes) -> None:
            client.post("/v1/events", content=body, headers=headers).raise_for_status()

        cpu = CpuTimes("serve", "redis-server")
        begin = (time.monotonic(), 0.0, cpu.read())
        list(executor.map(post, bodies))
        return Measured.between(begin, (time.monotonic(), float(len(sent)), cpu.read()))


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    records: Annotated[int, typer.Option(min=5_000, help="Of each way.")] = 100_000,
    store: Annotated[Literal["redis", "sqlite"], typer.Option(help="Of the service.")] = "redis",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Print the rates of each round for both ways in turn."""
    item_ids = model_directory.load(model).items.ids
    console.print(f"{machine.cpu()}, {store}, batches of {BATCH:,}", highlight=False)
    for _ in range(rounds):
        with ExitStack() as stack:
            directory = Path(stack.enter_context(TemporaryDirectory()))
            options = ["--redis-url", stack.enter_context(redis_server(directory))] if store == "redis" else []
            url = stack.enter_context(running_service(model, *options))
            brokers = stack.enter_context(mock_brokers())
            brokers.create_topic(TOPIC, PARTITIONS)
            fill(brokers.addresses, events(records, item_ids))
            measured = {"consumed": consumed(brokers.addresses, url, records)}
            for count in (1, 4):
                measured[f"posted over {count}"] = posted(url, events(records, item_ids), count)
        console.print("; ".join(f"{way} {numbers}" for way, numbers in measured.items()), highlight=False)


if __name__ == "__main__":
    typer.run(main)
