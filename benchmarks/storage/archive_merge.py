"""Measure the memory of the archiver while it merges the files of a day, and while it erases a user from the result.

python -m benchmarks.storage.archive_merge --rows 5000000
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, TypeVar, get_args

import typer
from rich.console import Console
from rich.table import Table
from uuid_utils import uuid7

from benchmarks.machine import cpu, memory_bytes
from storage.archive.writer import ArchiveWriter, ErasureEntry, EventEntry
from storage.archiver.archiver import MAX_ROWS
from storage.state.event import IMPRESSION, Event, digest

Day = Literal["views", "impressions", "one user"]
USERS, ITEMS, SHOWN = 500_000, 50_000, 20
LOGGED_MS = 1_790_000_000_000
ERASED = ErasureEntry("main", 0, 2**62, digest("visitor-000007"))
MIB = 2**20

T = TypeVar("T")

console = Console()


def entries(day: Day, first: int, count: int) -> Iterator[EventEntry]:
    """Yield entries of a day: views, lists of items that were shown, or views of which one user has half."""
    rng = random.Random(first)
    for seq in range(first, first + count):
        user_id = f"visitor-{0 if day == 'one user' and seq % 2 else rng.randrange(USERS):06}"
        event = Event(str(uuid7()), user_id, f"item-{rng.randrange(ITEMS)}", "view", (LOGGED_MS + seq) * 1000, None)
        if day == "impressions":
            shown = tuple(f"item-{rng.randrange(ITEMS)}" for _ in range(SHOWN))
            event = replace(event, item_id="", type=IMPRESSION, items=shown)
        yield EventEntry("main", 0, seq, LOGGED_MS, event)


def fill(directory: Path, day: Day, rows: int) -> None:
    """Write the rows as the archiver does before it merges files."""
    with ArchiveWriter.open(directory) as writer:
        for first in range(1, rows + 1, MAX_ROWS):
            count = min(MAX_ROWS, rows + 1 - first)
            writer.commit(entries(day, first, count), {0: f"{first + count - 1}-1"})


def merge(directory: Path) -> tuple[float, float, int]:
    """Merge the files; return the peak of the memory in MiB, the seconds, and the number of files that are left."""
    begin_s = time.monotonic()
    with ArchiveWriter.open(directory) as writer:
        writer.compact(today="9999-12-31")
        return memory_bytes("VmHWM") / MIB, time.monotonic() - begin_s, len(writer.manifest.files)


def erase(directory: Path) -> tuple[float, float, int]:
    """Erase a user from the files; return what `merge` does."""
    begin_s = time.monotonic()
    with ArchiveWriter.open(directory) as writer:
        writer.commit([ERASED], {0: "erased-1"})
        return memory_bytes("VmHWM") / MIB, time.monotonic() - begin_s, len(writer.manifest.files)


def in_new_process(work: Callable[[], T]) -> T:
    """Return what the work returns in a process that has done nothing before."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(work).result()


def main(rows: Annotated[int, typer.Option(help="Events of the day.")] = 5_000_000) -> None:
    """Print the peaks for days of different events."""
    table = Table("day", "bytes a row", "files", "merge, MiB", "s", "erase, MiB", "s")
    for day in get_args(Day):
        with TemporaryDirectory() as directory:
            archive = Path(directory)
            in_new_process(partial(fill, archive, day, rows))
            merged_mib, merge_s, files = in_new_process(partial(merge, archive))
            size = sum(path.stat().st_size for path in archive.rglob("tenant=*/*/*"))
            erased_mib, erase_s, _ = in_new_process(partial(erase, archive))
        numbers = (size / rows, files, merged_mib, merge_s, erased_mib, erase_s)
        table.add_row(day, *(f"{number:,.0f}" for number in numbers))
    console.print(f"{rows:,} events, {cpu()}", table)


if __name__ == "__main__":
    typer.run(main)
