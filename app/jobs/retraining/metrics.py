"""The trainer's metrics: how rounds ended, when the last one did, and how old the newest model is."""

from __future__ import annotations

import math
import time
from datetime import datetime
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, start_http_server

from app.jobs.retraining.report import RoundOutcome, TrainerReport
from model.artifact.model_directory import MANIFEST

OUTCOMES = ("activated", "refused", "waiting", "failed")


class TrainerMetrics:
    """The metrics of one trainer. A round that refuses its model, or waits for events, counts as a success."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._rounds = Counter(
            "lisarec_trainer_rounds",
            "Rounds by how they ended, since the trainer's start",
            ["outcome"],
            registry=registry,
        )
        for outcome in OUTCOMES:
            self._rounds.labels(outcome)
        self._every = Gauge("lisarec_trainer_every_seconds", "From round to round", registry=registry)
        self._succeeded = Gauge(
            "lisarec_trainer_succeeded_timestamp_seconds",
            "When a round last ended without a failure; before the first one, when the trainer was started",
            registry=registry,
        )
        self._generation = Gauge(
            "lisarec_trainer_generation_timestamp_seconds",
            "When the newest model that passed was ready; 0 before the first one",
            registry=registry,
        )
        self._seconds = Gauge("lisarec_trainer_round_seconds", "Time of the last round", registry=registry)
        self._ndcg = Gauge(
            "lisarec_trainer_ndcg_at_10",
            "Of the last round that compared: the new model, and the one served or popular items",
            ["model"],
            registry=registry,
        )
        self._value = Gauge(
            "lisarec_trainer_value_hr_at_10",
            "Value-weighted hit rate at 10 of the last round that compared on events with values, by model",
            ["model"],
            registry=registry,
        )
        for model in ("new", "served"):
            self._ndcg.labels(model).set(math.nan)
            self._value.labels(model).set(math.nan)

    def listen(self, host: str, port: int) -> None:
        """Serve GET /metrics in a thread of its own.

        raises  OSError  when the address is in use
        """
        start_http_server(port, host, self.registry)

    def begin(self, folder: Path, report: TrainerReport, every_s: float) -> None:
        """Record what earlier trainers have done."""
        self._every.set(every_s)
        self._succeeded.set(
            time.time() if report.last is None else datetime.fromisoformat(report.last["at"]).timestamp()
        )
        self._set_newest(folder, report)

    def failed(self) -> None:
        """Record a round that failed."""
        self._rounds.labels("failed").inc()

    def ended(self, folder: Path, report: TrainerReport, outcome: RoundOutcome) -> None:
        """Record a round that ended without a failure."""
        self._rounds.labels(outcome.outcome).inc()
        self._succeeded.set(datetime.fromisoformat(outcome.at).timestamp())
        self._seconds.set(outcome.seconds)
        if outcome.ndcg_at_10 is not None and outcome.served_ndcg_at_10 is not None:
            self._ndcg.labels("new").set(outcome.ndcg_at_10)
            self._ndcg.labels("served").set(outcome.served_ndcg_at_10)
        if outcome.value_hr_at_10 is not None and outcome.served_value_hr_at_10 is not None:
            self._value.labels("new").set(outcome.value_hr_at_10)
            self._value.labels("served").set(outcome.served_value_hr_at_10)
        self._set_newest(folder, report)

    def _set_newest(self, folder: Path, report: TrainerReport) -> None:
        ready = [folder / name / MANIFEST for name in report.made if (folder / name / MANIFEST).exists()]
        self._generation.set(ready[-1].stat().st_mtime if ready else 0)
