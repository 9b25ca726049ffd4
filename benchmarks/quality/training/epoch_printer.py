"""Prints a line for each epoch of a training."""

from rich.console import Console

from model.training.loop import EpochReport, Progress


class EpochPrinter(Progress):
    """The progress of a training that prints only epochs."""

    def __init__(self, name: str, console: Console) -> None:
        self._name, self._console = name, console

    def epoch(self, report: EpochReport) -> None:
        """Print the quality and the time of the epoch."""
        quality = report.ndcg_at_10 or 0.0
        self._console.print(f"{self._name}: epoch {report.epoch + 1}, {quality:.4f}, {report.elapsed_s:.0f} s")
