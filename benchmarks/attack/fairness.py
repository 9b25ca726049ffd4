"""Measure how long a plain user waits while another key sends the costliest permitted load.

A plain user asks for ten items, again and again, in an open loop: at first alone. Then connections of another key of
the same tenant, or of another tenant's key, send their costliest calls as fast as they are answered; all calls are
charged, but to rates that refuse none. A round begins when the service is idle, and consists of the seconds of an
attack and of those that follow. The laws, of the median of the rounds:

- the 99th percentile of the waiting time is at most twice the quiet one plus 20 ms, during an attack and afterwards;
- during an attack, the median of the processor time that service and store take while a request waits is at most twice
  the quiet one plus 20 ms. A busy machine makes everybody wait, but not behind more of the service's work.

Every request of the plain user is answered. Exit status 1 where a law does not hold. An attack named `nothing` takes
processor time in its own process and sends nothing: it tells how much of the waiting is the machine's.

    python -m benchmarks.attack.fairness --model models/ml-1m --items 100000 --store redis
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
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

MAX_FACTOR, MAX_MORE_MS, MAX_MORE_WORK_MS = 2.0, 20.0, 20.0
ATTACKERS = "neighbour", "stranger"
REQUESTS_PER_S = 50.0
PRIORITY = 5  # of the attackers' process: on this machine their clients would compete with the service for its cores
BEGINS_WITHIN_S = 300
TURNS = 1_001_733  # between rounds, so that no turn comes twice, nor within a few rounds an undo of the same event
OVERLOADED = 503

console = Console(width=150)
_turns = count(0, TURNS)


@dataclass(frozen=True)
class Waited:
    """Waiting times of the plain user's requests in a period.

    ms       until they were answered
    work_ms  processor time that the service and its store took meanwhile
    refused  how many were not answered with 200
    """

    ms: Sequence[float]
    work_ms: Sequence[float]
    refused: int = 0


@dataclass(frozen=True)
class Fairness:
    """Rounds of the plain user's waiting times: before, during and right after an attack."""

    quiet: Sequence[Waited]
    during: Sequence[Waited]
    after: Sequence[Waited]

    def broken(self) -> list[str]:
        """Return the violated laws."""
        quiet_ms, quiet_work_ms = p99_ms(self.quiet), work_ms(self.quiet)
        laws = {
            "waits too long": p99_ms(self.during) <= MAX_FACTOR * quiet_ms + MAX_MORE_MS,
            "waits too long afterwards": p99_ms(self.after) <= MAX_FACTOR * quiet_ms + MAX_MORE_MS,
            "waits for too much work": work_ms(self.during) <= MAX_FACTOR * quiet_work_ms + MAX_MORE_WORK_MS,
            "is refused": not any(one.refused for one in (*self.during, *self.after)),
        }
        return [name for name, holds in laws.items() if not holds]

    def __str__(self) -> str:
        """Return the medians of the rounds: quiet, during and after."""
        return (
            f"p50 {_arrows(map(p50_ms, (self.quiet, self.during, self.after)))} ms, "
            f"p99 {_arrows(map(p99_ms, (self.quiet, self.during, self.after)))} ms, "
            f"work {_arrows(map(work_ms, (self.quiet, self.during)))} ms: {', '.join(self.broken()) or 'fair'}"
        )


def p50_ms(rounds: Sequence[Waited]) -> float:
    """Return the median of the rounds' medians of the waiting time."""
    return median(float(np.median(one.ms)) for one in rounds)


def p99_ms(rounds: Sequence[Waited]) -> float:
    """Return the median of the rounds' 99th percentiles of the waiting time."""
    return median(float(np.percentile(one.ms, 99)) for one in rounds)


def work_ms(rounds: Sequence[Waited]) -> float:
    """Return the median over rounds of the median work that a request waits for."""
    return median(float(np.median(one.work_ms)) for one in rounds)


