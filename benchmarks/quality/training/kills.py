"""Kill trainings with kill -9 at random moments, resume them, and compare the models with undisturbed ones.

There are three ways to train: `lisarec train`; two processes with the environment that torchrun sets; and two processes
of torchrun. Of two processes, one is killed. In the first two ways the processes are forks of one that has imported
everything, so that they spend most of their time training. Whenever a training starts or resumes, a moment is drawn
from the processor time of an undisturbed training. The model of a completed training is compared, and the next one
starts. Exits with 1 if a model differs in a single byte.

    python -m benchmarks.quality.training.kills
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Protocol

import torch
import typer
from rich.console import Console
from rich.table import Table

from app.jobs.datasets.synthetic_shop import generate
from benchmarks.harness.compose import ROOT
from benchmarks.harness.training_workers import POLL_S, ForkedTraining, Worker
from benchmarks.machine import cpu, load_averages
from model.artifact import model_directory
from model.training.distributed.ending import ENDED
from model.training.loop import LAST_CHECKPOINT

COMPARED = (model_directory.WEIGHTS, model_directory.CONFIG, model_directory.ITEMS)

console = Console(width=140, highlight=False)


class RunningTraining(Protocol):
    """A training in one or more processes."""

    log: Path
    workers: list[Worker]

    def wait(self) -> None:
        """Wait until it has ended; raise RuntimeError if it has failed."""

    def end_others(self) -> None:
        """End the remaining processes after one was killed."""


class TorchrunTraining:
    """The same command in torchrun, which ends the other process when one is killed."""

    def __init__(self, options: Sequence[str], folder: Path, count: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log.txt"
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "--max-restarts=0"]
        with self.log.open("ab") as log:
            self._torchrun = subprocess.Popen(
                [*command, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m", "app", "train", *options],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self.workers = self._started(count)

    def _started(self, count: int) -> list[Worker]:
        children = Path(f"/proc/{self._torchrun.pid}/task/{self._torchrun.pid}/children")
        while len(found := children.read_text().split()) < count:
            if self._torchrun.poll() is not None:
                raise RuntimeError(f"torchrun failed: {self.log.read_text()[-2000:]}")
            time.sleep(POLL_S)
        return [Worker(int(pid)) for pid in found[:count]]

    def wait(self) -> None:
        """Wait until it has ended; raise RuntimeError if it has failed."""
        while self._torchrun.poll() is None:
            for worker in self.workers:
                worker.is_running()
            time.sleep(POLL_S)
        if self._torchrun.returncode:
            raise RuntimeError(f"torchrun failed: {self.log.read_text()[-2000:]}")

    def end_others(self) -> None:
        """Wait until torchrun has ended the remaining processes and itself."""
        self._torchrun.wait()


@dataclass
class Outcome:
    """The results of all trainings of one way.

    before    kills before a checkpoint was written
    telling   kills after which another process logged why it ends too
    """

    kills: int = 0
    before: int = 0
    telling: int = 0
    trainings: int = 0
    different: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Way:
    """A way to train, and the folder of its models."""

    name: str
    count: int
    is_torchrun: bool
    options: Sequence[str]
    folder: Path

    def start(self, name: str) -> RunningTraining:
        """Start or resume the training of this name."""
        out = self.folder / name
        resume = ["--resume"] if (out / LAST_CHECKPOINT).exists() else []
        options = [*self.options, "--out", str(out), *resume]
        logs = self.folder / f"{name}-logs"
        if self.is_torchrun:
            return TorchrunTraining(options, logs, self.count)
        return ForkedTraining(options, logs, self.count)

    def is_done(self, name: str) -> bool:
        """Return whether the training of this name has written its model, even if it was killed then."""
        return model_directory.exists(self.folder / name)

    def content(self, name: str) -> dict[str, bytes]:
        """Return the files of the model that are equal in equal trainings."""
        return {file: (self.folder / name / file).read_bytes() for file in COMPARED}


def disturb(way: Way, kills: int, rng: random.Random) -> Outcome:
    """Kill trainings this often, and compare all that complete."""
    undisturbed = way.start("undisturbed")
    undisturbed.wait()
    needed_s = [worker.cpu_s for worker in undisturbed.workers]
    console.print(f"{way.name}: undisturbed in {', '.join(f'{one:.1f}' for one in needed_s)} s of processor time")
    expected = way.content("undisturbed")
    outcome, name, begin_s = Outcome(), "", time.monotonic()
    while outcome.kills < kills or name:
        if not name:
            outcome.trainings += 1
            name = f"training-{outcome.trainings}"
        victim = rng.randrange(way.count)
        moment_s = rng.uniform(0, needed_s[victim]) if outcome.kills < kills else float("inf")
        if kill_after(way.start(name), victim, moment_s, outcome):
            outcome.before += not (way.folder / name / LAST_CHECKPOINT).exists() and not way.is_done(name)
        if way.is_done(name):
            found = way.content(name)
            outcome.different += [f"{name}/{file}" for file in COMPARED if found[file] != expected[file]]
            console.print(f"{way.name}: {outcome.kills} kills, {outcome.trainings} trainings, {outcome.different}")
            shutil.rmtree(way.folder / name)
            name = ""
    outcome.seconds = time.monotonic() - begin_s
    return outcome


def kill_after(training: RunningTraining, victim: int, moment_s: float, outcome: Outcome) -> bool:
    """Kill one of the training's processes after this much processor time; return False if the training ends first."""
    worker = training.workers[victim]
    while worker.is_running():
        if worker.cpu_s >= moment_s:
            worker.send(signal.SIGKILL)
            said = training.log.read_text().count(ENDED)
            training.end_others()
            outcome.kills += 1
            outcome.telling += training.log.read_text().count(ENDED) > said
            return True
        time.sleep(POLL_S)
    training.wait()
    return False


