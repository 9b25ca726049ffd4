"""The trainer of the hosts: its initial model, its command, and the outcomes of its rounds."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from app.jobs.retraining.report import TrainerReport
from app.serving.bucket_models import BucketModels
from benchmarks.machines.network import DISK
from storage.folders.place import ObjectUrl

MODELS = "s3://lisarec/models"
NAME = "trainer"
OUTCOMES = ("activated", "refused", "waiting", "retrying")  # each begins a line of the log
ENDS_WITHIN_S = 300.0


def uploaded(model: Path) -> BucketModels:
    """Upload a model into the bucket; return the models there."""
    models = BucketModels(ObjectUrl(MODELS), DISK / "cache")
    shutil.copytree(model, models.work / model.name)
    models.publish(model.name)
    return models


def retrain_command(store: Sequence[str], every_s: int) -> list[str]:
    """Return the command of a trainer with short rounds.

    Clicks are random, so no model is better than another: a loss refuses one only if it is significant.
    """
    rounds = ["--every", f"{every_s}s", "--epochs", "1", "--min-events", "10000", "--max-events", "20000"]
    return ["retrain", *store, "--models-dir", MODELS, *rounds, "--max-loss", "1"]


async def last_round(models: BucketModels, since_s: float) -> str:
    """Wait until a round of the trainer has ended after that time; return its outcome and reason.

    raises  TimeoutError  when none has, with the trainer's last line
    """
    try:
        async with asyncio.timeout(ENDS_WITHIN_S):
            while True:
                last = (await asyncio.to_thread(TrainerReport.read, models.folder)).last
                if last is not None and _ended_s(last) >= since_s:
                    return f"{last['outcome']}: {last['reason']}"
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise TimeoutError(f"the trainer has ended no round: {_lines()[-1:]}") from None


def rounds() -> Counter[str]:
    """Return the number of rounds by outcome, over all hosts."""
    begins = (line.partition(":")[0] for line in _lines())
    return Counter(begin for begin in begins if begin in OUTCOMES)


def _ended_s(last: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(last["at"]).timestamp()


def _lines() -> list[str]:
    """Return the log lines in the order of the hosts."""
    return [line for log in sorted(DISK.glob(f"{NAME}-*.log")) for line in log.read_text().splitlines()]
