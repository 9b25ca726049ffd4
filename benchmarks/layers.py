"""What one recommendation costs in each layer of the service, in one process without a network: medians of many.

python -m benchmarks.layers --model models/ml-1m
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from starlette.types import Message

from app import direct
from app.main import create_app
from app.recommend import Stored
from app.schemas.recommendations import RecommendationRequest
from app.settings import Settings

USERS = 64
HISTORY = 30
ROUNDS = 1_000
IDLE_S = 0.002

console = Console()


async def median_us(call: Callable[[], Awaitable[Any]], idle_s: float = 0.0) -> float:
    """Of calls one behind the other, or with a pause between them."""
    taken_s = []
    for _ in range(ROUNDS):
        await asyncio.sleep(idle_s)
        begin_s = time.perf_counter()
        await call()
        taken_s.append(time.perf_counter() - begin_s)
    return float(np.median(taken_s)) * 1e6


async def measure(model: Path, data_dir: Path) -> dict[str, float]:
    app = create_app(Settings(model_dir=model, data_dir=data_dir))
    found: dict[str, float] = {}
    async with app.router.lifespan_context(app) as state:
        assert state is not None
        service = state["services"].by_tenant["main"]
        recommender = service.recommender
        users, items = [f"user-{number}" for number in range(USERS)], service.catalogue.item_ids
        for number, user in enumerate(users):
            own = [items[(number * HISTORY + n) % len(items)] for n in range(HISTORY)]
            await service.ingest.append([{"user_id": user, "item_id": item} for item in own])
        states = await service.store.states("main", users, recommender._generation)
        requests = [RecommendationRequest(user_id=user) for user in users]

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(_message: Message) -> None: ...

        async def ask() -> None:
            path = "/v1/users/user-1/recommendations"
            scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
            await app({**scope, "headers": [(b"host", b"x")], "state": dict(state)}, receive, send)

        at_hand = await recommender.recommend(requests[1:2])

        async def answer_at_hand(*_: object) -> list[Any]:
            return at_hand

        with patch.object(recommender._batching, "answers", answer_at_hand):
            found["HTTP, direct: from the ASGI call to the answer's bytes"] = await median_us(ask)
            with patch.object(direct, "_answering", lambda *_: None):
                found["HTTP, declared: the same through the framework"] = await median_us(ask)

        async def read() -> None:
            await service.store.states("main", users[:1], recommender._generation)

        found["the state, from SQLite and through its thread"] = await median_us(read)
        for size in (1, 8, 64):
            stored = Stored(dict(zip(users[:size], states, strict=False)), {})

            async def answers(size: int = size, stored: Stored = stored) -> None:
                recommender._answer(requests[:size], stored)

            found[f"state to ranked items, each of a batch of {size}"] = await median_us(answers) / size
            if size == 1:
                idle = f"the same after {IDLE_S * 1e3:g} ms in which the process slept"
                found[idle] = await median_us(answers, IDLE_S)
    return found


def main(model: Annotated[Path, typer.Option(help="Model directory.")]) -> None:
    with TemporaryDirectory() as store:
        found = asyncio.run(measure(model, Path(store)))
    table = Table("one recommendation", "µs")
    for name, taken_us in found.items():
        table.add_row(name, f"{taken_us:.0f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
