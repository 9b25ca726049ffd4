"""Measure how many records a second `lisarec consume` settles, beside the same events in HTTP batches.

Brokers, consumer, service and Redis share this machine. The topic is filled before; the rate is that of the middle of
the records, so starts do not count.

    python -m benchmarks.kafka.throughput --model models/ml-1m
    python -m benchmarks.kafka.throughput --model models/ml-1m --store sqlite
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import httpx
import orjson
import typer
from confluent_kafka import Producer
from rich.console import Console
from uuid_utils import uuid7

from benchmarks import machine
from benchmarks.harness.service_process import free_port, running_service
from benchmarks.harness.topology import redis_server
from benchmarks.kafka.brokers import ROOT, mock_brokers
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


def middle_rate(total: int, settled: Callable[[], float]) -> float:
    """Return the records a second between the first and the last tenth."""
    times_s = []
    for share in MIDDLE:
        while (count := settled()) < share * total:
            time.sleep(0.05)
        times_s.append((time.monotonic(), count))
    (begin_s, first), (end_s, last) = times_s
    return (last - first) / (end_s - begin_s)


def consumed_rate(addresses: str, url: str, total: int) -> float:
    """Run one consumer over the topic; return its records a second."""
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
        return middle_rate(total, settled)
    finally:
        consumer.terminate()
        consumer.wait(30)


def posted_rate(url: str, sent: Sequence[Event], connections: int) -> float:
    """Post the events in batches that are prepared; return events a second."""
    bodies = [orjson.dumps(sent[begin : begin + BATCH]) for begin in range(0, len(sent), BATCH)]
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(connections) as executor:

        def post(body: bytes) -> None:
            client.post("/v1/events", content=body, headers=headers).raise_for_status()

        begin_s = time.monotonic()
        list(executor.map(post, bodies))
        return len(sent) / (time.monotonic() - begin_s)


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    records: Annotated[int, typer.Option(min=5_000, help="Of each way.")] = 100_000,
    store: Annotated[Literal["redis", "sqlite"], typer.Option(help="Of the service.")] = "redis",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Print the rates of each round, one way after the other."""
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
            consumed = consumed_rate(brokers.addresses, url, records)
            posted = {count: posted_rate(url, events(records, item_ids), count) for count in (1, 4)}
        ways = ", ".join(f"{rate:,.0f} over {count} connection(s)" for count, rate in posted.items())
        console.print(f"consumed {consumed:,.0f} records/s; posted events/s: {ways}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
