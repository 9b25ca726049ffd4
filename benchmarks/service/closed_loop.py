"""Measure closed loops of plain requests: rate, latency, and CPU time a request; or compare two versions of the code.

Each version serves the same model directory, enlarged to `--items`, on a store of its own with a history of each user.
With `--items 0` it serves a directory that was enlarged before. wrk sends the loads one after another, each over a
number of connections that send the next request after the response. Both versions serve at once, and take turns.

    python -m benchmarks.service.closed_loop --model models/ml-1m --redis 2
    python -m benchmarks.service.closed_loop --model models/ml-1m --redis 2 --load recommendation:1 --load event:1
    git worktree add ../before 07fa73e7^
    python -m benchmarks.service.closed_loop --model models/of-before --items 0 --redis 2 --other ../before
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, get_args

import polars as pl
import psutil
import typer
from rich.console import Console
from rich.table import Table

from app.jobs.loadtest.synthetic_catalogue import write_enlarged
from benchmarks.harness.compose import ROOT
from benchmarks.harness.service_process import free_port, inherited_environment, running_process
from benchmarks.harness.topology import redis_server
from benchmarks.machine import cpu
from benchmarks.service.comparison.histories import USERS, post_histories
from benchmarks.service.comparison.wrk import Answered, cpu_s, require_wrk, send
from model.artifact.model_directory import ITEMS

WARM_UP_S = 2
PAUSES = "with pauses, at half of its rate"
PACED_CONNECTIONS = 64
Kind = Literal["health", "recommendation", "event", "hundred", "mixed"]
SCRIPTS: Mapping[Kind, str] = {
    "health": 'request = function() return wrk.format("GET", "/healthz") end',
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
    "hundred": """
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

DEFAULT_LOADS = ("health:1", "recommendation:1", "recommendation:16", "event:1", "event:16", "hundred:8", "mixed:16")

console = Console(width=140)


@dataclass(frozen=True)
class Load:
    """Requests of one kind over a number of connections; a `mixed` one is repeated with pauses, at half of its rate."""

    kind: Kind
    connections: int

    @classmethod
    def of(cls, text: str) -> Load:
        """Parse `kind:connections`; raise typer.BadParameter if it is neither."""
        kind, _, connections = text.partition(":")
        if kind not in get_args(Kind) or not connections.isdecimal() or connections.startswith("0"):
            raise typer.BadParameter(
                f"'{text}' is not one of {', '.join(get_args(Kind))} with a number, as in 'event:16'"
            )
        return cls(kind, int(connections))  # type: ignore[arg-type]  # one of the kinds

    def __str__(self) -> str:
        return f"{self.kind}:{self.connections}"


@dataclass(frozen=True)
class Measured:
    """The result of one load in one turn; the CPU times are those of a request, in the service and in Redis."""

    rate: float
    p50_us: float
    p90_us: float
    p99_us: float
    service_us: float
    redis_us: float


@dataclass(frozen=True)
class Version:
    """A version of the code that serves, and the processes whose CPU time counts."""

    name: str
    url: str
    service: psutil.Process
    redis: psutil.Process | None


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory.")],
    other: Annotated[Path | None, typer.Option(help="Checkout of another version to compare with.")] = None,
    items: Annotated[int, typer.Option(min=0, help="0 serves the model as it is.")] = 100_000,
    redis: Annotated[int, typer.Option(min=0, help="Processes on Redis; 0 is one process on SQLite.")] = 0,
    load: Annotated[list[str], typer.Option(help="Kind of request and number of connections.")] = list(DEFAULT_LOADS),  # noqa: B006, typer copies it
    turns: Annotated[int, typer.Option(min=1, help="Of each load and version.")] = 5,
    seconds: Annotated[int, typer.Option(min=1, help="Of each load in each turn.")] = 4,
) -> None:
    """Print the medians of the turns for each load and version, and the ratios of the versions."""
    require_wrk()
    loads = [Load.of(one) for one in load]
    with ExitStack() as stack:
        served = model.resolve()
        if items:
            served = Path(stack.enter_context(TemporaryDirectory())) / "model"
            write_enlarged(served, model, items, "trained")
        count = pl.read_parquet(served / ITEMS).height
        checkouts = {"this": ROOT} | ({"other": other.resolve()} if other else {})
        options = ["--model", str(served), "--workers", str(max(redis, 1))]
        versions = [
            stack.enter_context(_serving(name, checkouts[name], options, on_redis=redis > 0)) for name in checkouts
        ]
        for version in versions:
            post_histories(version.url, count)
        measured = _take_turns(versions, loads, count, turns, seconds)
    where = f"{redis} processes on Redis" if redis else "one process on SQLite"
    _print(f"{count:,} items, {where}, {cpu()}; medians of {turns} turns", measured)
    if other:
        _print_ratios(measured)


