"""Check that a step costs the same, and a state has the same size, after 10 and after 1,000,000 events.

One embedded store contains two users, one with a short and one with a long history. Each step of the service's path is
timed for both, in turns: append an event (durable), read the state, compute a query, find the top 10. Then the
computation from states to queries is compared with the same model in torch, for one user and for 64.

    python -m benchmarks.inference.constant_cost --model models/ml-1m
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from app.serving.served_generation import generation_of
from model.artifact import model_directory
from model.inference.engine import Engine
from model.inference.query_products import Queries
from storage.sqlite.store import SQLiteStore
from storage.state.event import Event
from storage.state.generation import Generation

BATCH = 1000
USERS = 64  # in a batch of steps
CONSECUTIVE_STEPS = 10
TENANT = "main"

console = Console()


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    short: Annotated[int, typer.Option(help="Events of the short history.")] = 10,
    long: Annotated[int, typer.Option(help="Events of the long history.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(help="Timed steps of each user.")] = 500,
) -> None:
    """Measure a short history and a long one."""
    torch.set_num_threads(1)
    trained = model_directory.load(model)
    with TemporaryDirectory() as directory:
        asyncio.run(measure(trained, Path(directory), (short, long), rounds))


async def measure(trained: model_directory.Artifact, directory: Path, lengths: tuple[int, int], rounds: int) -> None:
    """Print the times of each step for both histories, and the bytes of their states."""
    generation, engine = generation_of(trained), Engine(trained)
    store = await SQLiteStore.open(directory, [generation])
    try:
        for length in lengths:
            await fill(store, trained.items.ids, length)
        times_us: dict[tuple[str, int], list[float]] = defaultdict(list)
        for turn in range(rounds):
            for length in lengths:
                event = event_at(str(length), length + turn, trained.items.ids)
                for name, elapsed_us in (await step(store, generation, engine, event)).items():
                    times_us[name, length].append(elapsed_us)
        values = await store.states(TENANT, [str(length) for length in lengths], generation)
    finally:
        await store.close()
    report(times_us, lengths, [len(value or b"") for value in values], rounds)
    report_steps(step_times(trained, generation, engine, values, rounds), lengths, rounds)


async def fill(store: SQLiteStore, item_ids: Sequence[str], length: int) -> None:
    """Append `length` events of one user."""
    for begin in track(range(0, length, BATCH), f"posting {length:,} events", console=console):
        positions = range(begin, min(begin + BATCH, length))
        await store.append(TENANT, [event_at(str(length), position, item_ids) for position in positions])


def event_at(user_id: str, position: int, item_ids: Sequence[str]) -> Event:
    """Return the event of a user at this position."""
    item_id = item_ids[position * 7919 % len(item_ids)]
    return Event(f"{user_id}-{position}", user_id, item_id, "click", position * 1_000_000, position * 1_000_000)


async def step(store: SQLiteStore, generation: Generation, engine: Engine, event: Event) -> dict[str, float]:
    """Return the microseconds of each part of a user's path from a click to a list."""
    times = [time.perf_counter()]
    await store.append(TENANT, [event])
    times.append(time.perf_counter())
    (value,) = await store.states(TENANT, [event.user_id], generation)
    times.append(time.perf_counter())
    queries = to_queries(generation, engine, [value or b""])
    times.append(time.perf_counter())
    engine.top_k(queries, 10)
    times.append(time.perf_counter())
    names = ("append, durable", "read the state", "state to query", "top 10")
    return {name: (after - before) * 1e6 for name, before, after in zip(names, times, times[1:], strict=False)}


def to_queries(generation: Generation, engine: Engine, values: list[bytes]) -> Queries:
    """Compute queries as the service does, from the stored bins: the scale of a row cancels in the softmax."""
    states = generation.decode_many(values)
    return engine.step(states["bins"], states["last_item"], states["stepped_items"])


@torch.inference_mode()
def queries_in_torch(trained: model_directory.Artifact, generation: Generation, values: list[bytes]) -> Tensor:
    """Compute the same queries with the model in torch."""
    states = generation.decode_many(values)
    return trained.model.read(
        torch.from_numpy(generation.histograms(states)),
        torch.from_numpy(states["last_item"].astype(np.int64)),
        torch.from_numpy(states["stepped_items"].astype(np.int64)),
        trained.tables,
    )


StepTimes = dict[tuple[str, int, int], list[float]]


def step_times(
    trained: model_directory.Artifact, generation: Generation, engine: Engine, values: list[bytes | None], rounds: int
) -> StepTimes:
    """Return microseconds per user, by method, users in a batch and history; the methods take turns."""
    run_steps: dict[str, Callable[[list[bytes]], object]] = {
        "compiled": lambda batch: to_queries(generation, engine, batch),
        "torch": lambda batch: queries_in_torch(trained, generation, batch),
    }
    times_us: StepTimes = defaultdict(list)
    for _ in range(-(-rounds // CONSECUTIVE_STEPS)):
        for users in (1, USERS):
            for place, value in enumerate(values):
                batch = [value or b""] * users
                for name, run_step in run_steps.items():
                    times_us[name, users, place] += consecutive_us(run_step, batch)
    return times_us


def consecutive_us(run_step: Callable[[list[bytes]], object], batch: list[bytes]) -> list[float]:
    """Return microseconds per user. At the first time, the caches contain the weights of the other methods."""
    times = [time.perf_counter()]
    for _ in range(CONSECUTIVE_STEPS):
        run_step(batch)
        times.append(time.perf_counter())
    return [(after - before) / len(batch) * 1e6 for before, after in pairwise(times)]


def report_steps(times_us: StepTimes, lengths: tuple[int, int], rounds: int) -> None:
    """Print the times of the compiled step, compared with torch."""
    headings = (f"after {length:,} events: least / median" for length in lengths)
    table = Table("", *headings, "ratio of medians", title=f"bytes of states to queries, of {rounds}")
    for users in (1, USERS):
        for name in ("compiled", "torch"):
            few, many = (times_us[name, users, place] for place in range(2))
            cells = (f"{min(times):.1f} / {median(times):.1f} µs" for times in (few, many))
            table.add_row(f"{name}, {users} at once, each", *cells, f"{median(many) / median(few):.2f}")
        faster = (
            median(times_us["torch", users, place]) / median(times_us["compiled", users, place]) for place in range(2)
        )
        table.add_row("torch / compiled", *(f"{times:.1f} times" for times in faster))
    console.print(table)


def report(
    times_us: dict[tuple[str, int], list[float]], lengths: tuple[int, int], sizes: list[int], rounds: int
) -> None:
    """Print the medians of each part, and the bytes of the states."""
    table = Table("", *(f"after {length:,} events" for length in lengths), "ratio", title=f"medians of {rounds}")
    for name in dict.fromkeys(name for name, _ in times_us):
        few, many = (median(times_us[name, length]) for length in lengths)
        table.add_row(name, f"{few:.0f} µs", f"{many:.0f} µs", f"{many / few:.2f}")
    table.add_row("bytes of the state", *(f"{size:,}" for size in sizes), f"{sizes[1] / sizes[0]:.2f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
