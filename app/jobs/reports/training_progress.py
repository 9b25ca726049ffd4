"""The progress of a training, on a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from model.training.loop import EpochReport


class TrainingProgress:
    """A context manager that shows a bar for the whole training and a line for every epoch."""

    def __init__(self, epochs: int, console: Console) -> None:
        self._epochs = epochs
        self._console = console
        columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("preparing", total=epochs)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def batch(self, epoch: int, share: float, loss: float) -> None:
        """Show how far the epoch is."""
        description = f"epoch {epoch + 1} of {self._epochs}, loss {loss:.3f}"
        self._bar.update(self._task, completed=epoch + share, description=description)

    def epoch(self, report: EpochReport) -> None:
        """Print the line of an epoch that has ended."""
        validation = ""
        if report.ndcg_at_10 is not None and report.hr_at_10 is not None:
            validation = f", validation HR@10 {report.hr_at_10:.4f} NDCG@10 {report.ndcg_at_10:.4f}"
        line = f"epoch {report.epoch + 1}: loss {report.loss:.4f}{validation} ({report.elapsed_s:.0f} s)"
        self._console.print(line, highlight=False, soft_wrap=True)
