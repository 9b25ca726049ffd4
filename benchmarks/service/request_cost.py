"""Measure the cost of a request in each layer of the service, in one process without a network.

A recommendation is timed from the ASGI call to the bytes of the response, as a whole and in parts; the results are
medians. Observing a request (metrics, request id, the header Server-Timing) is timed with an app that does nothing: the
middleware and the metric calls of a recommendation or an event, minus the same app without them. The process is either
the only one, or one of several that share their metrics.

    python -m benchmarks.service.request_cost --model models/ml-1m
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from starlette.types import Message

from app.http.middleware import fast_path
from app.http.middleware.request_metrics import RequestRecorder, RequestTimer
from app.observability import tracing
from app.observability.metrics import Metrics
from app.recommendation.batching import MicroBatcher
from app.recommendation.filters import EVERYTHING
from app.recommendation.ranking.batch_ranker import RankerInput
from app.recommendation.ranking.stored_users import NOTHING_SEEN, StoredUsers
from app.recommendation.recommender import Recommender
from app.schemas.recommendations import RecommendationRequest
from app.settings import Settings
from benchmarks.harness.service_process import in_process_service

USERS = 64
HISTORY = 30
ROUNDS = 1_000
IDLE_S = 0.002
OBSERVED_REQUESTS = 20_000
OBSERVED_A_SECOND = 500
OBSERVED_ROUNDS = 7
SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"

App = Callable[..., Awaitable[None]]

console = Console()


async def median_us(call: Callable[[], Awaitable[Any]], idle_s: float = 0.0) -> float:
    """Return the median microseconds of calls, one after another, with an optional pause between them."""
    taken_s = []
    for _ in range(ROUNDS):
        await asyncio.sleep(idle_s)
        begin_s = time.perf_counter()
        await call()
        taken_s.append(time.perf_counter() - begin_s)
    return float(np.median(taken_s)) * 1e6


async def measure(model: Path, data_dir: Path) -> dict[str, float]:
    """Return the median microseconds of each layer of a recommendation."""
    found: dict[str, float] = {}
    async with in_process_service(Settings(model_dir=model, data_dir=data_dir)) as service:
        app, store, switcher = service.app, service.tenant.store, service.tenant.switcher
        recommender = switcher.recommender
        assert isinstance(recommender, Recommender)
        await service.add_histories(USERS, HISTORY)
        users = [f"user-{number}" for number in range(USERS)]
        stored_states = await store.states("main", users, switcher.current.generation)
        states = [state for state in stored_states if state is not None]
        requests = [RecommendationRequest(user_id=user) for user in users]

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(_message: Message) -> None: ...

        async def ask() -> None:
            path = "/v1/users/user-1/recommendations"
            scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
            await app({**scope, "headers": [(b"host", b"x")], "state": dict(service.state)}, receive, send)

        prepared = await recommender.recommend(requests[1:2])

        async def answer_prepared(*_: object) -> object:
            return prepared

        with patch.object(MicroBatcher, "submit", answer_prepared):
            found["HTTP, direct: from the ASGI call to the answer's bytes"] = await median_us(ask)
            with patch.object(fast_path, "fast_answer", lambda *_: None):
                found["HTTP, declared: the same through the framework"] = await median_us(ask)

        async def read() -> None:
            await store.states("main", users[:1], switcher.current.generation)

        found["the state, from SQLite"] = await median_us(read)
        for size in (1, 8, 64):
            stored = StoredUsers(dict(zip(users[:size], states, strict=False)), [NOTHING_SEEN] * size)

            async def answers(size: int = size, stored: StoredUsers = stored) -> None:
                recommender.ranker.rank(requests[:size], RankerInput(stored, [EVERYTHING] * size))

            found[f"state to ranked items, each of a batch of {size}"] = await median_us(answers) / size
            if size == 1:
                idle = f"the same after {IDLE_S * 1e3:g} ms in which the process slept"
                found[idle] = await median_us(answers, IDLE_S)
    return found


class FakeRoute:
    """The route that the framework sets in a request's scope."""

    path = "/v1/users/{user_id}/recommendations"


