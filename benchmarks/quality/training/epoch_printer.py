"""A line for each epoch of a training."""

from rich.console import Console

from model.training.loop import EpochReport


class EpochPrinter:
    """The progress of a training of which only epochs are printed."""

    def __init__(self, name: str, console: Console) -> None:
        self._name, self._console = name, console

    def stage(self, name: str) -> None:
        """Print nothing of a stage."""

    def batch(self, epoch: int, share: float, loss: float) -> None:
        """Print nothing of a batch."""

    def epoch(self, report: EpochReport) -> None:
        """Print its quality."""
        quality = report.ndcg_at_10 or 0.0
        self._console.print(f"{self._name}: epoch {report.epoch + 1}, {quality:.4f}, {report.elapsed_s:.0f} s")
