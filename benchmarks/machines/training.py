"""Measure a training by one process and by several: events a second in an epoch, and how efficient more of them are.

Every process computes with one thread. All numbers of processes make the same steps of the same batches, on all events,
so that no epoch ends with a validation. Trainings take turns, so that what else the machine does meets all of them.

With --apart each process is on a host of its own, as in `benchmarks.machines.run`: a network namespace, from which a
frame takes a millisecond to the others, and one in a thousand is lost. A switch in Python passes frames on and takes
processor time for it, so this shows what delay costs, and nothing of a network's bandwidth. It needs root, or user
namespaces.

    python -m benchmarks.machines.training --data $LISAREC_DATA/ml-1m --epochs 2
    python -m benchmarks.machines.training --apart
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from app.jobs.datasets.synthetic_shop import generate
from benchmarks.harness.training_workers import LOOPBACK, ForkedTraining
from benchmarks.machine import cpu, load_averages
from benchmarks.machines.network import Network, enter, what_is_missing
from model.artifact.model_directory import CONFIG, METRICS

console = Console(width=140, highlight=False)


@dataclass
class Timings:
    """Seconds of the trainings with one number of processes.

    rest_s  beside the epochs: reading, preparing and writing, which the first process does
    loss    of the last epoch, of each training
    """

    events: int = 0
    epoch_s: list[float] = field(default_factory=list)
    rest_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)

    @property
    def events_per_s(self) -> float:
        """The rate of the median epoch."""
        return self.events / statistics.median(self.epoch_s)


def train(options: Sequence[str], folder: Path, count: int, network: Network | None, into: Timings) -> None:
    """Train with so many processes, and add what that took."""
    hosts = network.hosts[:count] if network is not None else []
    begin_s = time.perf_counter()
    training = ForkedTraining(
        [*options, "--out", str(folder / "model")],
        folder,
        count,
        networks=[host.namespace for host in hosts],
        address=hosts[0].address if hosts else LOOPBACK,
        environment={"GLOO_SOCKET_IFNAME": "eth0"} if hosts else {},
    )
    training.wait()
    whole_s = time.perf_counter() - begin_s
    epochs = json.loads((folder / "model" / METRICS).read_text())["epochs"]
    epoch_s = [epoch["elapsed_s"] for epoch in epochs]
    into.events = json.loads((folder / "model" / CONFIG).read_text())["data"]["events"]
    into.epoch_s += epoch_s
    into.rest_s.append(whole_s - sum(epoch_s))
    into.cpu_s.append(sum(worker.cpu_s for worker in training.workers))
    into.loss.append(epochs[-1]["loss"])
    console.print(f"{count} processes: epochs of {', '.join(f'{one:.1f}' for one in epoch_s)} s")


def table_of(found: dict[int, Timings]) -> Table:
    """Return a row for each number of processes; efficiency is by the fewest of them."""
    columns = ("processes", "events/s", "efficiency", "s an epoch", "range", "s beside the epochs", "processor time, s")
    table = Table(*columns, "loss")
    fewest = min(found)
    alone = found[fewest].events_per_s / fewest
    for count, one in sorted(found.items()):
        table.add_row(
            str(count),
            f"{one.events_per_s:,.0f}",
            f"{one.events_per_s / (alone * count):.0%}",
            f"{statistics.median(one.epoch_s):.2f}",
            f"{min(one.epoch_s):.2f} to {max(one.epoch_s):.2f}",
            f"{statistics.median(one.rest_s):.1f}",
            f"{statistics.median(one.cpu_s):.1f}",
            f"{statistics.median(one.loss):.4f}",
        )
    return table


def measure(data: Path | None, counts: Sequence[int], epochs: int, repeats: int, network: Network | None) -> None:
    """Train in turns, and print a table."""
    found = {count: Timings() for count in counts}
    with TemporaryDirectory() as folder:
        work = Path(folder)
        if data is None:
            data = work / "shop"
            data.mkdir()
            generate(data)
        options = ["--data", str(data), "--epochs", str(epochs), "--train-on", "all"]
        for repeat, count in product(range(repeats), counts):
            train(options, work / f"{repeat}-{count}", count, network, found[count])
    console.print(table_of(found))
    events = found[counts[0]].events
    where = "hosts of their own, 1 ms apart" if network is not None else "one machine"
    console.print(
        f"{events:,} events, {where}; {os.cpu_count()} cores, {cpu()}, load averages {load_averages()}; "
        f"torch {torch.__version__}; {repeats} trainings of {epochs} epochs with each number of processes, medians"
    )


def main(
    data: Annotated[Path | None, typer.Option(help="Data directory, instead of a made-up shop.")] = None,
    processes: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable; default: 1 and 2.")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    apart: Annotated[bool, typer.Option("--apart", help="Each process on a host of its own.")] = False,
    inside: Annotated[bool, typer.Option(hidden=True, help="Whether namespaces are this process's own.")] = False,
) -> None:
    """Print how fast each number of processes trains."""
    counts = processes or [1, 2]
    if apart and not inside:
        if missing := what_is_missing():
            console.print(f"NOT RUN: {missing}")
            raise typer.Exit(2)
        enter("benchmarks.machines.training", [*sys.argv[1:], "--inside"])
    network = Network(max(counts)) if apart else None
    measure(None if data is None else data.absolute(), counts, epochs, repeats, network)
    if network is not None:
        network.close()


if __name__ == "__main__":
    typer.run(main)