def observation_costs() -> dict[str, float]:
    """Return the microseconds that observation adds to a recommendation and to an event, in this process."""
    return asyncio.run(_observation_costs())


async def _observation_costs() -> dict[str, float]:
    shared = os.environ.get(SHARED_METRICS)
    metrics = Metrics(None if shared is None else Path(shared))

    async def answer(scope: Any, _receive: Any, send: Any) -> None:
        scope["route"] = FakeRoute
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def recommendation(scope: Any, receive: Any, send: Any) -> None:
        begin_s = time.perf_counter()
        store_s = time.perf_counter() - begin_s
        metrics.store.observe("states", store_s, is_failed=False)
        metrics.engine.in_progress += 1
        metrics.engine.in_progress -= 1
        metrics.engine.observe_waits([0.0001], 0.0001)
        metrics.engine.observe_batch(1, {"step": 0.0003, "scan": 0.0004})
        if (request_trace := tracing.current.get()) is not None:
            request_trace.spans |= {"store": store_s, "step": 0.0003, "scan": 0.0004}
        metrics.recommendations.count("personalised")
        await answer(scope, receive, send)

    outcomes = metrics.events.of_tenant("main")

    async def event(scope: Any, receive: Any, send: Any) -> None:
        begin_s = time.perf_counter()
        metrics.store.observe("append", time.perf_counter() - begin_s, is_failed=False)
        outcomes.count({"accepted": 1, "duplicate": 0, "unknown_item": 0, "late": 0})
        await answer(scope, receive, send)

    async def sampled(app: App) -> float:
        return await least_us(RequestTimer(app, RequestRecorder(metrics.requests, 10)), lambda: metrics.sample(0))

    bare = await least_us(answer, lambda: None)
    return {"a recommendation": await sampled(recommendation) - bare, "an event": await sampled(event) - bare}


async def least_us(app: App, sample: Callable[[], None]) -> float:
    """Return the microseconds of one request, the best of several rounds; `sample` runs once a second of load."""

    async def receive() -> None: ...

    async def send(_: object) -> None: ...

    headers = [(b"host", b"service"), (b"accept", b"*/*"), (b"user-agent", b"bench"), (b"authorization", b"Bearer x")]
    found = []
    for _ in range(OBSERVED_ROUNDS):
        begin_s = time.perf_counter()
        for n in range(OBSERVED_REQUESTS):
            if n % OBSERVED_A_SECOND == 0:
                sample()
            await app({"type": "http", "method": "GET", "headers": headers}, receive, send)
        found.append((time.perf_counter() - begin_s) / OBSERVED_REQUESTS * 1e6)
    return min(found)


def observation_costs_apart(environment: Mapping[str, str]) -> dict[str, float]:
    """Return the same for a new process, because the metrics read the environment when they are imported."""
    with patch.dict(os.environ, environment), multiprocessing.get_context("spawn").Pool(1) as process:
        costs: dict[str, float] = process.apply(observation_costs)
        return costs


def main(model: Annotated[Path, typer.Option(help="Model directory.")]) -> None:
    """Print the cost of each layer, and of observing a request."""
    with TemporaryDirectory() as store:
        found = asyncio.run(measure(model, Path(store)))
    table = Table("one recommendation", "µs")
    for name, taken_us in found.items():
        table.add_row(name, f"{taken_us:.0f}")
    console.print(table)
    table = Table("observing", "one process, µs", "one of several, µs")
    with TemporaryDirectory() as directory:
        alone, shared = observation_costs_apart({}), observation_costs_apart({SHARED_METRICS: directory})
    for name in alone:
        table.add_row(name, f"{alone[name]:.1f}", f"{shared[name]:.1f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