def table_of(outcomes: dict[str, Outcome]) -> Table:
    """Return a row for each way."""
    columns = ("way", "kills", "before the first checkpoint", "others said why they end", "trainings", "other bytes")
    table = Table(*columns, "s a kill")
    for name, one in outcomes.items():
        numbers = (one.kills, one.before, one.telling, one.trainings, len(one.different))
        table.add_row(name, *map(str, numbers), f"{one.seconds / max(one.kills, 1):.1f}")
    return table


def main(
    alone: Annotated[int, typer.Option(min=0, help="Kills of a training in one process.")] = 25,
    together: Annotated[int, typer.Option(min=0, help="Kills of one of two processes.")] = 20,
    torchrun: Annotated[int, typer.Option(min=0, help="Kills of one of two processes of torchrun.")] = 5,
    data: Annotated[Path | None, typer.Option(help="Data directory, instead of a made-up shop.")] = None,
    shoppers: Annotated[int, typer.Option(min=1, help="Of the made-up shop.")] = 150,
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    seed: int = 0,
) -> None:
    """Print how often trainings were killed, and whether their models equal the undisturbed ones."""
    outcomes: dict[str, Outcome] = {}
    with TemporaryDirectory() as folder:
        work, rng = Path(folder), random.Random(seed)
        if data is None:
            data = work / "shop"
            data.mkdir()
            generate(data, shoppers=shoppers)
        options = ["--data", str(data.absolute()), "--epochs", str(epochs)]
        ways = [("one process", alone, 1), ("two processes", together, 2), ("torchrun", torchrun, 2)]
        for name, kills, count in ways:
            if kills:
                way = Way(name, count, name == "torchrun", options, work / name.replace(" ", "-"))
                outcomes[name] = disturb(way, kills, rng)
    console.print(table_of(outcomes))
    console.print(f"{os.cpu_count()} cores, {cpu()}, load averages {load_averages()}, torch {torch.__version__}")
    if any(one.different for one in outcomes.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
