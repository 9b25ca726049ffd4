"""Measure the throughput of the service with synced writes, and the CPU time of a request.

A closed loop of connections on the same machine sends prepared requests as fast as they are answered. The table shows
the rate, and the CPU time of a request in each process: the service, Redis and the clients, which share the cores.

    python -m benchmarks.service.throughput --model models/ml-1m --workers 2
    python -m benchmarks.service.throughput --model models/ml-1m --store sqlite
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table
from uuid_utils import uuid7

from benchmarks.harness.service_process import running_service
from benchmarks.harness.topology import redis_server
from model.artifact import model_directory

USERS = 1_000
HISTORY = 50

console = Console()
MakeRequest = Callable[[], bytes]


class RequestMaker:
    """Creates HTTP requests for random users and items."""

    def __init__(self, item_ids: Sequence[str]) -> None:
        self._item_ids = item_ids
        self._random = random.Random(0)

    def events(self, count: int) -> bytes:
        """Return a request that posts this many events."""
        return _post("/v1/events", [self._event(f"user-{self._random.randrange(USERS)}") for _ in range(count)])

    def histories(self) -> Iterator[bytes]:
        """Yield requests that post a history for each user."""
        for user in range(0, USERS, 10):
            users = [f"user-{user + n}" for n in range(10)]
            yield _post("/v1/events", [self._event(user_id) for user_id in users for _ in range(HISTORY)])

    def recommendations(self) -> bytes:
        """Return a request for a random user's recommendations."""
        user_id = f"user-{self._random.randrange(USERS)}"
        return f"GET /v1/users/{user_id}/recommendations HTTP/1.1\r\nHost: x\r\n\r\n".encode()

    def health(self) -> bytes:
        """Return a request for the health check, whose cost is that of the framework."""
        return b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"

    def _event(self, user_id: str) -> dict[str, str]:
        return {"event_id": str(uuid7()), "user_id": user_id, "item_id": self._random.choice(self._item_ids)}


def _post(path: str, body: object) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def read_answer(reader: asyncio.StreamReader) -> None:
    """Read one response; raise RuntimeError if it is not a success."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r", 1)[0])
    body = await reader.readexactly(length)
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"{head.splitlines()[0]!r} {body[:300]!r}")


async def send_all(port: int, prepared: list[bytes], connections: int) -> list[float]:
    """Send the requests over this many connections, one at a time on each; return the latencies in ms."""
    latencies_ms: list[float] = []
    waiting = iter(prepared)

    async def connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for request in waiting:
            begin_s = time.perf_counter()
            writer.write(request)
            await read_answer(reader)
            latencies_ms.append((time.perf_counter() - begin_s) * 1e3)
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(connection() for _ in range(connections)))
    return latencies_ms


def cpu_s(parents: list[psutil.Process]) -> float:
    """Return the CPU seconds that the processes and their children have used."""
    processes = [each for process in parents for each in (process, *process.children(recursive=True))]
    return sum(sum(one.cpu_times()[:2]) for one in processes)


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    requests: Annotated[int, typer.Option(min=100, help="Of each kind.")] = 5_000,
    workers: Annotated[int, typer.Option(min=1, help="Processes, on Redis.")] = 1,
    store: Annotated[Literal["redis", "sqlite"], typer.Option()] = "redis",
) -> None:
    """Print the rate of each kind of request, and its CPU time by process."""
    if store == "sqlite" and workers > 1:
        raise typer.BadParameter("SQLite is one process's; leave out --workers")
    trained = model_directory.load(model)
    make = RequestMaker(trained.items.ids)
    kinds: dict[str, tuple[MakeRequest, int, int, int]] = {  # request, events in it, connections, requests
        "health, the framework's floor": (make.health, 0, 16, requests),
        "single events, 1 connection": (lambda: make.events(1), 1, 1, requests // 5),
        "single events, 64 connections": (lambda: make.events(1), 1, 64, requests),
        "events in batches of 100, 8 connections": (lambda: make.events(100), 100, 8, requests // 10),
        "recommendations, 1 connection": (make.recommendations, 0, 1, requests // 5),
        "recommendations, 16 connections": (make.recommendations, 0, 16, requests),
    }
    columns = "requests/s", "events/s", "p50 ms", "p99 ms", "service µs", "Redis µs", "clients µs"
    table = Table(f"{workers} processes on {store}, CPU time per request", *columns)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory()))
        options = ["--workers", str(workers)]
        if store == "redis":
            options += ["--redis-url", stack.enter_context(redis_server(directory))]
        url = stack.enter_context(running_service(model, *options))
        port = int(url.rpartition(":")[2])
        own = psutil.Process()
        commands = {child: child.cmdline() for child in own.children()}
        servers = [child for child, command in commands.items() if "redis" in command[0].split()[0]]
        services = [child for child, command in commands.items() if "serve" in command]
        asyncio.run(send_all(port, list(make.histories()), 8))
        for name, (request, events, connections, count) in kinds.items():
            prepared = [request() for _ in itertools.repeat(None, count)]
            before = [cpu_s(services), cpu_s(servers), sum(own.cpu_times()[:2])]
            begin_s = time.perf_counter()
            latencies_ms = asyncio.run(send_all(port, prepared, connections))
            elapsed_s = time.perf_counter() - begin_s
            after = [cpu_s(services), cpu_s(servers), sum(own.cpu_times()[:2])]
            rate = count / elapsed_s
            cost_us = [(late - early) / count * 1e6 for early, late in zip(before, after, strict=True)]
            p50, p99 = np.percentile(latencies_ms, [50, 99])
            shown = f"{rate:,.0f}", f"{rate * events:,.0f}" if events else "", f"{p50:.1f}", f"{p99:.1f}"
            table.add_row(name, *shown, *(f"{cost:.0f}" for cost in cost_us))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
