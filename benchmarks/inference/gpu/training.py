"""Training of the default preset on the device: events a second, quality, memory, with and without mixed precision.

The first training gets half of the time, so that it can finish. The rate is measured from batch to batch, so that a
training that is cut off has one too.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch

from app.jobs.datasets import synthetic_shop
from benchmarks.inference.gpu.device import forget_peak, is_cuda, peak_bytes
from benchmarks.inference.gpu.stage import StageOptions, StageRecorder
from model.config import Config, ModelConfig, TrainConfig
from model.data.readers import read_interactions
from model.training.loop import EpochReport, Progress
from model.training.loss import matmul_dtype
from model.training.memory import Resources
from model.training.train import train

DATA = "ml-1m", "completejourney"
AIMS_S = {"ml-1m": 120.0}
# validation NDCG@10 of the default's best epoch on a CPU with lift 1.5: docs/measurements/experiments.md
QUALITY = {"ml-1m": 0.1949, "completejourney": 0.0931}
REACHED = 0.99  # share of this quality that counts as reached
SMALLEST_S = 20.0  # the shortest time in which a training is started
QUICK_SHOPPERS = 60
QUICK_CONFIG = Config(model=ModelConfig(width=16), training=TrainConfig(epochs=1))


class TimeUp(Exception):
    """The time of a training is up."""


class TimedProgress(Progress):
    """Keeps the reports of epochs, and ends a training when its time is up."""

    def __init__(self, seconds: float) -> None:
        self.reports: list[EpochReport] = []
        self.seconds_to_epochs: list[float] = []
        self._batches: list[tuple[float, float]] = []  # the first and the last one: time, and epochs until then
        self._begin_s = time.monotonic()
        self._end_s = self._begin_s + seconds

    def stage(self, name: str) -> None:
        """Check the time."""
        self._check()

    def batch(self, epoch: int, share: float, loss: float, events: int) -> None:
        """Record the time, and check it."""
        self._batches = [*self._batches[:1], (time.monotonic(), epoch + share)]
        self._check()

    @property
    def epochs_per_s(self) -> float | None:
        """The rate from the first batch, which compiles and warms up, to the last; None before the second one."""
        if len(self._batches) < 2:
            return None
        (begin_s, before), (end_s, after) = self._batches
        return (after - before) / (end_s - begin_s)

    def epoch(self, report: EpochReport) -> None:
        """Keep the report, and check the time."""
        self.reports.append(report)
        self.seconds_to_epochs.append(time.monotonic() - self._begin_s)
        self._check()

    def _check(self) -> None:
        if time.monotonic() > self._end_s:
            raise TimeUp


def measure(options: StageOptions, recorder: StageRecorder) -> None:
    """Train on each data directory, in both precisions; if quick, on a synthetic shop."""
    if options.is_quick:
        with TemporaryDirectory() as directory:
            (shop := Path(directory) / "made-up shop").mkdir()
            synthetic_shop.generate(shop, shoppers=QUICK_SHOPPERS)
            measure_data([shop], options, recorder)
    elif options.data is None:
        recorder.add("training", skipped="no data; give --data or LISAREC_DATA")
    else:
        measure_data([options.data / name for name in DATA], options, recorder)


def measure_data(directories: list[Path], options: StageOptions, recorder: StageRecorder) -> None:
    """Train on each existing data directory, in both precisions."""
    runs = [(data, is_mixed) for data in directories for is_mixed in (True, False)]
    for place, (data, is_mixed) in enumerate(runs):
        measured = f"{data.name}, {'mixed precision' if is_mixed else 'float32'}"
        if not data.is_dir():
            recorder.add(measured, skipped=f"{data} is not there")
        elif recorder.fits(measured, SMALLEST_S if is_cuda(options.device) else 0):
            share = 0.5 if place == 0 else 1 / (len(runs) - place)
            measure_training(data, measured, share * recorder.left_s, is_mixed, (options, recorder))


def measure_training(
    data: Path, measured: str, seconds: float, is_mixed: bool, stage: tuple[StageOptions, StageRecorder]
) -> None:
    """Train for at most this many seconds, and add a row."""
    options, recorder = stage
    events = len(read_interactions(data))
    config = QUICK_CONFIG if options.is_quick else Config()
    progress = TimedProgress(seconds)
    forget_peak(options.device)
    begin_s, is_whole = time.monotonic(), True
    with TemporaryDirectory() as directory, _precision(is_mixed):
        try:
            train(data, Path(directory) / "model", config, resources=Resources(options.device), progress=progress)
        except TimeUp:
            is_whole = False
    took_s = time.monotonic() - begin_s
    aim_s = AIMS_S.get(data.name)
    recorder.add(
        measured,
        events=events,
        is_whole=is_whole,
        seconds=took_s,
        epochs=len(progress.reports),
        events_per_s=progress.epochs_per_s and events * progress.epochs_per_s,
        products=str(matmul_dtype(torch.device(options.device)) if is_mixed else torch.float32),
        ndcg_at_10_by_epoch=[report.ndcg_at_10 for report in progress.reports],
        seconds_to_epochs=progress.seconds_to_epochs,
        seconds_to_quality=seconds_to_quality(progress, QUALITY.get(data.name)),
        peak_bytes=peak_bytes(options.device),
        **({"aim_s": aim_s, "meets_aim": is_whole and took_s <= aim_s} if aim_s else {}),
    )


def seconds_to_quality(progress: TimedProgress, ndcg_at_10: float | None) -> float | None:
    """Return the time to the end of the first epoch as good as the default's on a CPU; None if there is none."""
    if ndcg_at_10 is None:
        return None
    for at_s, report in zip(progress.seconds_to_epochs, progress.reports, strict=True):
        if (report.ndcg_at_10 or 0.0) >= REACHED * ndcg_at_10:
            return at_s
    return None


def _precision(is_mixed: bool) -> AbstractContextManager[object]:
    """Use the data type that the hardware multiplies fastest, or float32."""
    if is_mixed:
        return nullcontext()
    return mock.patch("model.training.trainer.matmul_dtype", return_value=torch.float32)
