"""Train once in a new process, and measure time, memory and disk space of each phase.

Memory is the peak of the resident set. Disk space is that of the files in the model's folder that the process has open.
With --share the training ends after this share of the first epoch; times are not extrapolated.

    python -m benchmarks.quality.training.memory --data runs/ml-10m --memory 3GiB --share 0.02
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.table import Table

from app.cli.options import MemoryOption
from benchmarks.harness.compose import ROOT
from benchmarks.machine import cpu, load_averages, memory_bytes
from model.config import Config, DataCard, Protocol, preset
from model.training.loop import Progress
from model.training.memory import MIB, Resources
from model.training.threads import use_threads
from model.training.train import train

SAMPLE_EVERY_S = 0.1
BYTES_OF_A_BLOCK = 512  # the unit of st_blocks
RESET_PEAK = "5"  # to /proc/self/clear_refs

console = Console(width=140)


class EnoughError(Exception):
    """The requested share of the epoch is complete."""


@dataclass
class Phase:
    """The resources of a training between two stages that it reports."""

    name: str
    seconds: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    file_bytes: int = 0


class PhaseRecorder(Progress):
    """The progress of a training, which measures the process that trains."""

    def __init__(self, folder: Path, share: float) -> None:
        self.phases: list[Phase] = []
        self.events = 0
        self.epoch_share = 0.0
        self._folder, self._share = str(folder.resolve()), share
        self._begin_s, self._begin_cpu_s = time.monotonic(), time.process_time()
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_phase()
        self._ended.set()
        self._sampler.join()

    def stage(self, name: str) -> None:
        """Begin a phase, unless it is the current one."""
        name = name.partition(", ")[0]
        if self.phases and self.phases[-1].name == name:
            return
        self._end_phase()
        self.phases.append(Phase(name))

    def batch(self, epoch: int, share: float, loss: float, events: int) -> None:
        """Record the progress of the epoch; raise EnoughError if it has reached the requested share."""
        self.stage(f"epoch {epoch + 1}")
        self.epoch_share = share
        if share >= self._share:
            raise EnoughError

    def set_config(self, config: Config) -> None:
        """Record the number of events."""
        self.events = config.data.events

    def _end_phase(self) -> None:
        now_s, cpu_s = time.monotonic(), time.process_time()
        if self.phases:
            self.phases[-1].seconds += now_s - self._begin_s
            self.phases[-1].cpu_s += cpu_s - self._begin_cpu_s
            self.phases[-1].peak_bytes = memory_bytes("VmHWM")
        self._begin_s, self._begin_cpu_s = now_s, cpu_s
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_S):
            if self.phases:
                phase = self.phases[-1]
                phase.file_bytes = max(phase.file_bytes, _mapped_file_bytes(self._folder))


def _mapped_file_bytes(folder: str) -> int:
    """Return the disk space of the files in the folder that this process has open."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(one).startswith(folder):
                found += one.stat().st_blocks * BYTES_OF_A_BLOCK
        except OSError:  # closed in the meantime
            continue
    return found


@dataclass(frozen=True)
class TrainingRun:
    """The training, and its memory limit.

    events_per_user  that an epoch learns from, at most
    """

    data: str
    protocol: Protocol
    epochs: int
    share: float
    memory: int | None
    events_per_user: int | None = None

    def measure(self, out: Path) -> dict[str, Any]:
        """Train in this process, and return the measurements."""
        use_threads()
        shape, training = preset("lisa-mini")
        card = DataCard(split="temporal" if self.protocol == "temporal" else "loo")
        changes = {"epochs": self.epochs, "events_per_user": self.events_per_user}
        config = Config(model=shape, training=training.model_copy(update=changes), data=card)
        quality = None
        with PhaseRecorder(out, self.share) as recorder:
            try:
                made = train(
                    Path(self.data),
                    out,
                    config,
                    resources=Resources(memory=self.memory),
                    progress=recorder,
                    on_config=recorder.set_config,
                )
                quality = made.metrics["epochs"][-1]["ndcg_at_10"]
            except EnoughError:
                pass
        phases = [asdict(phase) for phase in recorder.phases]
        share = recorder.epoch_share if self.share <= 1 else 1.0
        return {"events": recorder.events, "epoch_share": share, "ndcg_at_10": quality, "phases": phases}


def measure(run: TrainingRun) -> dict[str, Any]:
    """Train in a new process, and return the measurements."""
    with TemporaryDirectory(dir=Path(run.data).parent) as scratch:
        return train_apart(run, Path(scratch) / "model")


def train_apart(run: TrainingRun, out: Path) -> dict[str, Any]:
    """Train a model in a new process, and return the measurements."""
    result = out.with_suffix(".json")
    command = [sys.executable, "-m", "benchmarks.quality.training.memory", "--data", run.data]
    here = json.dumps([asdict(run), str(out), str(result)])
    subprocess.run([*command, "--here", here], cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def table_of(found: dict[str, Any], whole: int) -> Table:
    """Return the phases, and their totals.

    whole  the limit of the memory in bytes, 0 for none
    """
    events, phases = found["events"], [Phase(**one) for one in found["phases"]]
    title = f"{events:,} events, limit {whole / MIB:,.0f} MiB" if whole else f"{events:,} events, no limit"
    table = Table("phase", "s", "CPU s per million events", "peak, MiB", "files, bytes an event", title=title)
    for phase in [*phases, _sum(phases)]:
        table.add_row(
            phase.name,
            f"{phase.seconds:.1f}",
            f"{phase.cpu_s / events * 1e6:.2f}",
            f"{phase.peak_bytes / MIB:,.0f}",
            f"{phase.file_bytes / events:.1f}",
        )
    return table


def _sum(phases: list[Phase]) -> Phase:
    most = [max(getattr(phase, name) for phase in phases) for name in ("peak_bytes", "file_bytes")]
    seconds, cpu_s = (sum(getattr(phase, name) for phase in phases) for name in ("seconds", "cpu_s"))
    return Phase("all of it", seconds, cpu_s, *most)


def main(
    data: Annotated[Path, typer.Option(help="Data directory to train on.")],
    memory: MemoryOption = None,
    protocol: Protocol = "loo_full",
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    share: Annotated[
        float, typer.Option(min=0, help="Of the first epoch, and no more; above 1: train to the end.")
    ] = 2,
    events_per_user: Annotated[int | None, typer.Option(min=2, help="That an epoch learns from, at most.")] = None,
    here: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print the resources of each phase."""
    if here is not None:
        fields, out, result = json.loads(here)
        Path(result).write_text(json.dumps(TrainingRun(**fields).measure(Path(out))))
        return
    found = measure(TrainingRun(str(data.resolve()), protocol, epochs, share, memory, events_per_user))
    console.print(table_of(found, memory or 0))
    console.print(f"{found['epoch_share']:.1%} of the last epoch; NDCG@10 on validation {found['ndcg_at_10']}")
    console.print(f"{cpu()}, load averages {load_averages()}")


if __name__ == "__main__":
    typer.run(main)
