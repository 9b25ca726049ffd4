"""Check that clients do not notice another model going live: no request fails while a generation is switched.

Events and requests for recommendations arrive at fixed rates, whatever the answers do, at every replica itself, so
that no load balancer hides a failure. Latencies count from when a request was due. Meanwhile the other model is
rebuilt, with one kill -9 in between, activated, taken back and activated again, by the command line. No request may
fail, every replica must follow, and in the end the states of every user, of both generations, must be the fold of the
log: exit status 1 where that is not so.

    python -m benchmarks.rollout.model_switch --model models/may --other models/june  # two replicas on Redis
    python -m benchmarks.rollout.model_switch --model models/may --other models/june --no-redis  # one process on SQLite
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import count, takewhile
from pathlib import Path
from typing import Annotated

import httpx
import numpy as np
import typer
from rich.console import Console
from uuid_utils import uuid7

from app.jobs.loadtest.load_generator import LoadGenerator, Responses, ScheduledRequest, get, post
from app.serving.served_generation import generation_of
from app.serving.store_factory import open_store
from app.settings import StoreSettings
from benchmarks.harness.compose import ROOT
from benchmarks.harness.ledger import is_fold
from benchmarks.harness.topology import Topology, topology
from model.artifact import model_directory
from storage.state.event import Event

USERS = 500
BATCH = 10
CONNECTIONS = 64
GIVE_UP_S = 200.0
EVENTS, RECOMMENDATIONS = "events", "recommendations"

console = Console()


@dataclass
class SwitchTally:
    """The outcome of the requests, by what they asked for."""

    outcomes: dict[str, Responses] = field(default_factory=dict)
    elapsed_s: float = 0.0
    followed_s: list[float] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        """Events; no request holds one twice, so an answer of 200 took all of its."""
        return BATCH * self.outcomes[EVENTS].statuses[200] if EVENTS in self.outcomes else 0

    @property
    def failed(self) -> int:
        """Return how many requests were not answered with 200."""
        return sum(times for one in self.outcomes.values() for status, times in one.statuses.items() if status != 200)


@dataclass
class ArrivalRates:
    """Arrivals per second."""

    events: int
    recommendations: int


def arrivals(item_ids: Sequence[str], rates: ArrivalRates, is_over: threading.Event) -> Iterator[ScheduledRequest]:
    """Yield requests until it is over, as evenly spread as they can be."""
    rng = random.Random(0)

    def user_id() -> str:
        """Half of all of ten hot users."""
        return f"user-{rng.randrange(10 if rng.random() < 0.5 else USERS)}"

    def events(at_s: float) -> ScheduledRequest:
        batch = [
            {"event_id": str(uuid7()), "user_id": user_id(), "item_id": rng.choice(item_ids)} for _ in range(BATCH)
        ]
        return ScheduledRequest(at_s, EVENTS, post("/v1/events", batch))

    def question(at_s: float) -> ScheduledRequest:
        return ScheduledRequest(at_s, RECOMMENDATIONS, get(f"/v1/users/{user_id()}/recommendations"))

    yield from takewhile(
        lambda _: not is_over.is_set(),
        merge(
            (events(number * BATCH / rates.events) for number in count()),
            (question(number / rates.recommendations) for number in count()),
            key=lambda due: due.at_s,
        ),
    )


async def measure(running: Topology, model: Path, other: Path, rates: ArrivalRates, pause_s: float) -> SwitchTally:
    """Switch forth, back and forth under load."""
    addresses = [(str(replica.address), running.replica_port) for replica in running.replicas]
    urls = [f"http://{host}:{port}" for host, port in addresses]
    tally, is_over = SwitchTally(), threading.Event()
    load = LoadGenerator(addresses, CONNECTIONS)
    async with httpx.AsyncClient() as client:
        begin_s = time.perf_counter()
        due = arrivals(model_directory.load(model).items.ids, rates, is_over)
        loading = asyncio.create_task(asyncio.to_thread(load.run, due))
        try:
            await asyncio.sleep(pause_s)
            await _killed_rebuild(running, other, pause_s)
            await asyncio.to_thread(lisarec, running, "rebuild", "--model", str(other))
            for name in (other.name, model.name, other.name):
                await asyncio.to_thread(lisarec, running, "activate", name, "--models-dir", str(other.parent))
                tally.followed_s.append(await _all_serve(client, urls, name))
                await asyncio.sleep(pause_s)
        finally:
            is_over.set()
            tally.outcomes = await loading
            load.close()
    tally.elapsed_s = time.perf_counter() - begin_s
    return tally


def command(running: Topology, *arguments: str) -> list[str]:
    """Return the command of `lisarec` on the topology's store."""
    return [sys.executable, "-m", "app", *arguments, *running.store_options]


def lisarec(running: Topology, *arguments: str) -> None:
    """Run `lisarec` on the topology's store."""
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
    """Return users and models whose state is not the fold of the log, and whether the logs lack accepted events."""
    generations = {model.name: generation_of(model_directory.load(model)) for model in models}
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
            if not is_fold(generation, value, [entry.record for entry in log if isinstance(entry.record, Event)])
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
    """Switch models under load, and check answers and states."""
    if model.resolve().parent != other.resolve().parent:
        raise typer.BadParameter("the models must lie in one folder, as those do that can be activated")
    with topology(model, 2 if redis else 1, redis=redis) as running:
        tally = asyncio.run(measure(running, model, other, ArrivalRates(events, recommendations), pause_s))
        wrong = asyncio.run(wrong_states(running, [model, other], tally.accepted))
    for kind, outcome in sorted(tally.outcomes.items()):
        p50, p99, worst = np.percentile(outcome.latencies_ms or [np.nan], [50, 99, 100])
        statuses = ", ".join(f"{times:,} of {status or 'no answer'}" for status, times in outcome.statuses.items())
        console.print(f"{kind}: {statuses}; p50 {p50:.1f} ms, p99 {p99:.1f} ms, worst {worst:.0f} ms", highlight=False)
    console.print(
        f"in {tally.elapsed_s:,.0f} s {tally.accepted:,} events, {tally.accepted / tally.elapsed_s:,.0f} in a second"
    )
    followed = ", ".join(f"{seconds:.2f}" for seconds in tally.followed_s)
    console.print(f"every replica followed within, after 'lisarec activate' had ended: {followed} s")
    console.print(f"states that are not the fold of the log, of both models: {len(wrong)}")
    if tally.failed or wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
