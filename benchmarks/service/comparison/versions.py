"""Compare plain requests of two versions of the code, in turns: rate, median time, CPU time a request, and ratios.

Each turn starts `lisarec serve` from one version on an empty store, and posts a history for each user. It then sends
`GET /v1/users/{id}/recommendations`, one event a request, a hundred, or one event for two recommendations, in closed
loops of wrk over several connections; and the last of these at half of the rate that it reached, over 64 connections
with random pauses. Every turn serves the same model directory, enlarged to `--items`, or as it is.

    git worktree add ../before a505549
    python -m benchmarks.service.comparison.versions --model models/ml-1m --other ../before --items 100000
    python -m benchmarks.service.comparison.versions --model models/ml-1m --other ../before --store redis
    python -m benchmarks.service.comparison.versions --model models/of-before --other ../before --store redis --items 0
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import polars as pl
import psutil
import typer
from rich.console import Console
from rich.table import Table

from app.jobs.loadtest.synthetic_catalogue import write_enlarged
from benchmarks.harness.service_process import free_port, wait_until_ready
from benchmarks.harness.topology import redis_server
from benchmarks.service.comparison.histories import USERS, post_histories
from benchmarks.service.comparison.wrk import cpu_s, require_wrk, send
from model.artifact.model_directory import ITEMS

ROOT = Path(__file__).parents[3]
WARM_UP_S = 3
PACED_CONNECTIONS = 64
Kind = Literal["recommendation", "event", "hundred events", "mixed", "mixed at half of that rate"]
Store = Literal["sqlite", "redis"]
SCRIPTS: Mapping[Kind, str] = {
    "recommendation": """
request = function()
  return wrk.format("GET", "/v1/users/user-" .. math.random(0, USERS - 1) .. "/recommendations")
end
""",
    "event": """
wrk.headers["Content-Type"] = "application/json"
request = function()
  local user, item = math.random(0, USERS - 1), math.random(0, ITEMS - 1)
  return wrk.format("POST", "/v1/events", nil, '{"user_id":"user-' .. user .. '","item_id":"item-' .. item .. '"}')
end
""",
    "hundred events": """
wrk.headers["Content-Type"] = "application/json"
request = function()
  local events = {}
  for number = 1, 100 do
    local user, item, rest = math.random(0, USERS - 1), math.random(0, ITEMS - 1), math.random(0, 2 ^ 31)
    local head = string.format("%012x", os.time() * 1000)
    local id = head:sub(1, 8) .. "-" .. head:sub(9) .. string.format("-7%03x-8%03x-%012x", number, USERS, rest)
    events[number] = '{"event_id":"' .. id .. '","user_id":"user-' .. user .. '","item_id":"item-' .. item .. '"}'
  end
  return wrk.format("POST", "/v1/events", nil, "[" .. table.concat(events, ",") .. "]")
end
""",
    "mixed": """
wrk.headers["Content-Type"] = "application/json"
local number = 0
request = function()
  number = number + 1
  local user, item = math.random(0, USERS - 1), math.random(0, ITEMS - 1)
  if number % 3 > 0 then
    return wrk.format("GET", "/v1/users/user-" .. user .. "/recommendations")
  end
  return wrk.format("POST", "/v1/events", nil, '{"user_id":"user-' .. user .. '","item_id":"item-' .. item .. '"}')
end
""",
}

console = Console(width=140)


@dataclass(frozen=True)
class Load:
    """Requests of one kind over a number of connections."""

    kind: Kind
    connections: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.connections} connection{'s' * (self.connections > 1)}"


@dataclass(frozen=True)
class Measured:
    """The result of one load in one turn: requests per second, percentiles, and the service's CPU time a request."""

    rate: float
    p50_us: float
    p99_us: float
    cpu_us: float


