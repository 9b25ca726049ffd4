"""Measure the processor time of each endpoint's costliest calls, relative to a plain request for recommendations.

Costs are processor seconds of the service's process and of Redis. A call is charged to its key's rate in plain
requests, so the law is about the cost of one unit of its charge: at most its bound. A single call is bounded by
LISAREC_MAX_COST, or by the limits of events and items. Logs are as long as any is read, bodies nearly as large as they
may be. On Redis a log in several files of the archive is read, too. Exit status 1 where a call costs more, and where
an endpoint of /openapi.json has no call here.

    python -m benchmarks.attack.amplification --model models/ml-1m --items 100000
    python -m benchmarks.attack.amplification --model models/ml-1m --items 100000 --store redis
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from app.jobs.loadtest.synthetic_catalogue import item_id
from benchmarks.attack.attacked_service import AttackedService, Connection, Store, attacked_service, request_bytes
from benchmarks.attack.costly_calls import (
    ARCHIVED_USER,
    LONG_LOG,
    UNDONE_USER,
    Call,
    Log,
    archived_reads,
    corrections,
    endpoint_of,
    operations,
    other_reads,
    plain,
    portable,
    recommendations,
    scenario_calls,
    unmeasured,
    writes,
)
from model.artifact import model_directory

WARM_UP = 2
MAX_CALLS = 400  # of one kind
POLLING_PERIODS, POLLING_PERIOD_S = 3, 0.5
AGAIN = 3  # times that a call which cost too much is measured once more

console = Console(width=140)


@dataclass(frozen=True)
class Measured:
    """Measurements of a call: bytes in and out, processor seconds, and those of a plain request."""

    call: Call
    bytes_in: int
    bytes_out: int
    cpu_s: float
    plain_s: float

    @property
    def plain_requests(self) -> float:
        """Return the processor time in plain requests."""
        return self.cpu_s / self.plain_s

    @property
    def of_its_charge(self) -> float:
        """Return the plain requests that one unit of the charge took."""
        return self.plain_requests / self.call.charge


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory, of items with categories.")],
    items: Annotated[int, typer.Option(min=1, help="Items, the model's and copies of them.")] = 100_000,
    cpu_s: Annotated[float, typer.Option(min=0.05, help="Processor seconds to spend on each call.")] = 1.0,
    store: Annotated[Store, typer.Option(help="Where users are kept.")] = "sqlite",
    corrected: Annotated[int, typer.Option(min=1, help="Entries of logs that are corrected.")] = LONG_LOG,
) -> None:
    """Print the cost of every call in plain requests and for each unit of its charge, and the most of each endpoint."""
    labels = model_directory.load(model).items.categories
    categories = sorted(labels.names, key=lambda name: -len(labels.items_with(name)))
    item_ids = [item_id(number) for number in range(items)]
    # the writes first: all that read meet items with as many categories and properties as they have afterwards
    calls = [*writes(item_ids), *recommendations(item_ids, categories), *other_reads(item_ids, categories)]
    calls += [*corrections(corrected), *operations()]
    with attacked_service(model, items, store) as service:
        paths = httpx.get(f"{service.url}/openapi.json", timeout=60).json()["paths"]
        service.fill_log(UNDONE_USER, corrected, items)
        calls += portable(service.sealed_state(items), item_ids)
        meter = Meter(service, items, cpu_s)
        measured = _measure(meter, calls)
        if store == "redis":  # SQLite keeps what is archived
            measured += _measure(meter, archived_reads(service.archive_log(ARCHIVED_USER, LONG_LOG, items)))
    console.print(_table(measured, items))
    console.print(_by_endpoint(measured, paths))
    console.print(
        f"a plain request takes {measured[0].plain_s * 1e3:.2f} ms of processor time, {items:,} items, {store}"
    )
    unknown = unmeasured(paths, calls)
    for name in unknown:
        console.print(f"no call measures {name}", style="red")
    costly = _costly(measured)
    if costly:
        names = ", ".join(call.name for call in costly)
        console.print(f"a unit takes more plain requests than it may: {names}", style="red")
    if costly or unknown:
        raise typer.Exit(1)


def _measure(meter: Meter, calls: Sequence[Call]) -> list[Measured]:
    """Measure the calls, and repeat those that looked costly because the machine was busy."""
    measured = {one.call.name: one for one in asyncio.run(meter.measure(calls))}
    for _ in range(AGAIN):
        if costly := {call.name for call in _costly(measured.values())}:
            of_scenario = {call.name for call in scenario_calls()}
            costly |= of_scenario if costly & of_scenario else set()
            again = [call for call in calls if call.name in costly]
            measured |= {one.call.name: one for one in asyncio.run(meter.measure(again))}
    return list(measured.values())


def _costly(measured: Iterable[Measured]) -> list[Call]:
    """Return the calls whose cost per unit exceeds their bound."""
    return [one.call for one in measured if one.of_its_charge > one.call.bound]


class Meter:
    """Measures the cost of calls to a service. No number of a call is used twice."""

    def __init__(self, service: AttackedService, items: int, cpu_s: float) -> None:
        self._service = service
        self._items = items
        self._cpu_s = cpu_s
        self._sent = Counter[str]()
        self._connection: Connection
        self._filling_s = 0.0
        self._polling = 0.0  # processor seconds that the service takes each second while nothing is sent

    async def measure(self, calls: Sequence[Call]) -> list[Measured]:
        """Return the cost of each call.

        A plain request is measured twice before and once afterwards, and the least counts: the service may be cold at
        first, and has something to do behind some calls.
        """
        self._polling = await self._least_polling()
        plains = [(await self._take(plain(), inf))[-1] for _ in range(2)]
        taken = [await self._take(call, self._cpu_s) for call in calls]
        plains.append((await self._take(plain(), inf))[-1])
        return [Measured(call, *took, min(plains)) for call, took in zip(calls, taken, strict=True)]

    async def _take(self, call: Call, cpu_s: float) -> tuple[int, int, float]:
        """Repeat the call until the service has spent enough processor time, at most MAX_CALLS times.

        Return its bytes in and out, and its processor seconds.
        """
        self._connection, self._filling_s = await Connection.open(self._service.port), 0.0
        try:
            for _ in range(1 if call.log or call.settled else WARM_UP):
                await self._send(call)
            begin_s, sent, spent_s = self._spent_s(), 0, 0.0
            while not sent or (spent_s < cpu_s and sent < MAX_CALLS):
                bytes_in, bytes_out = await self._send(call)
                spent_s, sent = self._spent_s() - begin_s, sent + 1
        finally:
            self._connection.close()
        return bytes_in, bytes_out, spent_s / sent

    async def _least_polling(self) -> float:
        """Return the idle processor seconds a second of the service: the minimum of some periods."""
        await asyncio.to_thread(self._service.settle)
        taken = []
        for _ in range(POLLING_PERIODS):
            begin_s, cpu_s = time.monotonic(), self._service.cpu_s()
            await asyncio.sleep(POLLING_PERIOD_S)
            taken.append((self._service.cpu_s() - cpu_s) / (time.monotonic() - begin_s))
        return min(taken)

    def _spent_s(self) -> float:
        """Return the processor time since some moment, except for polling and filling logs."""
        return self._service.cpu_s() - self._polling * time.monotonic() - self._filling_s

    async def _send(self, call: Call) -> tuple[int, int]:
        """Send the call and wait for its background work; return the bytes in and out."""
        service, number = self._service, self._sent[call.name]
        self._sent[call.name] += 1
        if call.log is not None:
            await self._fill(call.log, number)
        request = request_bytes(call, service.keys["plain"], number)
        status, bytes_out = await self._connection.exchange(request)
        if status >= 400:
            raise RuntimeError(f"{call.name} was answered with {status}")
        if call.settled:
            state = request_bytes(Call("", "GET", f"/v1/users/{call.settled}"), service.keys["plain"], number)
            while (await self._connection.exchange(state))[0] == httpx.codes.SERVICE_UNAVAILABLE:
                pass  # it has waited for a second before it says so
        return len(request), bytes_out

    async def _fill(self, log: Log, number: int) -> None:
        """Create the log that the call needs, outside of its measured cost."""
        service = self._service
        self._connection.close()  # the service may close it meanwhile
        begin_s = self._spent_s()
        service.fill_log(log.user_id.replace("{number}", str(number)), log.events, self._items)
        self._filling_s += self._spent_s() - begin_s
        self._connection = await Connection.open(service.port)


def _table(measured: Sequence[Measured], items: int) -> Table:
    table = Table("call", "bytes in", "bytes out", "ms of CPU", "plain", "charge", "each", title=f"{items:,} items")
    for one in sorted(measured, key=lambda one: -one.cpu_s):
        table.add_row(
            one.call.name,
            f"{one.bytes_in:,}",
            f"{one.bytes_out:,}",
            f"{one.cpu_s * 1e3:.2f}",
            f"{one.plain_requests:.1f}",
            f"{one.call.charge:,}",
            f"{one.of_its_charge:.2f}",
        )
    return table


def _by_endpoint(measured: Sequence[Measured], paths: Iterable[str]) -> Table:
    """Return the costliest call of each endpoint as a Markdown table."""
    by_endpoint: dict[str, list[Measured]] = {}
    for one in measured:
        by_endpoint.setdefault(endpoint_of(one.call, paths), []).append(one)
    table = Table("Endpoint", "Costliest call", "Plain requests", "Charge", "Most of a charge", box=box.MARKDOWN)
    for endpoint, found in sorted(by_endpoint.items()):
        most = max(found, key=lambda one: one.cpu_s)
        of_a_charge = max(one.of_its_charge for one in found)
        cells = f"`{endpoint}`", most.call.name, f"{most.plain_requests:.1f}", f"{most.call.charge:,}"
        table.add_row(*cells, f"{of_a_charge:.1f}")
    return table


if __name__ == "__main__":
    typer.run(main)
