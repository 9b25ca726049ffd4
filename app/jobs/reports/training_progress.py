"""The progress of a training: a bar for the whole training, and a line for every epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.text import Text
from typing_extensions import override

from app.jobs.reports.job_progress import JobProgress, RateColumn, ShareColumn, TimeLeftColumn
from app.jobs.reports.phase_times import MIB, PhaseTimes
from model.artifact import model_directory
from model.training.loop import LAST_CHECKPOINT, EpochReport, Progress
from model.training.memory import resident_bytes

EPOCHS = "epochs"
PHASES = {  # by the first word of a stage
    "reading": "reading",
    "sorting": "reading",
    "counting": "preparing",
    "computing": "preparing",
    "validating": "validating",
    "choosing": "choosing",
    "writing": "writing",
}


class MemoryColumn(ProgressColumn):
    """The current memory of this process."""

    @override
    def render(self, task: Task) -> Text:
        return Text(f"{resident_bytes() / MIB:,.0f} MiB")


class TrainingProgress(Progress):
    """A context manager that shows the stage, the progress, the time left, the rate and the memory of a training.

    The time left is that until the last epoch; early stopping ends a training sooner. A successful training prints the
    duration of each phase.

    phases  the durations of the training's phases

    patience  the number of epochs without an improvement on validation after which training stops
    """

    def __init__(
        self, epochs: int, patience: int, console: Console, get_time: Callable[[], float] | None = None
    ) -> None:
        self._epochs = epochs
        self._patience = patience
        self._ended = 0  # the last epoch that was finished in this run
        name, left = TextColumn("{task.description}", markup=False), (ShareColumn(), TimeLeftColumn())
        columns = name, BarColumn(), *left, RateColumn("events"), MemoryColumn()
        self._bar = JobProgress(*columns, console=console, is_transient=True, get_time=get_time)
        self._task = self._bar.add_task("preparing", start=False, total=epochs)
        self._has_begun = False
        self.phases = PhaseTimes() if get_time is None else PhaseTimes(get_time)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.phases.end()
        if kind is None and 0 < self._ended < self._epochs:
            epochs = f"{self._patience} epochs" if self._patience > 1 else "an epoch"
            self._bar.say(f"stopped early after epoch {self._ended}: no improvement on validation for {epochs}")
        if kind is None and self.phases.seconds:
            self._bar.say(f"time: {self.phases}")
        self._bar.stop()

    def break_silence(self) -> None:
        """Print the progress if the output is not a terminal and had no line for a while."""
        self._bar.break_silence()

    def stage(self, name: str) -> None:
        """Show a stage of the training other than the epochs."""
        self.phases.begin(PHASES.get(name.split()[0], name))
        self._bar.update(self._task, description=name)

    def batch(self, epoch: int, share: float, loss: float, events: int) -> None:
        """Show the progress of the epoch."""
        self.phases.begin(EPOCHS)
        completed = epoch + share
        if not self._has_begun:  # a resumed training has completed some epochs before
            self._has_begun = True
            self._bar.update(self._task, done_before=completed, each=events)
            self._bar.start_task(self._task)
        description = f"epoch {epoch + 1} of {self._epochs}, loss {loss:.3f}"
        self._bar.update(self._task, completed=completed, description=description)

    def epoch(self, report: EpochReport) -> None:
        """Print the line of a finished epoch."""
        self._ended = report.epoch + 1
        validation = ""
        if report.ndcg_at_10 is not None and report.hr_at_10 is not None:
            validation = f", validation HR@10 {report.hr_at_10:.4f} NDCG@10 {report.ndcg_at_10:.4f}"
        if report.lift is not None:
            validation += f" with lift {report.lift['strength']:g}"
        epoch = f"epoch {report.epoch + 1} of {self._epochs}"
        self._bar.say(f"{epoch}: loss {report.loss:.4f}{validation} ({report.elapsed_s:.0f} s)")


def after_interruption(out: Path) -> str:
    """Return a line that says how to go on with an interrupted training in this directory."""
    if model_directory.exists(out):
        return "interrupted after the model was complete"
    if (out / LAST_CHECKPOINT).exists():
        return "interrupted. To continue after the last complete epoch, run the same command with --resume"
    return "interrupted before the first epoch was complete. To start again, run the same command"
