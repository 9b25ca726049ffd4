"""The trainer's loop: one round of retraining, or a round at every interval."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from rich.console import Console

from app.jobs.reports.job_progress import print_line
from app.jobs.retraining.metrics import TrainerMetrics
from app.jobs.retraining.plan import RetrainingPlan
from app.jobs.retraining.report import LOCK, ROUND, WORK, RoundOutcome, TrainerReport
from app.jobs.retraining.round import RetrainingRound
from app.serving import empty_model
from app.serving.model_locations import models_of
from app.serving.model_registry import ModelRegistry
from app.settings import StoreSettings
from model.training.threads import use_threads
from storage.errors import StorageError, StoreUnused

POLL_EVERY_S = 600.0  # until there are enough events for a first model
AFTER_FAILURE_S = 300.0
UNTIL_FIRST_SERVICE_S = 5.0  # which may be starting
NICENESS = 10

logger = logging.getLogger(__name__)


def run_trainer(
    settings: StoreSettings, plan: RetrainingPlan, every_s: float | None, console: Console, metrics: TrainerMetrics
) -> RoundOutcome:
    """Retrain once, or every `every_s` seconds, where a failed round is logged and tried again.

    In the first minutes, a store that no service has created yet is not a failure, and is retried soon.

    raises  StorageError, ValueError, OSError  when a single round fails
    """
    os.nice(NICENESS)
    use_threads()
    models = models_of(settings)
    with locked(models.work):
        metrics.begin(models.work, TrainerReport.read(models.folder), every_s or 0.0)
        first_service_by_s = time.monotonic() + AFTER_FAILURE_S
        while True:
            try:
                if every_s is not None:
                    time.sleep(due_in_s(models, every_s))
                outcome = RetrainingRound(settings, plan, console).run()
                metrics.ended(models.work, TrainerReport.read(models.folder), outcome)
            except (StorageError, ValueError, OSError) as exc:
                if every_s is None:
                    raise
                logger.warning("retrying: %s", exc)
                if isinstance(exc, StoreUnused) and time.monotonic() < first_service_by_s:
                    time.sleep(min(UNTIL_FIRST_SERVICE_S, every_s))
                    continue
                metrics.failed()
                time.sleep(min(AFTER_FAILURE_S, every_s))
                continue
            print_line(console, f"{outcome.outcome}: {outcome.reason}")
            if every_s is None:
                return outcome


def due_in_s(models: ModelRegistry, every_s: float) -> float:
    """Return the seconds until the next round; 0 if one was interrupted."""
    last = TrainerReport.read(models.folder).last
    if last is None or (models.work / WORK / ROUND).exists():
        return 0.0
    waits_for_first = last["outcome"] == "waiting" and last["served"] == empty_model.TAG.hex()
    pause_s = min(POLL_EVERY_S, every_s) if waits_for_first else every_s
    passed_s = time.time() - datetime.fromisoformat(last["at"]).timestamp()
    return max(0.0, pause_s - max(0.0, passed_s))  # a clock that was ahead at the time must not make the pause longer


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Prevent other trainers from working in the models folder.

    raises  ValueError  when another one does
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another trainer is running in '{folder}'; wait for it, or stop it") from None
        yield
