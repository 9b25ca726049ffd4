"""Measure how long a plain user waits while another key does the worst that it may.

A plain user asks for ten items, again and again, in an open loop. Beside it, connections of another key of the same
tenant, or of another tenant's key, send their costliest calls as fast as they are answered; no key has a rate. Quiet
and attacked seconds take turns. The law: of all rounds, the median of the plain user's 99th percentiles is at most
twice the quiet one plus 20 ms, and every one of its requests is answered. What does not hold is measured again, as the
machine may have been busy. Exit status 1 where it never holds. An attack named `nothing` takes processor time in its
own process and sends nothing: it tells how much of the waiting is the machine's.

    python -m benchmarks.attack.fairness --model models/ml-1m --items 100000 --store redis
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from app.jobs.loadtest.synthetic_catalogue import item_id
from benchmarks.attack.attacked_service import AttackedService, Connection, Store, attacked_service, request_bytes
from benchmarks.attack.attacks import Attack, attacks
from benchmarks.attack.costly_calls import plain
from model.artifact import model_directory

MAX_FACTOR, MAX_MORE_MS = 2.0, 20.0
AGAIN = 2  # times that what does not hold is measured once more
ATTACKERS = "neighbour", "stranger"
REQUESTS_PER_S = 50.0
PRIORITY = 5  # of the attackers' process: on this machine their clients would compete with the service for its cores

console = Console(width=120)
_turns = count(0, 1_000_000)  # so that no turn of an attack comes twice


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


@dataclass(frozen=True)
class Rounds:
    """Quiet and attacked seconds, in turns."""

    quiet: Sequence[Waited]
    attacked: Sequence[Waited]

    @property
    def is_fair(self) -> bool:
        """Whether the law holds."""
        quiet_ms, attacked_ms = (median(one.p99_ms for one in part) for part in (self.quiet, self.attacked))
        return attacked_ms <= MAX_FACTOR * quiet_ms + MAX_MORE_MS and not any(one.refused for one in self.attacked)

    def __str__(self) -> str:
        """Return the medians of the rounds."""
        p50s, p99s = (
            [median(getattr(one, name) for one in part) for part in (self.quiet, self.attacked)]
            for name in ("p50_ms", "p99_ms")
        )
        refused = sum(one.refused for one in self.attacked)
        return (
            f"p50 {p50s[0]:.1f} -> {p50s[1]:.1f} ms, p99 {p99s[0]:.1f} -> {p99s[1]:.1f} ms, {refused} refused: "
            f"{'the law holds' if self.is_fair else 'too long'}"
        )


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory, of items with categories.")],
    items: Annotated[int, typer.Option(min=1, help="Items, the model's and copies of them.")] = 100_000,
    store: Annotated[Store, typer.Option(help="Where users are kept.")] = "sqlite",
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each attack in a round, and of quiet before it.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of each attack.")] = 5,
    connections: Annotated[int, typer.Option(min=1, help="Of the attacker.")] = 32,
    only: Annotated[list[str] | None, typer.Option(help="Attack to measure; repeatable. Default: all.")] = None,
) -> None:
    """Print the plain user's waiting times beside each attack, and those of the quiet before it."""
    labels = model_directory.load(model).items.categories
    categories = sorted(labels.names, key=lambda name: -len(labels.items_with(name)))
    found = attacks([item_id(number) for number in range(items)], categories)
    if unknown := set(only or ()) - {attack.name for attack in found}:
        raise typer.BadParameter(f"there is no attack {', '.join(sorted(unknown))}")
    unfair = []
    with attacked_service(model, items, store) as service:
        asyncio.run(_ask(service, seconds))  # warms up
        for attack in (attack for attack in found if not only or attack.name in only):
            for key in ATTACKERS:
                for _ in range(1 + AGAIN):
                    measured = _measure(service, attack, key, seconds, rounds, connections)
                    console.print(f"{attack.name}, by a {key}: {measured}")
                    if measured.is_fair:
                        break
                else:
                    unfair.append(f"{attack.name} by a {key}")
    console.print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    if unfair:
        console.print(f"others wait too long for: {', '.join(unfair)}", style="red")
        raise typer.Exit(1)


def _measure(
    service: AttackedService, attack: Attack, key: str, seconds: float, rounds: int, connections: int
) -> Rounds:
    quiet, attacked = [], []
    for _ in range(rounds):
        quiet.append(asyncio.run(_ask(service, seconds)))
        with _attack(service, attack, key, connections):
            attacked.append(asyncio.run(_ask(service, seconds)))
    return Rounds(quiet, attacked)


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
    for number in range(max(1, int(seconds * REQUESTS_PER_S))):
        due_s = begin_s + number / REQUESTS_PER_S
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.add(asyncio.create_task(ask(due_s)))
    await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return Waited(latencies_ms, refused)


@contextmanager
def _attack(service: AttackedService, attack: Attack, key: str, connections: int) -> Iterator[None]:
    """Let another process send the attack's calls over so many connections, one after the other on each."""
    context = multiprocessing.get_context("fork")  # importing everything again would take longer than an attack
    has_begun, is_over = context.Event(), context.Event()
    arguments = service.port, attack, service.keys[key], next(_turns), connections, has_begun, is_over
    attacker = context.Process(target=_send_until, args=arguments)
    attacker.start()
    has_begun.wait()
    try:
        yield
    finally:
        is_over.set()
        attacker.join(timeout=60)


def _send_until(
    port: int, attack: Attack, key: str, first: int, connections: int, has_begun: Event, is_over: Event
) -> None:
    os.nice(PRIORITY)

    async def send(number: int) -> None:
        connection = await Connection.open(port)
        while not is_over.is_set():
            for call in attack.calls(number):
                await connection.exchange(request_bytes(call, key, number))
            has_begun.set()
            number += connections
        connection.close()

    async def send_all() -> None:
        await asyncio.gather(*(send(first + number) for number in range(connections)))

    asyncio.run(send_all())


if __name__ == "__main__":
    typer.run(main)