def _arrows(values: Iterable[float]) -> str:
    return " -> ".join(f"{value:.1f}" for value in values)


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory, of items with categories.")],
    items: Annotated[int, typer.Option(min=1, help="Items, the model's and copies of them.")] = 100_000,
    store: Annotated[Store, typer.Option(help="Where users are kept.")] = "sqlite",
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each attack in a round, and of those after it.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of each attack, and of quiet before them all.")] = 3,
    connections: Annotated[int, typer.Option(min=1, help="Of the attacker.")] = 32,
    only: Annotated[list[str] | None, typer.Option(help="Attack to measure; repeatable. Default: all.")] = None,
) -> None:
    """Print the plain user's waiting times: quiet, during each attack, and after it."""
    labels = model_directory.load(model).items.categories
    categories = sorted(labels.names, key=lambda name: -len(labels.items_with(name)))
    found = attacks([item_id(number) for number in range(items)], categories)
    if unknown := set(only or ()) - {attack.name for attack in found}:
        raise typer.BadParameter(f"there is no attack {', '.join(sorted(unknown))}")
    unfair = []
    with attacked_service(model, items, store) as service:
        asyncio.run(_ask(service, seconds))  # warms up
        quiet = _quiet(service, seconds, rounds)
        for attack in (attack for attack in found if not only or attack.name in only):
            for key in ATTACKERS:
                during, after = _measure(service, attack, key, seconds, rounds, connections)
                fairness = Fairness(quiet, during, after)
                console.print(f"{attack.name}, by a {key}: {fairness}")
                if fairness.broken():
                    unfair.append(f"{attack.name} by a {key}")
        console.print(f"alone: p99 {_arrows([p99_ms(quiet)])} ms, in the end", end=" ")
        console.print(f"{_arrows([p99_ms(_quiet(service, seconds, rounds))])} ms")
    console.print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    if unfair:
        console.print(f"not fair: {', '.join(unfair)}", style="red")
        raise typer.Exit(1)


def _quiet(service: AttackedService, seconds: float, rounds: int) -> list[Waited]:
    service.settle()
    return [asyncio.run(_ask(service, seconds)) for _ in range(rounds)]


def _measure(
    service: AttackedService, attack: Attack, key: str, seconds: float, rounds: int, connections: int
) -> tuple[list[Waited], list[Waited]]:
    during, after = [], []
    for _ in range(rounds):
        service.settle()
        with _attack(service, attack, key, connections):
            during.append(asyncio.run(_ask(service, seconds)))
        after.append(asyncio.run(_ask(service, seconds)))
    return during, after


async def _ask(service: AttackedService, seconds: float) -> Waited:
    """Send the plain user's requests on schedule, and measure the delay of each response from its due time."""
    request, ms, work_ms, refused = request_bytes(plain(), service.keys["plain"]), [], [], 0
    idle = [await Connection.open(service.port) for _ in range(4)]
    tasks: set[asyncio.Task[None]] = set()

    async def ask(due_s: float) -> None:
        nonlocal refused
        connection = idle.pop() if idle else await Connection.open(service.port)
        before_s = service.cpu_s()
        status, _ = await connection.exchange(request)
        ms.append((time.perf_counter() - due_s) * 1e3)
        work_ms.append((service.cpu_s() - before_s) * 1e3)
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
    return Waited(ms, work_ms, refused)


@contextmanager
def _attack(service: AttackedService, attack: Attack, key: str, connections: int) -> Iterator[None]:
    """Let another process send the attack's calls over this many connections, sequentially on each.

    raises  RuntimeError  when none of its turns succeeds, or an answer is an error other than that of overload
    """
    context = multiprocessing.get_context("fork")  # importing everything again would take longer than an attack
    has_begun, is_over, first = context.Event(), context.Event(), next(_turns)
    turns = range(first, first + connections)
    attacker = context.Process(
        target=_send_until, args=(service.port, attack, service.keys[key], turns, has_begun, is_over)
    )
    attacker.start()
    try:
        for _ in range(BEGINS_WITHIN_S):
            if has_begun.wait(timeout=1) or not attacker.is_alive():
                break
        yield
    finally:
        is_over.set()
        attacker.join()
    if attacker.exitcode != 0 or not has_begun.is_set():
        raise RuntimeError(f"the attack {attack.name} is not answered as it should be")


def _send_until(port: int, attack: Attack, key: str, turns: range, has_begun: Event, is_over: Event) -> None:
    os.nice(PRIORITY)

    async def send(number: int) -> None:
        connection = await Connection.open(port)
        while not is_over.is_set():
            calls = attack.calls(number)
            statuses = [(await connection.exchange(request_bytes(call, key, number)))[0] for call in calls]
            if any(status >= 400 and status != OVERLOADED for status in statuses):
                raise RuntimeError(f"{attack.name} was answered with {statuses}")
            if OVERLOADED not in statuses:
                has_begun.set()
            number += len(turns)
        connection.close()

    async def send_all() -> None:
        await asyncio.gather(*map(send, turns))

    asyncio.run(send_all())


if __name__ == "__main__":
    typer.run(main)