@dataclass(frozen=True)
class Setup:
    """What every turn serves: an enlarged model on a new store."""

    model: Path
    items: int
    store: Store

    @property
    def workers(self) -> int:
        """The number of processes."""
        return 2 if self.store == "redis" else 1


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory.")],
    other: Annotated[Path, typer.Option(help="Checkout of the other version.")],
    items: Annotated[int, typer.Option(min=0, help="0 serves the model as it is.")] = 100_000,
    turns: Annotated[int, typer.Option(min=1, help="Of each version.")] = 5,
    seconds: Annotated[int, typer.Option(min=1, help="Of each load in each turn.")] = 10,
    connections: Annotated[list[int], typer.Option(min=1)] = [1, 16],  # noqa: B006, typer copies it
    store: Annotated[Store, typer.Option(help="With Redis there are two processes.")] = "sqlite",
) -> None:
    """Print the results of each version, turn by turn, and the ratios of consecutive turns."""
    require_wrk()
    loads = [Load(kind, count) for kind in SCRIPTS for count in connections]
    with TemporaryDirectory() as directory:
        if items:
            setup = Setup(Path(directory) / "model", items, store)
            write_enlarged(setup.model, model, items, "trained")
        else:
            setup = Setup(model.resolve(), pl.read_parquet(model / ITEMS).height, store)
        measured: list[tuple[Mapping[Load, Measured], Mapping[Load, Measured]]] = []
        for number in range(turns):
            before, now = (_measure(code, setup, loads, seconds) for code in (other.resolve(), ROOT))
            measured.append((before, now))
            for load in now:
                console.print(
                    f"turn {number + 1}, {load}: {before[load].rate:,.0f} and {now[load].rate:,.0f} requests/s, "
                    f"p50 {before[load].p50_us:,.0f} and {now[load].p50_us:,.0f} µs, "
                    f"p99 {before[load].p99_us:,.0f} and {now[load].p99_us:,.0f} µs, "
                    f"{before[load].cpu_us:,.0f} and {now[load].cpu_us:,.0f} µs of CPU each"
                )
    for load in measured[0][0]:
        _print_table(load, setup, [(before[load], now[load]) for before, now in measured])


def _measure(code: Path, setup: Setup, loads: Sequence[Load], seconds: int) -> dict[Load, Measured]:
    with _service(code, setup) as (url, process):
        post_histories(url, setup.items)
        numbers = f"USERS, ITEMS = {USERS}, {setup.items}\n"
        measured: dict[Load, Measured] = {}
        for load in loads:
            measured[load] = _of_load(url, process, numbers + SCRIPTS[load.kind], load.connections, seconds)
        fastest = max(found.rate for load, found in measured.items() if load.kind == "mixed")
        pauses_ms = round(2 * 1_000 * PACED_CONNECTIONS / (fastest / 2))  # half of it on average
        paced = f"{numbers}{SCRIPTS['mixed']}\nfunction delay() return math.random(0, {pauses_ms}) end\n"
        half = Load("mixed at half of that rate", PACED_CONNECTIONS)
        measured[half] = _of_load(url, process, paced, PACED_CONNECTIONS, seconds)
        return measured


def _of_load(url: str, process: psutil.Process, script: str, connections: int, seconds: int) -> Measured:
    send(url, script, connections, WARM_UP_S)
    begin_s = cpu_s(process)
    answered = send(url, script, connections, seconds)
    cpu_us = (cpu_s(process) - begin_s) / answered.requests * 1e6
    return Measured(answered.requests / seconds, answered.p50_us, answered.p99_us, cpu_us)


@contextmanager
def _service(code: Path, setup: Setup) -> Iterator[tuple[str, psutil.Process]]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    with ExitStack() as stack:
        store = stack.enter_context(TemporaryDirectory())
        command = [sys.executable, "-P", "-m", "app", "serve", "--model", str(setup.model), "--port", str(port)]
        command += ["--workers", str(setup.workers)]
        if setup.store == "redis":
            command += ["--redis-url", stack.enter_context(redis_server(Path(store)))]
        else:
            command += ["--data-dir", store]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LISAREC_")}
        service = subprocess.Popen(
            command,
            cwd=code,
            env={**environment, "PYTHONPATH": str(code)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until_ready(url, service)
            yield url, psutil.Process(service.pid)
        finally:
            service.terminate()
            service.wait(timeout=60)


def _print_table(load: Load, setup: Setup, measured: Sequence[tuple[Measured, Measured]]) -> None:
    where = f"{setup.items:,} items, {setup.store}, {setup.workers} process{'es' * (setup.workers > 1)}"
    table = Table(title=f"{load}; {where}; medians of {len(measured)} turns")
    for column in ("", "other", "this", "this / other (median of the turns' ratios, least, most)"):
        table.add_column(column)
    rows = (
        ("requests/s", [(before.rate, now.rate) for before, now in measured]),
        ("p50, µs", [(before.p50_us, now.p50_us) for before, now in measured]),
        ("p99, µs", [(before.p99_us, now.p99_us) for before, now in measured]),
        ("CPU of the service, µs a request", [(before.cpu_us, now.cpu_us) for before, now in measured]),
    )
    for name, pairs in rows:
        ratios = [now / before for before, now in pairs]
        table.add_row(
            name,
            f"{statistics.median(before for before, _ in pairs):,.0f}",
            f"{statistics.median(now for _, now in pairs):,.0f}",
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f})",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
