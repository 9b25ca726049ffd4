"""Measure what each endpoint's costliest calls cost beside a plain request for recommendations.

Costs are processor seconds of the service's process. A call is charged to its key's rate in plain requests, so the law
is about the cost of one unit of its charge: at most its bound. A single call is bounded by
LISAREC_MAX_COST, or by the limits of events and items. Exit status 1 where one costs more.

    python -m benchmarks.attack.amplification --model models/ml-1m --items 100000
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from app.jobs.loadtest.synthetic_catalogue import item_id
from benchmarks.attack.attacked_service import AttackedService, Connection, attacked_service, request_bytes
from benchmarks.attack.costly_calls import Call, other_reads, plain, recommendations, writes
from model.artifact import model_directory

WARM_UP = 2
MAX_CALLS = 400  # of one kind
AGAIN = 3  # times that a call which cost too much is measured once more

console = Console(width=120)


@dataclass(frozen=True)
class Measured:
    """What a call took: bytes in and out, and processor seconds."""

    call: Call
    bytes_in: int
    bytes_out: int
    cpu_s: float


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory, of items with categories.")],
    items: Annotated[int, typer.Option(min=1, help="Items, the model's and copies of them.")] = 100_000,
    cpu_s: Annotated[float, typer.Option(min=0.05, help="Processor seconds to spend on each call.")] = 1.0,
) -> None:
    """Print the cost of every call in plain requests, and for each unit of its charge."""
    labels = model_directory.load(model).items.categories
    categories = sorted(labels.names, key=lambda name: -len(labels.items_with(name)))
    item_ids = [item_id(number) for number in range(items)]
    calls = recommendations(item_ids, categories) + other_reads(item_ids, categories) + writes(item_ids)
    with attacked_service(model, items) as service:
        plain_s, measured = asyncio.run(_measure(service, calls, cpu_s))
        console.print(f"a plain request: {plain_s * 1e3:.2f} ms of processor time")
        console.print(_table(measured, plain_s, items))
        costly = _costly(plain_s, measured)
        for _ in range(AGAIN):  # what looked costly because the machine was busy
            if costly:
                costly = _costly(*asyncio.run(_measure(service, costly, cpu_s)))
    if costly:
        names = ", ".join(call.name for call in costly)
        console.print(f"a unit takes more plain requests than it may: {names}", style="red")
        raise typer.Exit(1)


def _costly(plain_s: float, measured: Sequence[Measured]) -> list[Call]:
    """Return the calls of which a unit took more than its bound."""
    return [one.call for one in measured if one.cpu_s / one.call.charge > one.call.bound * plain_s]


async def _measure(service: AttackedService, calls: Sequence[Call], cpu_s: float) -> tuple[float, list[Measured]]:
    """Return the processor seconds of a plain request, the mean of before and after, and what each call took."""
    plains = [(await _take(service, plain(), cpu_s)).cpu_s]
    measured = [await _take(service, call, cpu_s) for call in calls]
    plains.append((await _take(service, plain(), cpu_s)).cpu_s)
    return sum(plains) / len(plains), measured


async def _take(service: AttackedService, call: Call, cpu_s: float) -> Measured:
    """Send the call again and again, until the service has spent the processor time."""
    connection, key = await Connection.open(service.port), service.keys["plain"]
    bytes_in = bytes_out = 0

    async def send(number: int) -> None:
        nonlocal bytes_in, bytes_out
        request = request_bytes(call, key, number)
        status, bytes_out = await connection.exchange(request)
        if status >= 400:
            raise RuntimeError(f"{call.name} was answered with {status}")
        bytes_in = len(request)

    for number in range(WARM_UP):
        await send(number)
    begin_s, sent = service.cpu_s(), 0
    while not sent or (service.cpu_s() - begin_s < cpu_s and sent < MAX_CALLS):
        await send(WARM_UP + sent)
        sent += 1
    connection.close()
    return Measured(call, bytes_in, bytes_out, (service.cpu_s() - begin_s) / sent)


def _table(measured: Sequence[Measured], plain_s: float, items: int) -> Table:
    table = Table("call", "bytes in", "bytes out", "ms of CPU", "plain", "charge", "each", title=f"{items:,} items")
    for one in sorted(measured, key=lambda one: -one.cpu_s):
        ratio = one.cpu_s / plain_s
        table.add_row(
            one.call.name,
            f"{one.bytes_in:,}",
            f"{one.bytes_out:,}",
            f"{one.cpu_s * 1e3:.2f}",
            f"{ratio:.1f}",
            f"{one.call.charge:,}",
            f"{ratio / one.call.charge:.2f}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
