"""Measure the latency of users with few events while clients request everything of a user with very many.

One client requests recommendations for short histories, another posts single events: alone, and next to each kind of
request on a long log. Exits with 1 if the p99 of either exceeds twice the quiet one plus 20 ms.

    python -m benchmarks.service.long_logs --model models/ml-1m --events 300000
    python -m benchmarks.service.long_logs --model models/ml-1m --store redis
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal
from urllib.parse import urlsplit

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from app.serving.served_generation import generation_of
from app.serving.store_factory import opened_store
from app.settings import StoreSettings
from benchmarks.harness.service_process import running_service
from benchmarks.harness.topology import redis_server
from model.artifact import model_directory
from storage.sqlite.database import FILE_NAME
from storage.state.event import Event

SHORT_USERS = 50
SHORT_EVENTS = 20
APPENDED_AT_ONCE = 1_000
HEAVY_CLIENTS = 2
VISITOR_EVENTS = 10_000  # of each visitor who is merged
MAX_P99_FACTOR, MAX_P99_EXTRA_MS = 2.0, 20.0
TIMEOUT_S = 120.0

console = Console(width=140)


@dataclass
class Turn:
    """The results while one kind of request on the long log is repeated; latencies in ms."""

    name: str
    plain: list[float] = field(default_factory=list)
    posts: list[float] = field(default_factory=list)
    heavy: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    wal_mb: float = 0.0


class Caller:
    """A client with one connection, which it reopens if the service closes it."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def call(self, method: str, path: str, body: object = None) -> tuple[int, float, bytes]:
        """Return the status, the milliseconds and the body of the response."""
        begin_s = time.perf_counter()
        headers = {} if body is None else {"content-type": "application/json"}
        self._connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = self._connection.getresponse()
        content = answer.read()
        return answer.status, (time.perf_counter() - begin_s) * 1e3, content


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    store: Annotated[Literal["sqlite", "redis"], typer.Option()] = "sqlite",
    events: Annotated[int, typer.Option(min=1, help="Of the long log.")] = 300_000,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each turn.")] = 10.0,
) -> None:
    """Print the latencies of short users' requests next to each kind of request on a long log."""
    turns = measure(model, store, events, seconds)
    console.print(table_of(f"{store}, {events:,} events of one user", turns))
    missed = list(misses(turns))
    for miss in missed:
        console.print(miss, style="red")
    if missed:
        raise typer.Exit(1)


def measure(model: Path, store: Literal["sqlite", "redis"], events: int, seconds: float) -> list[Turn]:
    """Serve a user with this many events, and repeat each kind of request for this long; the first turn is quiet."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory()))
        redis_url = stack.enter_context(redis_server(directory)) if store == "redis" else None
        settings = StoreSettings(data_dir=directory / "state", redis_url=redis_url)
        item_ids = asyncio.run(fill(settings, model, events))
        url = stack.enter_context(running_service(model, *_store_options(settings)))
        return [turn(url, settings, item_ids, name, ask, seconds) for name, ask in requests_on_long_log(item_ids)]


async def fill(settings: StoreSettings, model: Path, events: int) -> list[str]:
    """Log the events of the long user and of the short ones; return the model's item ids."""
    artifact = model_directory.load(model)
    item_ids = list(artifact.items.ids)
    async with opened_store(settings, generation_of(artifact), is_new=True) as store:
        now_us = time.time_ns() // 1_000
        for start in range(0, events, APPENDED_AT_ONCE):
            numbers = range(start, min(events, start + APPENDED_AT_ONCE))
            await store.append("main", [_event("long", n, item_ids, now_us) for n in numbers])
        for number in range(SHORT_USERS):
            await store.append("main", [_event(f"short-{number}", n, item_ids, now_us) for n in range(SHORT_EVENTS)])
    return item_ids


def _event(user_id: str, number: int, item_ids: list[str], now_us: int) -> Event:
    return Event(f"{user_id}-{number}", user_id, item_ids[number * 7 % len(item_ids)], "click", now_us, None)


def requests_on_long_log(item_ids: list[str]) -> Iterator[tuple[str, Callable[[Caller, int], int] | None]]:
    """Yield each kind of request: its name, and a function that sends the request with a given number."""
    batch = {"requests": [{"user_id": "long", "exclude_seen": "all"}] * 20}
    yield "nothing", None
    yield "exclude_seen=all", lambda caller, _: caller.call("GET", "/v1/users/long/recommendations?exclude_seen=all")[0]
    yield "a batch of 20 such", lambda caller, _: caller.call("POST", "/v1/recommendations", batch)[0]
    yield "the log's pages", _export
    yield "undo, then the state", _undo_and_read
    yield "merge of 10,000", _fill_and_merge(item_ids)
    yield "erasing", lambda caller, _: caller.call("DELETE", "/v1/users/long")[0]


