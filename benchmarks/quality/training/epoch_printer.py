"""Prints a line for each epoch of a training."""

from rich.console import Console

from model.training.loop import EpochReport


class EpochPrinter:
    """The progress of a training that prints only epochs."""

    def __init__(self, name: str, console: Console) -> None:
        self._name, self._console = name, console

    def stage(self, name: str) -> None:
        """Do nothing at a stage."""

    def batch(self, epoch: int, share: float, loss: float, events: int) -> None:
        """Do nothing at a batch."""

    def epoch(self, report: EpochReport) -> None:
        """Print the quality and the time of the epoch."""
        quality = report.ndcg_at_10 or 0.0
        self._console.print(f"{self._name}: epoch {report.epoch + 1}, {quality:.4f}, {report.elapsed_s:.0f} s")
