"""How many events the embedded store takes by itself, without HTTP: every group synced to disk before it is answered.

python -m benchmarks.appends
python -m benchmarks.appends --directory /mnt/disk       # the disk that is to be measured
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.redis_fold import TENANT, make_events, make_generation
from storage.sqlite import SQLiteStore

USERS = 1_000
LOADS = ((1, 1), (64, 1), (256, 1), (8, 100))  # appenders at once, and events in each call

console = Console()


async def measure(directory: Path, events: int) -> None:
    store = await SQLiteStore.open(directory, [make_generation()])
    table = Table("at once", "events in each", "events/s", "CPU µs/event")
    for start in range(0, 2 * USERS, 500):  # every user has a state
        await store.append(TENANT, make_events(2 * USERS, USERS, seed=0)[start : start + 500])
    for at_once, batch in LOADS:
        count = events if at_once > 1 else events // 10
        made = make_events(count, USERS, seed=1000 * at_once + batch)
        calls = iter([made[start : start + batch] for start in range(0, count, batch)])

        async def append(calls=calls) -> None:  # type: ignore[no-untyped-def]
            for call in calls:
                await store.append(TENANT, call)

        cpu_s, begin_s = time.process_time(), time.perf_counter()
        await asyncio.gather(*(append() for _ in range(at_once)))
        elapsed_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
        table.add_row(str(at_once), str(batch), f"{count / elapsed_s:,.0f}", f"{cpu_s / count * 1e6:.0f}")
    await store.close()
    console.print(table)


def main(
    events: Annotated[int, typer.Option(min=1_000, help="In each measurement.")] = 10_000,
    directory: Annotated[Path | None, typer.Option(help="Where the data lie meanwhile.")] = None,
) -> None:
    with TemporaryDirectory(dir=directory) as place:
        asyncio.run(measure(Path(place), events))


if __name__ == "__main__":
    typer.run(main)