def _export(caller: Caller, number: int) -> int:
    status, _, content = caller.call("GET", f"/v1/users/long/events?limit=1000&after={number % 200 * 1000}")
    return status if content else 0


def _undo_and_read(caller: Caller, number: int) -> int:
    caller.call("DELETE", f"/v1/users/long/events/long-{number}")
    return caller.call("GET", "/v1/users/long")[0]


def _fill_and_merge(item_ids: list[str]) -> Callable[[Caller, int], int]:
    def merge(caller: Caller, number: int) -> int:
        visitor = f"visitor-{threading.get_ident()}-{number}"
        for start in range(0, VISITOR_EVENTS, APPENDED_AT_ONCE):
            events = [
                {"user_id": visitor, "item_id": item_ids[n % len(item_ids)], "event_id": f"{visitor}-{n}"}
                for n in range(start, start + APPENDED_AT_ONCE)
            ]
            caller.call("POST", "/v1/events", events)
        return caller.call("POST", "/v1/users/merged/merge", {"from": visitor})[0]

    return merge


def turn(
    url: str,
    settings: StoreSettings,
    item_ids: list[str],
    name: str,
    ask: Callable[[Caller, int], int] | None,
    seconds: float,
) -> Turn:
    """Repeat the request for this long, and measure the short users' requests at the same time."""
    found, ends_s = Turn(name), time.monotonic() + seconds
    wal = settings.data_dir / f"{FILE_NAME}-wal"

    def repeat(ask_one: Callable[[Caller, int], int], latencies: list[float], least_s: float = 0.0) -> None:
        with closing(Caller(url)) as caller:
            for number in takewhile(lambda _: time.monotonic() < ends_s, count()):
                begin_s = time.perf_counter()
                status = ask_one(caller, number)
                latencies.append((time.perf_counter() - begin_s) * 1e3)
                found.statuses[status] = found.statuses.get(status, 0) + 1
                found.wal_mb = max(found.wal_mb, wal.stat().st_size / 1e6 if wal.exists() else 0.0)
                time.sleep(least_s)

    def plain(caller: Caller, number: int) -> int:
        return caller.call("GET", f"/v1/users/short-{number % SHORT_USERS}/recommendations")[0]

    def post(caller: Caller, number: int) -> int:
        event = {"user_id": f"short-{number % SHORT_USERS}", "item_id": item_ids[number % len(item_ids)]}
        return caller.call("POST", "/v1/events", event)[0]

    threads = [
        threading.Thread(target=repeat, args=(plain, found.plain, 0.002)),
        threading.Thread(target=repeat, args=(post, found.posts, 0.002)),
    ]
    if ask is not None:
        threads += [threading.Thread(target=repeat, args=(ask, found.heavy)) for _ in range(HEAVY_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def misses(turns: list[Turn]) -> Iterator[str]:
    """Yield the turns in which the short users waited too long."""
    quiet = turns[0]
    for one in turns[1:]:
        for kind, here, alone in (("plain", one.plain, quiet.plain), ("posts", one.posts, quiet.posts)):
            most = MAX_P99_FACTOR * _percentile(alone, 99) + MAX_P99_EXTRA_MS
            if _percentile(here, 99) > most:
                yield f"beside {one.name}, p99 of {kind} is {_percentile(here, 99):.0f} ms, more than {most:.0f} ms"


def table_of(title: str, turns: list[Turn]) -> Table:
    """Return the turns as a table."""
    columns = ("beside", "plain p50, p99, most (ms)", "posts p50, p99, most (ms)", "itself p50, most (ms)")
    table = Table(*columns, "answers", "WAL, MB", title=title)
    for one in turns:
        shown = [", ".join(f"{_percentile(times, q):.0f}" for q in (50, 99, 100)) for times in (one.plain, one.posts)]
        own = f"{_percentile(one.heavy, 50):.0f}, {_percentile(one.heavy, 100):.0f}"
        table.add_row(one.name, *shown, own, str(one.statuses), f"{one.wal_mb:.0f}")
    return table


def _percentile(times: list[float], q: float) -> float:
    return float(np.percentile(times, q)) if times else 0.0


def _store_options(settings: StoreSettings) -> list[str]:
    return ["--redis-url", settings.redis_url] if settings.redis_url else ["--data-dir", str(settings.data_dir)]


if __name__ == "__main__":
    typer.run(main)
