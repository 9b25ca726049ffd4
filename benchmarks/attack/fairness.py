"""Measure how long a plain user waits while another key does the worst that it may.

A plain user asks for ten items, again and again, in an open loop. Beside it, connections of another key of the same
tenant, or of another tenant's key, send their costliest calls as fast as they are answered; no key has a rate. Quiet
times and attacks take turns. The law: the plain user's 99th percentile is at most twice the quiet one's plus 20 ms, and
every one of its requests is answered. Exit status 1 where it does not hold.

    python -m benchmarks.attack.fairness --model models/ml-1m --items 100000
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from app.jobs.loadtest.synthetic_catalogue import item_id
from benchmarks.attack.attacked_service import AttackedService, Connection, attacked_service, request_bytes
from benchmarks.attack.costly_calls import Call, other_reads, plain, recommendations, writes
from model.artifact import model_directory

MAX_FACTOR, MAX_MORE_MS = 2.0, 20.0
ATTACKS = "batch of 100: plain", "batch of 6: explain", "candidates", "together", "exclude_seen", "search", "events"
REQUESTS_PER_S = 50.0
PRIORITY = 5  # of the attackers' process: on this machine their clients would compete with the service for its cores

console = Console(width=120)


@dataclass(frozen=True)
class Waited:
    """How long the plain user waited in some seconds, in milliseconds, and how many requests were refused."""

    latencies_ms: Sequence[float]
    refused: int

    @property
    def p50_ms(self) -> float:
        """The median."""
        return float(np.median(self.latencies_ms))

    @property
    def p99_ms(self) -> float:
        """The 99th percentile."""
        return float(np.percentile(self.latencies_ms, 99))


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory, of items with categories.")],
    items: Annotated[int, typer.Option(min=1, help="Items, the model's and copies of them.")] = 100_000,
    seconds: Annotated[float, typer.Option(min=1, help="Of each attack, and of quiet before it.")] = 10.0,
    connections: Annotated[int, typer.Option(min=1, help="Of the attacker.")] = 32,
) -> None:
    """Print the plain user's waiting times beside each attack, and those of the quiet before it."""
    labels = model_directory.load(model).items.categories
    categories = sorted(labels.names, key=lambda name: -len(labels.items_with(name)))
    item_ids = [item_id(number) for number in range(items)]
    calls = recommendations(item_ids, categories) + other_reads(item_ids, categories) + writes(item_ids)
    is_broken = False
    with attacked_service(model, items) as service:
        asyncio.run(_ask(service, seconds))  # warms up
        for call in (call for call in [plain(), *calls] if call.name in ("plain", *ATTACKS)):
            for key in ("neighbour", "stranger"):
                quiet = asyncio.run(_ask(service, seconds))
                with _attack(service, call, key, connections):
                    attacked = asyncio.run(_ask(service, seconds))
                holds = attacked.p99_ms <= MAX_FACTOR * quiet.p99_ms + MAX_MORE_MS and not attacked.refused
                is_broken |= not holds
                console.print(
                    f"{call.name}, by a {key}: p50 {quiet.p50_ms:.1f} -> {attacked.p50_ms:.1f} ms, "
                    f"p99 {quiet.p99_ms:.1f} -> {attacked.p99_ms:.1f} ms, {attacked.refused} refused: "
                    f"{'the law holds' if holds else 'too long'}"
                )
    if is_broken:
        raise typer.Exit(1)


async def _ask(service: AttackedService, seconds: float) -> Waited:
    """Send the plain user's requests, each when it is due, and measure how long after that it is answered."""
    request, latencies_ms, refused = request_bytes(plain(), service.keys["plain"]), [], 0
    idle = [await Connection.open(service.port) for _ in range(4)]
    tasks: set[asyncio.Task[None]] = set()

    async def ask(due_s: float) -> None:
        nonlocal refused
        connection = idle.pop() if idle else await Connection.open(service.port)
        status, _ = await connection.exchange(request)
        latencies_ms.append((time.perf_counter() - due_s) * 1e3)
        refused += status != 200
        idle.append(connection)

    begin_s = time.perf_counter()
    for number in range(int(seconds * REQUESTS_PER_S)):
        due_s = begin_s + number / REQUESTS_PER_S
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.add(asyncio.create_task(ask(due_s)))
    await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return Waited(latencies_ms, refused)


@contextmanager
def _attack(service: AttackedService, call: Call, key: str, connections: int) -> Iterator[None]:
    """Let another process send the call over so many connections, one after the other on each."""
    context = multiprocessing.get_context("fork")  # importing everything again would take longer than an attack
    has_begun, is_over = context.Event(), context.Event()
    requests = [request_bytes(call, service.keys[key], number) for number in range(20 if call.name == "events" else 1)]
    attacker = context.Process(target=_send_until, args=(service.port, requests, connections, has_begun, is_over))
    attacker.start()
    has_begun.wait()
    try:
        yield
    finally:
        is_over.set()
        attacker.join(timeout=60)


def _send_until(port: int, requests: Sequence[bytes], connections: int, has_begun: Event, is_over: Event) -> None:
    os.nice(PRIORITY)

    async def send(number: int) -> None:
        connection = await Connection.open(port)
        while not is_over.is_set():
            await connection.exchange(requests[number % len(requests)])
            has_begun.set()
            number += connections
        connection.close()

    async def attack() -> None:
        await asyncio.gather(*map(send, range(connections)))

    asyncio.run(attack())


if __name__ == "__main__":
    typer.run(main)
