"""Check that clients do not notice how replicas come and go: no request fails while the service is scaled.

Clients post events and ask for recommendations all the time while the processes of benchmarks/harness/topology.py are
scaled 2 -> 8, restarted one by one, one of them killed with kill -9, and scaled 8 -> 2, again and again until enough
requests are done. The archiver moves the log out of Redis meanwhile, and Prometheus watches. Every answer must be a
success, a known user must not get merely popular items, and in the end every event must count once and be archived
once, and Prometheus must have seen all replicas and no failure: exit status 1 where that is not so.

    python -m benchmarks.rollout.scaling --model models/ml-1m
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import httpx
import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from uuid_utils import uuid7

from benchmarks.harness.monitoring import ARCHIVE, Prometheus, monitored
from benchmarks.harness.topology import MAX_REPLICAS, Topology, topology
from model.artifact import model_directory
from storage.archive.training_events import TrainingEvents

REQUEST_TIMEOUT_S = 60.0
SHOWN_FAILURES = 10
ARCHIVED_WITHIN_S = 200.0
PAUSE_S = 0.0  # of a visitor, after each request
REST_S = 60.0  # else nearly all of the time would go into starting replicas

console = Console()


@dataclass
class ScalingTally:
    """The outcomes of the requests, by the action on the replicas when they began."""

    phase: str = "start"
    latencies_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    posted: Counter[str] = field(default_factory=Counter)  # events by user

    @property
    def requests(self) -> int:
        """Return how many requests were answered or failed."""
        return sum(map(len, self.latencies_ms.values()))


class Visitor:
    """Posts events and asks for recommendations as one user after the other, one request at a time."""

    def __init__(self, name: str, item_ids: Sequence[str], client: httpx.AsyncClient, tally: ScalingTally) -> None:
        self._name = name
        self._item_ids = item_ids
        self._client = client
        self._tally = tally
        self._random = random.Random(name)

    async def visit(self, until: asyncio.Event) -> None:
        """Send requests until the event is set."""
        for n in range(1_000_000):
            user_id = f"{self._name}-{n}"
            await self._post_events(user_id)
            for _ in range(self._random.randrange(1, 40)):
                if until.is_set():
                    return
                await self._random.choice([self._post_events, self._get, self._post])(user_id)
                await asyncio.sleep(PAUSE_S)

    async def _post_events(self, user_id: str) -> None:
        items = self._random.choices(self._item_ids, k=self._random.choice([1, 1, 1, 20]))
        events = [{"event_id": str(uuid7()), "user_id": user_id, "item_id": item_id} for item_id in items]
        if await self._send("POST", "/v1/events", json=events) is not None:
            self._tally.posted[user_id] += len(events)

    async def _get(self, user_id: str) -> None:
        self._require_own_items(user_id, await self._send("GET", f"/v1/users/{user_id}/recommendations"))

    async def _post(self, user_id: str) -> None:
        body = {"user_id": user_id, "exclude": self._random.choices(self._item_ids, k=5)}
        self._require_own_items(user_id, await self._send("POST", "/v1/recommendations", json=body))

    def _require_own_items(self, user_id: str, answer: httpx.Response | None) -> None:
        if self._tally.posted[user_id] and answer is not None and answer.json()["source"] == "popular":
            self._tally.failures[self._tally.phase, "popular items for a known user"] += 1

    async def _send(self, method: str, path: str, json: object = None) -> httpx.Response | None:
        """Return the answer, or None where there was no success."""
        phase, begin_s = self._tally.phase, time.perf_counter()
        try:
            answer = await self._client.request(method, path, json=json)
            failure = (
                None if answer.is_success else f"{method} {path.split('/')[2]}: {answer.status_code} {answer.text}"
            )
        except httpx.TransportError as exc:
            failure = f"{method} {path.split('/')[2]}: {exc!r}"
        self._tally.latencies_ms[phase].append((time.perf_counter() - begin_s) * 1e3)
        if failure is not None:
            self._tally.failures[phase, failure] += 1
            return None
        return answer


async def disturb(
    running: Topology, requests: int, fewest: int, most: int, rest_s: float, tally: ScalingTally, done: asyncio.Event
) -> None:
    """Scale up, restart, kill and scale down until there were enough requests."""

    async def run_phase(name: str, action: object = None, *args: int) -> None:
        tally.phase = name
        await asyncio.to_thread(action, *args) if callable(action) else await asyncio.sleep(rest_s)

    try:
        while tally.requests < requests:
            await run_phase(f"{fewest} of them")
            await run_phase(f"{fewest} -> {most}", running.scale, most)
            await run_phase(f"{most} of them")
            await run_phase("restarting one by one", running.restart_one_by_one)
            await run_phase("kill -9 of one", running.kill_one)
            await run_phase(f"{most} -> {fewest}", running.scale, fewest)
    finally:
        done.set()


async def measure(
    running: Topology, item_ids: Sequence[str], requests: int, visitors: int, fewest: int, most: int, rest_s: float = 1
) -> ScalingTally:
    """Send so many requests; between two disturbances the replicas are left alone for `rest_s`."""
    tally, done = ScalingTally(), asyncio.Event()
    async with (
        httpx.AsyncClient(base_url=running.url, timeout=REQUEST_TIMEOUT_S) as lasting,
        # every other client opens a connection for each request
        httpx.AsyncClient(base_url=running.url, timeout=REQUEST_TIMEOUT_S, headers={"connection": "close"}) as brief,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(disturb(running, requests, fewest, most, rest_s, tally, done))
        for n in range(visitors):
            client = brief if n % 2 else lasting
            group.create_task(Visitor(f"visitor-{n}", item_ids, client, tally).visit(done))
    await check_counts(running.url, tally)
    return tally


async def check_counts(url: str, tally: ScalingTally) -> None:
    """Add a failure for each user whose events do not count exactly once."""
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S) as client:
        for user_id, posted in tally.posted.items():
            answer = await client.get(f"/v1/users/{user_id}")
            if not answer.is_success or answer.json()["event_count"] != posted:
                tally.failures["end", f"{posted} events acknowledged, then: {answer.text[:200]}"] += 1


def report(tally: ScalingTally, elapsed_s: float, resent: int) -> None:
    """Print latencies and failures by the action on the replicas."""
    table = Table("", "requests", "failed", "p50", "p99", "longest")
    for phase, latencies_ms in tally.latencies_ms.items():
        failed = sum(count for (at, _), count in tally.failures.items() if at == phase)
        p50, p99 = np.percentile(latencies_ms, [50, 99])
        row = [f"{len(latencies_ms):,}", f"{failed:,}", *(f"{ms:.0f} ms" for ms in (p50, p99, max(latencies_ms)))]
        table.add_row(phase, *row)
    failed = sum(tally.failures.values())
    table.add_row("all", f"{tally.requests:,}", f"{failed:,}")
    console.print(table)
    users, events = len(tally.posted), sum(tally.posted.values())
    console.print(f"{events:,} events of {users:,} users acknowledged; {tally.requests / elapsed_s:.0f} requests/s;")
    console.print(f"{resent:,} requests were sent again by the load balancer")
    for (phase, failure), count in tally.failures.most_common(SHOWN_FAILURES):
        console.print(f"[red]{count} x {phase}: {failure}", soft_wrap=True)


def check_archive(archive: Path, prometheus: Prometheus, tally: ScalingTally) -> int:
    """Add a failure unless each acknowledged event comes to be archived once; returns how many are."""
    acknowledged = sum(tally.posted.values())
    give_up_at_s = time.monotonic() + ARCHIVED_WITHIN_S
    while prometheus.number('lisarec_archive_events_total{done="archived"}') < acknowledged:
        if time.monotonic() > give_up_at_s:
            break
        time.sleep(1)
    archived = len(TrainingEvents(archive, "main"))
    if archived != acknowledged:
        tally.failures["end", f"{acknowledged:,} events acknowledged, {archived:,} archived"] += 1
    return archived


def check_watched(prometheus: Prometheus, most: int, tally: ScalingTally) -> None:
    """Add what Prometheus has not seen of the replicas, and what it has seen of failures."""
    seen = prometheus.number('max_over_time(count(up{job="app"} == 1)[2h:1s])')
    if seen < most:
        tally.failures["end", f"Prometheus has seen {seen:g} replicas at a time"] += 1
    failed = prometheus.number('haproxy_frontend_http_responses_total{proxy="service", code="5xx"}')
    if failed:
        tally.failures["end", f"the load balancer has answered {failed:g} times with 5xx"] += 1
    paged = prometheus.query('count by (alertname) (count_over_time(ALERTS{alertstate="firing", severity="page"}[2h]))')
    for alert in paged:
        tally.failures["end", f"the alert {alert['metric']['alertname']} has fired"] += 1


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    requests: Annotated[int, typer.Option(min=1, help="At least so many.")] = 200_000,
    visitors: Annotated[int, typer.Option(min=1, help="How many requests at a time.")] = 16,
    fewest: Annotated[int, typer.Option(min=1, help="How many replicas to scale down to.")] = 2,
    most: Annotated[int, typer.Option(min=2, max=MAX_REPLICAS, help="How many to scale up to.")] = 8,
) -> None:
    """Measure, and exit with 1 where a request failed."""
    item_ids = model_directory.load(model).items.ids
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="lisarec-scaling-")))
        environment = {"LISAREC_ARCHIVE_DIR": str(directory / ARCHIVE)}
        running = stack.enter_context(topology(model, fewest, environment=environment))
        # the tail is short, so that resends and new states meet what is archived
        prometheus = stack.enter_context(monitored(running, directory, ["--every", "5", "--keep-tail", "10"]))
        begin_s = time.monotonic()
        tally = asyncio.run(measure(running, item_ids, requests, visitors, fewest, most, REST_S))
        elapsed_s = time.monotonic() - begin_s
        archived = check_archive(directory / ARCHIVE, prometheus, tally)
        check_watched(prometheus, most, tally)
        report(tally, elapsed_s, running.resent())
        console.print(f"{archived:,} events archived, {running.killed} replicas killed")
    if tally.failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
