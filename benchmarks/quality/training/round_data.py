"""Prepare the data of a round of retraining from a made-up archive, and measure the peak memory of the process.

Each way runs in a new process: `pieces` as `lisarec retrain` does, `whole` with one table in memory, as it did before.
Exit status 1 where the files for the trainings differ, or where the memory of `pieces` grows with the events by more
than a quarter of what that of `whole` does.

    python -m benchmarks.quality.training.round_data --events 1000000 --events 10000000
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import numpy as np
import polars as pl
import typer
from rich.console import Console
from rich.table import Table

from app.jobs.retraining.round_data import COLUMNS, RoundData
from benchmarks.harness.compose import ROOT
from benchmarks.machine import cpu, load_averages, memory_bytes
from model.config import EVENT_WEIGHTS
from model.data.table import write_parquet
from model.evaluation.holdout_comparison import mark_for_comparison, split_for_comparison
from storage.archive.item_events import events_on_items
from storage.archive.manifest import COLUMNS as ARCHIVE_COLUMNS
from storage.archive.manifest import MANIFEST, ArchiveFile, Manifest
from storage.archive.pieces import ROW_GROUP
from storage.archive.training_events import COLUMNS as EVENT_COLUMNS
from storage.archive.training_events import TrainingEvents
from storage.folders.local_folder import LocalFolder

Way = Literal["pieces", "whole"]
WAYS: tuple[Way, ...] = ("pieces", "whole")
DAYS = 30
FIRST_DAY = datetime(2026, 9, 1, tzinfo=UTC)
EVENTS_PER_USER = 100
ITEMS = 20_000
PARTITIONS = 64
GROWTH_SHARE = 0.25
MIB = 1 << 20
COMPARED_ROWS = 1_000_000

console = Console(width=140)


def write_archive(folder: Path, events: int) -> None:
    """Write an archive of that many events, one file a day."""
    rng = np.random.default_rng(0)
    files = []
    for number, rows in enumerate(np.diff(np.linspace(0, events, DAYS + 1).astype(int)).tolist()):
        at = FIRST_DAY + timedelta(days=number)
        day = at.strftime("%Y-%m-%d")
        file = ArchiveFile(f"tenant=main/day={day}/{number:08}.parquet", "main", day, rows)
        path = folder / file.path
        path.parent.mkdir(parents=True)
        first = int(at.timestamp() * 1000)
        frame = _day(rng, rows, max(1, events // EVENTS_PER_USER), first, number * (events // DAYS + 1))
        frame.write_parquet(path, row_group_size=ROW_GROUP)
        files.append(file)
    (folder / MANIFEST).write_text(Manifest("made-up", {}, DAYS, tuple(files)).to_json())


def _day(rng: np.random.Generator, rows: int, users: int, first_ms: int, first_seq: int) -> pl.DataFrame:
    """Make the events of a day, sorted like a file of an archive."""
    user, item = rng.integers(users, size=rows), np.minimum(rng.zipf(1.3, rows), ITEMS)
    times_ms = first_ms + np.sort(rng.integers(86_400_000, size=rows))
    frame = pl.DataFrame({"user": user, "item": item, "logged_ms": times_ms, "seq": first_seq + np.arange(rows)})
    made = frame.with_columns(
        partition=pl.col("user") % PARTITIONS,
        kind=pl.lit("event"),
        user_id=pl.format("user-{}", "user"),
        item_id=pl.format("item-{}", "item"),
        event_id=pl.format("event-{}", "seq"),
        type=pl.lit("click"),
        timestamp_us=pl.col("logged_ms") * 1000,
    )
    others = [pl.lit(None).alias(name) for name in ARCHIVE_COLUMNS if name not in made.columns]
    return made.with_columns(*others).select(*ARCHIVE_COLUMNS).cast(pl.Schema(ARCHIVE_COLUMNS)).sort("user_id", "seq")


def prepare(way: Way, archive: Path, out: Path) -> dict[str, Any]:
    """Prepare the data in this process; return seconds, and MiB of memory before and at the peak."""
    before, begin_s = memory_bytes("VmHWM") / MIB, time.monotonic()
    data = RoundData(out)
    if way == "pieces":
        data.read(TrainingEvents(archive, "main"), sys.maxsize, EVENT_WEIGHTS)
        past, holdout = data.split(0)
        data.write_directories(past, LocalFolder(archive), [""], {})
    else:
        log = pl.scan_parquet(sorted(archive.glob("tenant=main/*/*.parquet")), hive_partitioning=False)
        found = events_on_items(log).sort("user_id", "timestamp_us", "seq").select(*EVENT_COLUMNS).collect()
        events = found.filter(pl.col("type").is_in([kind for kind, weight in EVENT_WEIGHTS.items() if weight > 0]))
        marked = mark_for_comparison(events)
        past, holdout = split_for_comparison(marked.lazy(), 0)
        for name, some in (("past", past.collect()), ("all", events)):
            data.directory(name).mkdir(parents=True)
            table = some.select(*COLUMNS, timestamp=pl.col("timestamp_us") / 1e6)
            write_parquet(table, data.directory(name) / "interactions.parquet")
    return {
        "before": before,
        "peak": memory_bytes("VmHWM") / MIB,
        "seconds": time.monotonic() - begin_s,
        "held_out": len(holdout),
    }


def prepare_apart(way: Way, archive: Path, out: Path) -> dict[str, Any]:
    """Prepare the data in a new process, and return what it measured."""
    here = json.dumps([way, str(archive), str(out)])
    command = [sys.executable, "-m", "benchmarks.quality.training.round_data", "--here", here]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def are_same(one: Path, other: Path) -> bool:
    """Return whether two Parquet files have the same rows in the same order."""
    tables = [pl.scan_parquet(path) for path in (one, other)]
    rows, others = (table.select(pl.len()).collect().item() for table in tables)
    pieces = (
        [table.slice(begin, COMPARED_ROWS).collect() for table in tables] for begin in range(0, rows, COMPARED_ROWS)
    )
    return bool(rows == others and all(first.equals(second) for first, second in pieces))


def measure(events: int, scratch: Path) -> tuple[dict[Way, dict[str, Any]], bool]:
    """Prepare a round of this many events in both ways; also return whether the results are the same."""
    archive = scratch / "archive"
    write_archive(archive, events)
    found = {way: prepare_apart(way, archive, scratch / way) for way in WAYS}
    files = [f"{name}/data/interactions.parquet" for name in ("past", "all")]
    same = all(are_same(*(scratch / way / file for way in WAYS)) for file in files)
    return found, same and found["pieces"]["held_out"] == found["whole"]["held_out"]


def main(
    events: Annotated[list[int] | None, typer.Option(min=1, help="Number of events; repeatable.")] = None,
    scratch: Annotated[Path | None, typer.Option(help="Folder of the made-up archives, on a disk.")] = None,
    here: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print memory and time of both ways."""
    if here is not None:
        way, archive, out = json.loads(here)
        sys.stdout.write(json.dumps(prepare(way, Path(archive), Path(out))))
        return
    table = Table("events", "way", "s", "before, MiB", "peak, MiB", "growth, MiB")
    growths: dict[Way, list[float]] = {way: [] for way in WAYS}
    all_same = True
    for count in events or [1_000_000, 10_000_000]:
        with TemporaryDirectory(dir=scratch, prefix="lisarec-round-") as folder:
            found, same = measure(count, Path(folder))
        all_same &= same
        for way, one in found.items():
            growths[way].append(one["peak"] - one["before"])
            numbers = (f"{one['seconds']:.1f}", *(f"{one[name]:,.0f}" for name in ("before", "peak")))
            table.add_row(f"{count:,}", way, *numbers, f"{growths[way][-1]:,.0f}")
    console.print(table)
    console.print("the files are the same" if all_same else "THE FILES DIFFER")
    console.print(f"{cpu()}, load averages {load_averages()}")
    grown = {way: of_way[-1] - of_way[0] for way, of_way in growths.items()}
    raise typer.Exit(not all_same or grown["pieces"] > max(0, GROWTH_SHARE * grown["whole"]))


if __name__ == "__main__":
    typer.run(main)
