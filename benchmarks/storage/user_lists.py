"""Measure `lisarec recommend`: lists for all users of a store, in users per second, and its memory over time.

python -m benchmarks.storage.user_lists --model models/ml-1m                             # a million users, SQLite
python -m benchmarks.storage.user_lists --model models/ml-1m --store redis --users 100000
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.progress import track

from app.jobs.lists.user_lists import ListPlan, write_lists
from app.jobs.loadtest.synthetic_catalogue import item_id, write_enlarged
from app.serving.model_locations import load_model
from app.serving.served_generation import generation_of
from app.serving.store_factory import opened_store
from app.settings import Settings
from benchmarks.harness.topology import redis_server
from benchmarks.machine import cpu
from storage.state.event import Event

BATCH = 500
NOW_US = 1_750_000_000_000_000
REPORTS = 10

console = Console()


async def add_users(settings: Settings, users: int, events: int, items: int) -> None:
    """Log this many events for each user, on random items."""
    assert settings.model_dir is not None
    generation, random = generation_of(load_model(settings.model_dir, settings)), np.random.default_rng(0)
    async with opened_store(settings, generation, is_new=True) as store:
        for begin in track(range(0, users, BATCH), "users", console=console):
            chosen = random.integers(0, items, (min(BATCH, users - begin), events)).tolist()
            await store.append(
                settings.tenant,
                [
                    Event(f"{number}-{n}", f"user-{number}", item_id(row), "click", NOW_US + n, NOW_US + n)
                    for number, rows in enumerate(chosen, begin)
                    for n, row in enumerate(rows)
                ],
            )


class Progress:
    """Reports a few times how fast lists are created, and the memory of the process.

    users_per_s  from the first lists to the last, without loading the model
    """

    def __init__(self, users: int) -> None:
        self.users_per_s = 0.0
        self._every = max(1, users // REPORTS)
        self._first: tuple[int, float] | None = None
        self._reported = 0

    def update(self, done: int) -> None:
        """Note that this many users have a list."""
        now_s = time.perf_counter()
        if not done:
            return
        if self._first is None:
            self._first = done, now_s
        elif done - self._reported >= self._every:
            self._reported = done
            self.users_per_s = (done - self._first[0]) / (now_s - self._first[1])
            resident = psutil.Process().memory_info().rss / 2**20
            console.print(f"{done:,} users: {self.users_per_s:,.0f}/s, {resident:,.0f} MiB resident", highlight=False)


def main(
    model: Annotated[Path, typer.Option(help="Trained model, whose catalogue is enlarged.")],
    users: Annotated[int, typer.Option(min=1)] = 1_000_000,
    events: Annotated[int, typer.Option(min=1, help="Of each user.")] = 3,
    items: Annotated[int, typer.Option(min=1, help="In the catalogue.")] = 100_000,
    store: Annotated[Literal["sqlite", "redis"], typer.Option()] = "sqlite",
) -> None:
    """Create the store, then the lists."""
    with ExitStack() as stack:
        work = Path(stack.enter_context(TemporaryDirectory(prefix="lisarec-lists-")))
        write_enlarged(work / "models" / "enlarged", model, items, "trained")
        redis_url = stack.enter_context(redis_server(work)) if store == "redis" else None
        settings = Settings(model_dir=work / "models" / "enlarged", data_dir=work / "state", redis_url=redis_url)
        asyncio.run(add_users(settings, users, events, items))
        progress, begin_s, out = Progress(users), time.perf_counter(), work / "lists.parquet"
        counts = asyncio.run(write_lists(settings, ListPlan({}), out, progress.update))
        taken_s, size = time.perf_counter() - begin_s, out.stat().st_size
    console.print(
        f"{cpu()}, {os.cpu_count()} cores, {store}: lists for {counts.users:,} users among {items:,} items in "
        f"{taken_s:.0f} s, {progress.users_per_s:,.0f} users/s after the start; {size / 2**20:.0f} MiB of Parquet",
        highlight=False,
    )


if __name__ == "__main__":
    typer.run(main)