def _take_turns(
    versions: Sequence[Version], loads: Sequence[Load], items: int, turns: int, seconds: int
) -> Mapping[str, Mapping[str, list[Measured]]]:
    """Send every load to every version in each turn; return what was measured, by load and version."""
    numbers = f"USERS, ITEMS = {USERS}, {items}\n"
    measured: defaultdict[str, defaultdict[str, list[Measured]]] = defaultdict(lambda: defaultdict(list))

    def send_load(name: str, version: Version, script: str, connections: int) -> Measured:
        found = _measure(version, numbers + script, connections, seconds)
        measured[name][version.name].append(found)
        console.print(f"{name}, {version.name}: {found.rate:,.0f}/s, p50 {found.p50_us:,.0f} µs")
        return found

    for version in versions:
        for one in loads:
            send(version.url, numbers + SCRIPTS[one.kind], one.connections, WARM_UP_S)
    for turn in range(turns):
        for one in loads:
            for version in versions[:: 1 if turn % 2 else -1]:
                script = SCRIPTS[one.kind]
                found = send_load(str(one), version, script, one.connections)
                if one.kind == "mixed":
                    pauses_ms = round(2 * 1_000 * PACED_CONNECTIONS / (found.rate / 2))  # half of it on average
                    paced = f"{script}\nfunction delay() return math.random(0, {pauses_ms}) end\n"
                    send_load(f"{one} {PAUSES}", version, paced, PACED_CONNECTIONS)
    return measured


def _measure(version: Version, script: str, connections: int, seconds: int) -> Measured:
    before_s = _cpu_s(version)
    answered: Answered = send(version.url, script, connections, seconds)
    service_us, redis_us = (
        (after - before) / answered.requests * 1e6 for before, after in zip(before_s, _cpu_s(version), strict=True)
    )
    rate = answered.requests / seconds
    return Measured(rate, answered.p50_us, answered.p90_us, answered.p99_us, service_us, redis_us)


def _cpu_s(version: Version) -> tuple[float, float]:
    return cpu_s(version.service), cpu_s(version.redis) if version.redis else 0.0


@contextmanager
def _serving(name: str, code: Path, options: Sequence[str], *, on_redis: bool) -> Iterator[Version]:
    """Serve from this checkout, on a new store."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "app", "serve", "--port", str(port), *options]
    with ExitStack() as stack:
        directory, redis = stack.enter_context(TemporaryDirectory()), None
        if on_redis:
            before = set(psutil.Process().children())
            command += ["--redis-url", stack.enter_context(redis_server(Path(directory)))]
            (redis,) = set(psutil.Process().children()) - before
        else:
            command += ["--data-dir", directory]
        environment = inherited_environment() | {"PYTHONPATH": str(code)}
        with running_process(command, url, cwd=code, env=environment, stderr=subprocess.DEVNULL) as service:
            yield Version(name, url, psutil.Process(service.pid), redis)


def _print(title: str, measured: Mapping[str, Mapping[str, list[Measured]]]) -> None:
    columns = "load", "version", "requests/s", "p50, µs", "p90, µs", "p99, µs", "service, µs of CPU", "Redis, µs of CPU"
    table = Table(*columns, title=title)
    for load, of_load in measured.items():
        for version, turns in of_load.items():
            values = ("rate", "p50_us", "p90_us", "p99_us", "service_us", "redis_us")
            table.add_row(
                load, version, *(f"{statistics.median(getattr(one, at) for one in turns):,.0f}" for at in values)
            )
    console.print(table)


def _print_ratios(measured: Mapping[str, Mapping[str, list[Measured]]]) -> None:
    table = Table(
        "load", "requests/s", "p50", "CPU of the service", title="this / other: median of the turns, least, most"
    )
    for load, of_load in measured.items():
        cells = []
        for at in ("rate", "p50_us", "service_us"):
            pairs = zip(of_load["this"], of_load["other"], strict=True)
            ratios = [getattr(this, at) / getattr(other, at) for this, other in pairs]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})")
        table.add_row(load, *cells)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
