"""What it costs a request to be observed: its metrics, its id, the header Server-Timing.

Runs the middleware and the calls of a personalised recommendation, and of an event, around an app that does nothing,
and takes the same without them off; once as the only process, once as one of several that share their numbers.

    python -m benchmarks.observing
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

REQUESTS = 20_000
A_SECOND = 500
ROUNDS = 7
SHARED = "PROMETHEUS_MULTIPROC_DIR"

console = Console()


async def measured() -> dict[str, float]:
    """Microseconds for one request, by kind; the best of some rounds."""
    from app import trace
    from app.metrics import Metrics, RequestTimer
    from storage.records import AppendResult

    shared = os.environ.get(SHARED)
    metrics = Metrics(None if shared is None else Path(shared))
    start: dict[str, Any] = {"type": "http.response.start", "status": 200}
    accepted = [AppendResult()]

    async def answer(scope: Any, _receive: Any, send: Any) -> None:
        scope["route"] = ROUTE
        await send({**start, "headers": []})

    async def recommendation(scope: Any, receive: Any, send: Any) -> None:
        with metrics.asking_store("states"):
            begin_s = time.perf_counter()
        trace.note("store", time.perf_counter() - begin_s)
        metrics.at_engine += 1
        metrics.at_engine -= 1
        metrics.observe_batch(1, 0.0003, 0.0004)
        trace.note("step", 0.0003)
        trace.note("scan", 0.0004)
        metrics.count_recommendations("personalised")
        await answer(scope, receive, send)

    async def event(scope: Any, receive: Any, send: Any) -> None:
        with metrics.asking_store("append"):
            pass
        metrics.count_events(accepted)
        await answer(scope, receive, send)

    bare = await best(answer, lambda: None)
    return {
        "recommendation": await best(RequestTimer(recommendation, metrics, 10), lambda: metrics.sample(0)) - bare,
        "event": await best(RequestTimer(event, metrics, 10), lambda: metrics.sample(0)) - bare,
    }


class ROUTE:
    path = "/v1/users/{user_id}/recommendations"


async def best(app: Callable[..., Awaitable[None]], sample: Callable[[], None]) -> float:
    async def receive() -> None: ...

    async def send(_: object) -> None: ...

    headers = [(b"host", b"service"), (b"accept", b"*/*"), (b"user-agent", b"bench"), (b"authorization", b"Bearer x")]
    found = []
    for _ in range(ROUNDS):
        begin_s = time.perf_counter()
        for n in range(REQUESTS):
            if n % A_SECOND == 0:  # what the service does once a second
                sample()
            await app({"type": "http", "method": "GET", "headers": headers}, receive, send)
        found.append((time.perf_counter() - begin_s) / REQUESTS * 1e6)
    return min(found)


def main() -> None:
    if "--one" in sys.argv:
        for kind, us in asyncio.run(measured()).items():
            print(f"{kind}: {us:.1f} us")
        return
    with TemporaryDirectory() as directory:
        for title, shared in (("one process", {}), ("one of several", {SHARED: directory})):
            environment = {name: value for name, value in os.environ.items() if name != SHARED} | shared
            command = [sys.executable, "-m", "benchmarks.observing", "--one"]
            said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            console.print(title, *said.splitlines(), sep="  ")


if __name__ == "__main__":
    main()
