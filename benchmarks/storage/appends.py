"""Measure the append rate of the embedded store without HTTP; each group is synced to disk before it is acknowledged.

python -m benchmarks.storage.appends
python -m benchmarks.storage.appends --directory /mnt/disk       # measures this disk
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from storage.sqlite.store import SQLiteStore
from storage.state.event import Event
from storage.state.generation import Generation

TENANT = "main"
RATES, CODEBOOKS, CODEWORDS, ITEMS = (0.05, 0.25, 0.8), 8, 32, 3_000
USERS = 1_000
START_US = 1_700_000_000_000_000
LOADS = ((1, 1), (64, 1), (256, 1), (8, 100))  # concurrent appenders, and events in each call

console = Console()


def random_generation() -> Generation:
    """Return a generation whose items have random codes."""
    codes = np.random.default_rng(0).integers(0, CODEWORDS, (ITEMS, CODEBOOKS), dtype=np.uint8)
    return Generation(b"appended", RATES, CODEWORDS, {str(row): row for row in range(ITEMS)}, codes, {"click": 1.0})


def random_events(count: int, seed: int) -> list[Event]:
    """Return this many clicks of random users on random items, a millisecond apart."""
    random = np.random.default_rng(seed)
    columns = zip(random.integers(0, USERS, count), random.integers(0, ITEMS, count), strict=True)
    return [
        Event(f"{seed}-{n}", f"user{user}", str(item), "click", time_us, time_us)
        for n, (user, item) in enumerate(columns)
        for time_us in [START_US + n * 1000]
    ]


async def append_all(store: SQLiteStore, events: list[Event], at_once: int, batch: int) -> None:
    """Append the events in batches, with `at_once` concurrent calls."""
    calls = iter([events[start : start + batch] for start in range(0, len(events), batch)])

    async def append_next() -> None:
        for call in calls:
            await store.append(TENANT, call)

    await asyncio.gather(*(append_next() for _ in range(at_once)))


async def measure(directory: Path, events: int) -> None:
    """Print the events per second of each load, on a store in which nearly every user has a state."""
    store = await SQLiteStore.open(directory, [random_generation()])
    table = Table("at once", "events in each", "events/s", "CPU µs/event")
    await append_all(store, random_events(2 * USERS, seed=0), 1, 500)
    for at_once, batch in LOADS:
        count = events if at_once > 1 else events // 10
        made = random_events(count, seed=1000 * at_once + batch)
        cpu_s, begin_s = time.process_time(), time.perf_counter()
        await append_all(store, made, at_once, batch)
        elapsed_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
        table.add_row(str(at_once), str(batch), f"{count / elapsed_s:,.0f}", f"{cpu_s / count * 1e6:.0f}")
    await store.close()
    console.print(table)


def main(
    events: Annotated[int, typer.Option(min=1_000, help="In each measurement.")] = 10_000,
    directory: Annotated[Path | None, typer.Option(help="Where the data lie meanwhile.")] = None,
) -> None:
    """Measure in a temporary directory."""
    with TemporaryDirectory(dir=directory) as place:
        asyncio.run(measure(Path(place), events))


if __name__ == "__main__":
    typer.run(main)
