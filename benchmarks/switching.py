"""Whether clients notice that another model goes live: requests that fail while a generation is rebuilt and switched.

Events and requests for recommendations arrive at fixed rates at every replica itself, so that no load balancer hides a
failure. Meanwhile the other model is rebuilt, with one kill -9 in between, activated, taken back and activated again,
by the command line. No request may fail, every replica must follow, and in the end the states of every user, of both
generations, must be the fold of the log: exit status 1 where that is not so.

    python -m benchmarks.switching --model models/may --other models/june              # two replicas on Redis
    python -m benchmarks.switching --model models/may --other models/june --no-redis   # one process on SQLite
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from rich.console import Console

from app.service import open_store
from app.serving import generation_of
from app.settings import StoreSettings
from app.uuid7 import uuid7
from benchmarks.ledger import is_fold
from benchmarks.topology import ROOT, Topology, topology
from model import artifact

USERS = 500
BATCH = 10
MAX_UNDER_WAY = 64  # what arrives beyond that is turned away at the gate, so that a slow machine is not drowned
REQUEST_TIMEOUT_S = 60.0
GIVE_UP_S = 60.0
SHOWN_FAILURES = 10

console = Console()


@dataclass
class Tally:
    """What became of the requests."""

    latencies_ms: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)  # of recommendations: model and source
    accepted: int = 0
    elapsed_s: float = 0.0
    followed_s: list[float] = field(default_factory=list)


@dataclass
class Rates:
    """Of arrivals in a second, while few enough are under way."""

    events: int
    recommendations: int


class Load:
    """Requests to every replica in turn, as they arrive."""

    def __init__(self, urls: list[str], item_ids: list[str], client: httpx.AsyncClient) -> None:
        self.tally = Tally()
        self._urls = urls
        self._item_ids = item_ids
        self._client = client
        self._random = random.Random(0)
        self._sent: set[asyncio.Task[None]] = set()

    async def run(self, rates: Rates, until: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as arrivals:
            arrivals.create_task(self._arrive(self._post_events, rates.events / BATCH, until))
            arrivals.create_task(self._arrive(self._recommend, rates.recommendations, until))
        if self._sent:
            await asyncio.wait(self._sent)

    async def _arrive(
        self, send: Callable[[str], Coroutine[Any, Any, None]], per_s: float, until: asyncio.Event
    ) -> None:
        begin_s = time.perf_counter()
        number = 0
        while not until.is_set():
            while number <= (time.perf_counter() - begin_s) * per_s:
                number += 1
                if len(self._sent) < MAX_UNDER_WAY:
                    task = asyncio.create_task(send(self._urls[number % len(self._urls)]))
                    self._sent.add(task)
                    task.add_done_callback(self._sent.discard)
            await asyncio.sleep(0.5 / per_s)

    async def _post_events(self, url: str) -> None:
        events = [
            {"event_id": uuid7(), "user_id": self._user_id(), "item_id": self._random.choice(self._item_ids)}
            for _ in range(BATCH)
        ]
        answer = await self._send("POST", f"{url}/v1/events", json=events)
        if answer is not None:
            self.tally.accepted += answer.json()["accepted"]

    async def _recommend(self, url: str) -> None:
        answer = await self._send("GET", f"{url}/v1/users/{self._user_id()}/recommendations")
        if answer is not None:
            self.tally.sources[f"{answer.json()['generation']}, {answer.json()['source']}"] += 1

    def _user_id(self) -> str:
        """Half of all of ten hot users."""
        return f"user-{self._random.randrange(10 if self._random.random() < 0.5 else USERS)}"

    async def _send(self, method: str, url: str, json: object = None) -> httpx.Response | None:
        begin_s = time.perf_counter()
        try:
            answer = await self._client.request(method, url, json=json)
            failure = None if answer.is_success else f"{method}: {answer.status_code} {answer.text}"
        except httpx.TransportError as exc:
            failure = f"{method}: {exc!r}"
        self.tally.latencies_ms.append((time.perf_counter() - begin_s) * 1e3)
        if failure is not None:
            self.tally.failures[failure] += 1
            return None
        return answer


async def measure(running: Topology, model: Path, other: Path, rates: Rates, pause_s: float) -> Tally:
    """Switch forth, back and forth under load."""
    urls = [f"http://{replica.address}:{running.replica_port}" for replica in running.replicas]
    limits = httpx.Limits(max_connections=2 * MAX_UNDER_WAY)
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits) as client:
        load = Load(urls, artifact.load(model).items.ids, client)
        done = asyncio.Event()
        begin_s = time.perf_counter()
        arriving = asyncio.create_task(load.run(rates, done))
        try:
            await asyncio.sleep(pause_s)
            await _killed_rebuild(running, other, pause_s)
            await asyncio.to_thread(lisarec, running, "rebuild", "--model", str(other))
            for name in (other.name, model.name, other.name):
                await asyncio.to_thread(lisarec, running, "activate", name, "--models-dir", str(other.parent))
                load.tally.followed_s.append(await _all_serve(client, urls, name))
                await asyncio.sleep(pause_s)
        finally:
            done.set()
            await arriving
    load.tally.elapsed_s = time.perf_counter() - begin_s
    return load.tally


def command(running: Topology, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "app", *arguments, *running.store_options]


def lisarec(running: Topology, *arguments: str) -> None:
    subprocess.run(command(running, *arguments), check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


async def _killed_rebuild(running: Topology, other: Path, after_s: float) -> None:
    process = subprocess.Popen(command(running, "rebuild", "--model", str(other)), cwd=ROOT, stdout=subprocess.DEVNULL)
    await asyncio.sleep(after_s)
    process.kill()
    process.wait()


async def _all_serve(client: httpx.AsyncClient, urls: list[str], name: str) -> float:
    """Wait until every replica serves the model; returns how long that took."""
    begin_s = time.perf_counter()
    waiting = list(urls)
    while waiting:
        answers = [await client.get(f"{url}/v1/model") for url in waiting]
        waiting = [url for url, answer in zip(waiting, answers, strict=True) if answer.json()["generation"] != name]
        if time.perf_counter() - begin_s > GIVE_UP_S:
            raise RuntimeError(f"{waiting} did not follow to {name} within {GIVE_UP_S:g} s")
        await asyncio.sleep(0.02)
    return time.perf_counter() - begin_s


async def wrong_states(running: Topology, models: list[Path], accepted: int) -> list[str]:
    """Users and models whose state is not the fold of the log; and whether the logs hold what was accepted."""
    generations = {model.name: generation_of(artifact.load(model)) for model in models}
    user_ids = [f"user-{number}" for number in range(USERS)]
    store = await open_store(_settings(running))
    try:
        logs = {user_id: await store.events("main", user_id, limit=10**7) for user_id in user_ids}
        wrong = [
            f"{user_id} of {name}"
            for name, generation in generations.items()
            for (user_id, log), value in zip(
                logs.items(), await store.states("main", user_ids, generation), strict=True
            )
            if not is_fold(generation, value, [entry.event for entry in log])
        ]
        return wrong if sum(map(len, logs.values())) == accepted else [*wrong, "not in the logs: all that was accepted"]
    finally:
        await store.close()


def _settings(running: Topology) -> StoreSettings:
    if running.redis_url is not None:
        return StoreSettings(redis_url=running.redis_url)
    return StoreSettings(data_dir=Path(running.store_options[-1]), redis_url=None)


def main(
    model: Annotated[Path, typer.Option(help="Model directory that is served first.")],
    other: Annotated[Path, typer.Option(help="Another one, in the same folder.")],
    redis: Annotated[bool, typer.Option(help="Two replicas on Redis, or one process on SQLite.")] = True,
    events: Annotated[int, typer.Option(min=BATCH, help="In a second.")] = 1_000,
    recommendations: Annotated[int, typer.Option(min=1, help="In a second.")] = 200,
    pause_s: Annotated[float, typer.Option(min=0.1, help="Before, between and after switches.")] = 10.0,
) -> None:
    if model.resolve().parent != other.resolve().parent:
        raise typer.BadParameter("the models must lie in one folder, as those do that can be activated")
    with topology(model, 2 if redis else 1, redis=redis) as running:
        tally = asyncio.run(measure(running, model, other, Rates(events, recommendations), pause_s))
        wrong = asyncio.run(wrong_states(running, [model, other], tally.accepted))
    p50, p99, worst = np.percentile(tally.latencies_ms, [50, 99, 100])
    requests, failed, accepted = len(tally.latencies_ms), sum(tally.failures.values()), tally.accepted
    console.print(f"{requests:,} requests, {failed} failed; {accepted:,} events accepted")
    per_s = accepted / tally.elapsed_s, tally.sources.total() / tally.elapsed_s
    console.print(f"in a second: {per_s[0]:,.0f} events, {per_s[1]:,.0f} recommendations")
    console.print(f"latency: p50 {p50:.1f} ms, p99 {p99:.1f} ms, worst {worst:.0f} ms")
    console.print(f"answers by model and source: {dict(sorted(tally.sources.items()))}", highlight=False)
    followed = ", ".join(f"{seconds:.2f}" for seconds in tally.followed_s)
    console.print(f"every replica followed within, after 'lisarec activate' had ended: {followed} s")
    console.print(f"states that are not the fold of the log, of both models: {len(wrong)}")
    for failure, times in tally.failures.most_common(SHOWN_FAILURES):
        console.print(f"{times} times {failure}", highlight=False, markup=False)
    if tally.failures or wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
