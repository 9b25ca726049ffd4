"""A service on the device under load: requests a second, latencies, batches and watts, at increasing rates.

One process serves on SQLite, and the load generator runs next to it. The service keeps up with a rate if 90 % of the
responses arrive within ``P90_MS``. The results also include the waits of requests for their batch and of batches for
the engine, the sizes of batches, and their device time.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np

from app.jobs.datasets import synthetic_shop
from app.jobs.loadtest import synthetic_catalogue
from app.jobs.loadtest.rate_sweep import BenchTarget, RateSweep
from benchmarks.harness.service_process import running_service
from benchmarks.inference.gpu.device import PowerMeter
from benchmarks.inference.gpu.stage import StageOptions, StageRecorder
from model.config import Config, ModelConfig, TrainConfig
from model.training.loop import Progress
from model.training.train import train

ITEMS = 10_000_000, 1_000_000, 100_000_000  # the most important size comes first
RATES, QUICK_RATES = (500, 1_000, 2_000, 4_000, 7_000, 10_000), (20,)
P90_MS = 10.0
SECONDS, QUICK_SECONDS = 4.0, 1.0  # at each rate
ITEMS_USED = 10_000
SECONDS_PER_MILLION = 7.0  # for writing and loading a catalogue
SECONDS_TO_START = 30.0  # including the histories of the users
SHOPPERS, QUICK_SHOPPERS = 300, 60
METRICS = ("lisarec_batch_queries", "lisarec_engine_seconds", "lisarec_batch_wait_seconds")


def measure(options: StageOptions, recorder: StageRecorder) -> None:
    """Serve each catalogue size, and raise the rate until the service no longer keeps up."""
    with TemporaryDirectory(prefix="lisarec-gpu-") as folder:
        directory = Path(folder)
        model = options.model or trained_shop(directory, options.is_quick)
        for items in options.sizes(*ITEMS, quick=(20_000,)):
            needed_s = SECONDS_TO_START + items / 1e6 * SECONDS_PER_MILLION
            if options.is_quick or recorder.fits(f"{items:,} items", needed_s):
                measure_service(directory, model, items, options, recorder)


def measure_service(directory: Path, model: Path, items: int, options: StageOptions, recorder: StageRecorder) -> None:
    """Measure one catalogue size."""
    enlarged = directory / f"model-{items}"
    synthetic_catalogue.write_enlarged(enlarged, model, items, "trained")
    used = np.random.default_rng(0).choice(items, min(items, ITEMS_USED), replace=False).tolist()
    with running_service(enlarged, "--device", options.device) as url:
        address = "127.0.0.1", int(url.rpartition(":")[2])
        sweep = RateSweep(BenchTarget([address], [synthetic_catalogue.item_id(number) for number in used]))
        try:
            raise_rate(sweep, url, f"{items:,} items", options, recorder)
        finally:
            sweep.close()
    shutil.rmtree(enlarged)


def raise_rate(sweep: RateSweep, url: str, name: str, options: StageOptions, recorder: StageRecorder) -> None:
    """Add a row for each rate, up to the first one that the service does not keep up with."""
    rates: Sequence[int] = QUICK_RATES if options.is_quick else RATES
    seconds = QUICK_SECONDS if options.is_quick else SECONDS
    for rate in rates:
        measured = f"{name}, {rate:,} recommendations/s wanted"
        if not recorder.fits(measured, 2 * seconds):
            return
        before = engine_metrics(url)
        with PowerMeter() as power:
            row = sweep.measure(rate, seconds)
        spent = {key: value - before.get(key, 0.0) for key, value in engine_metrics(url).items()}
        recorder.add(
            measured, **finite(asdict(row)), watts=power.watts, keeps_up=row.keeps_up(P90_MS), **of_batches(spent)
        )
        if not row.keeps_up(P90_MS):
            return


def engine_metrics(url: str) -> dict[str, float]:
    """Return the sums and counts of the engine's histograms, and of those of the waits for it."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    pattern = re.compile(rf"^((?:{'|'.join(METRICS)})_(?:sum|count)\S*) (\S+)$", re.MULTILINE)
    return {name: float(value) for name, value in pattern.findall(text)}


def of_batches(spent: dict[str, float]) -> dict[str, float]:
    """Return the mean batch size, the mean time of each stage, and the mean waits, in milliseconds."""
    means = {}
    for name, total in spent.items():
        count = spent.get(name.replace("_sum", "_count"), 0.0)
        if "_sum" in name and count:
            label = re.search(r'(\w+)="(\w+)"', name)
            if label is None:
                means["queries_per_batch"] = total / count
            else:
                means[f"wait_for_{label[2]}_ms" if label[1] == "until" else f"{label[2]}_ms_per_batch"] = (
                    total / count * 1e3
                )
    return means


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with None for numbers that JSON does not support."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def trained_shop(directory: Path, is_quick: bool) -> Path:
    """Train a model on a synthetic shop, and return its directory."""
    data, model = directory / "shop", directory / "trained"
    data.mkdir()
    synthetic_shop.generate(data, shoppers=QUICK_SHOPPERS if is_quick else SHOPPERS)
    shape = ModelConfig(width=32) if is_quick else ModelConfig()
    train(data, model, Config(model=shape, training=TrainConfig(epochs=1)), progress=Progress())
    return model
