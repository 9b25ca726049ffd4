"""Time trainings with one thread and with several, alone and next to processes that compete for the same cores.

Each training is a process, `lisarec train`, on a synthetic shop of 2,000 items, 3,000 users and some 60,000 events, or
on the given data directories. The ways to train take turns, so that other load on the machine affects all of them.
Passive waiting is OpenMP's OMP_WAIT_POLICY: waiting threads sleep instead of spinning.

    python -m benchmarks.quality.training.threads
    python -m benchmarks.quality.training.threads --data $LISAREC_DATA/online-retail --protocol temporal --repeats 1
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import numpy as np
import polars as pl
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness.compose import ROOT
from benchmarks.machine import cpu, load_averages
from model.artifact.model_directory import METRICS, WEIGHTS
from model.config import Protocol

MEAN_EVENTS = 20
FOLLOWS = 0.6  # share of events on the item that follows the previous one in the sequence
POLICIES = {"active": None, "passive": "PASSIVE"}
BUSY = "while True: pass"

console = Console(width=160)


class Way(NamedTuple):
    """One way to train; the waiting policy matters only with several threads."""

    data: Path
    threads: int
    waiting: str
    busy: int


@dataclass
class Timings:
    """Seconds and results of the trainings of one way; quality is NDCG@10 on validation."""

    epoch_s: list[float] = field(default_factory=list)
    rest_s: list[float] = field(default_factory=list)
    ndcg_at_10: set[float] = field(default_factory=set)
    weights: set[bytes] = field(default_factory=set)


def make_shop(directory: Path, items: int = 2_000, users: int = 3_000) -> Path:
    """Write a shop whose items are popular by Zipf's law and follow each other in one long sequence."""
    rng = np.random.default_rng(0)
    lengths = rng.poisson(MEAN_EVENTS - 3, users) + 3
    popular = 1 / np.arange(1, items + 1)
    item = rng.permutation(items)[rng.choice(items, lengths.sum(), p=popular / popular.sum())]
    follows = rng.random(len(item)) < FOLLOWS
    follows[np.cumsum(lengths) - lengths] = False
    for row in np.flatnonzero(follows):
        item[row] = (item[row - 1] + 1) % items
    user = np.repeat(np.arange(users), lengths)
    table = pl.DataFrame({"user_id": user, "item_id": item, "timestamp": np.arange(len(item)) * 60})
    directory.mkdir(parents=True)
    table.write_parquet(directory / "interactions.parquet")
    return directory


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run this many processes that compute without end."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def train(way: Way, out: Path, options: Sequence[str]) -> Timings:
    """Train once in this way, in a new process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    if policy := POLICIES[way.waiting]:
        environment["OMP_WAIT_POLICY"] = policy
    command = [sys.executable, "-m", "app", "train", "--data", str(way.data), "--out", str(out)]
    command += ["--threads", str(way.threads), *options]
    with busy_processes(way.busy):
        begin_s = time.perf_counter()
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        whole_s = time.perf_counter() - begin_s
    epochs = json.loads((out / METRICS).read_text())["epochs"]
    epoch_s = [epoch["elapsed_s"] for epoch in epochs]
    return Timings(epoch_s, [whole_s - sum(epoch_s)], {epochs[-1]["ndcg_at_10"] or 0.0}, {(out / WEIGHTS).read_bytes()})


def measure(ways: Sequence[Way], repeats: int, options: Sequence[str], work: Path) -> dict[Way, Timings]:
    """Train in all ways repeatedly, in turns."""
    found = {way: Timings() for way in ways}
    for repeat, (number, way) in product(range(repeats), enumerate(ways)):
        one = train(way, work / f"model-{repeat}-{number}", options)
        console.print(f"{way.data.name}, {way.threads} threads, {way.waiting}, {way.busy} busy: {one.epoch_s} s")
        all_of_them = found[way]
        all_of_them.epoch_s += one.epoch_s
        all_of_them.rest_s += one.rest_s
        all_of_them.ndcg_at_10 |= one.ndcg_at_10
        all_of_them.weights |= one.weights
    return found


def table_of(found: Mapping[Way, Timings]) -> Table:
    """Return the medians, the range of the epochs, and whether the weights equal those of one thread."""
    columns = ("data", "threads", "waiting", "busy processes", "s an epoch", "range", "s beside the epochs")
    table = Table(*columns, "NDCG@10", "weights")
    with_one = {way.data: timings.weights for way, timings in found.items() if way.threads == 1}
    for way, timings in found.items():
        same = "as with one thread" if timings.weights == with_one.get(way.data) else "others"
        table.add_row(
            way.data.name,
            str(way.threads),
            way.waiting,
            str(way.busy),
            f"{statistics.median(timings.epoch_s):.2f}",
            f"{min(timings.epoch_s):.2f} to {max(timings.epoch_s):.2f}",
            f"{statistics.median(timings.rest_s):.1f}",
            ", ".join(f"{quality:.4f}" for quality in sorted(timings.ndcg_at_10)),
            same,
        )
    return table


def main(
    data: Annotated[list[Path] | None, typer.Option(help="Instead of the made-up shop; repeatable.")] = None,
    threads: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable; default: 1, and all cores.")] = None,
    busy: Annotated[list[int] | None, typer.Option(min=0, help="Repeatable; default: 0, and all cores.")] = None,
    protocol: Protocol = "loo_full",
    epochs: Annotated[int, typer.Option(min=1)] = 2,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Print a table of all ways."""
    cores = len(os.sched_getaffinity(0))
    with TemporaryDirectory() as folder:
        work = Path(folder)
        ways = [
            Way(one, count, waiting, others)
            for one in data or [make_shop(work / "shop")]
            for others in busy or (0, cores)
            for count in threads or (1, cores)
            for waiting in (POLICIES if count > 1 else ("active",))
        ]
        found = measure(ways, repeats, ["--epochs", str(epochs), "--protocol", protocol], work)
    console.print(table_of(found))
    console.print(
        f"{cores} cores, {cpu()}, load averages {load_averages()}, "
        f"torch {torch.__version__}; {repeats} trainings of {epochs} epochs in each way, medians"
    )


if __name__ == "__main__":
    typer.run(main)
