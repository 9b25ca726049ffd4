"""The trainer's metrics: the outcomes of rounds, the time of the last one, and the age of the newest model."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from app.jobs.retraining.report import RoundOutcome, TrainerReport
from app.observability.job_metrics import JobMetrics
from model.artifact.model_directory import MANIFEST

OUTCOMES = ("activated", "refused", "waiting", "failed")


class TrainerMetrics(JobMetrics):
    """The metrics of one trainer. A round that refuses its model, or waits for events, counts as a success."""

    def __init__(self) -> None:
        super().__init__()
        instruments = self._instruments
        self._rounds = instruments.counter(
            "lisarec_trainer_rounds",
            "Rounds since the start of the trainer by outcome: activated, refused, waiting or failed",
            ["outcome"],
        )
        for outcome in OUTCOMES:
            self._rounds.labels(outcome)
        self._every = instruments.gauge("lisarec_trainer_every_seconds", "Interval between rounds, in seconds")
        self._succeeded = instruments.gauge(
            "lisarec_trainer_succeeded_timestamp_seconds",
            "Time at which the last round ended without a failure; before the first round, the start of the trainer",
        )
        self._generation = instruments.gauge(
            "lisarec_trainer_generation_timestamp_seconds",
            "Time at which the newest accepted model was ready; 0 before the first one",
        )
        self._seconds = instruments.gauge("lisarec_trainer_round_seconds", "Duration of the last round, in seconds")
        self._ndcg = instruments.gauge(
            "lisarec_trainer_ndcg_at_10",
            "NDCG@10 in the last round with a comparison: of the new model (new), and of the active model or popular "
            "items (served)",
            ["model"],
        )
        self._value = instruments.gauge(
            "lisarec_trainer_value_hr_at_10",
            "Value-weighted HR@10 of both in the last round that compared events with values",
            ["model"],
        )
        self._phases = instruments.gauge(
            "lisarec_trainer_phase_seconds", "Duration of each phase of the last round, in seconds", ["phase"]
        )
        self._events = instruments.gauge("lisarec_trainer_events", "Number of events that the last round read")
        self._peak = instruments.gauge("lisarec_trainer_peak_memory_bytes", "Peak memory of the trainer")
        self._is_warm = instruments.gauge(
            "lisarec_trainer_warm", "1 if the last round with a new model continued from the active model, else 0"
        )
        for model in ("new", "served"):
            self._ndcg.labels(model).set(math.nan)
            self._value.labels(model).set(math.nan)

    def begin(self, folder: Path, report: TrainerReport, every_s: float) -> None:
        """Record the results of earlier trainers."""
        self._every.set(every_s)
        self._succeeded.set(time.time())
        if report.last is not None:
            self._record(report.last)
        self._set_newest(folder, report)

    def failed(self) -> None:
        """Record a round that failed."""
        self._rounds.labels("failed").inc()

    def ended(self, folder: Path, report: TrainerReport, outcome: RoundOutcome) -> None:
        """Record a round that ended without a failure."""
        self._rounds.labels(outcome.outcome).inc()
        self._record(asdict(outcome))
        self._set_newest(folder, report)

    def _record(self, last: Mapping[str, Any]) -> None:
        """Record an outcome. One of an earlier version lacks some of the fields."""
        self._succeeded.set(datetime.fromisoformat(last["at"]).timestamp())
        for gauge, name in ((self._seconds, "seconds"), (self._events, "events"), (self._peak, "peak_bytes")):
            gauge.set(last.get(name, 0))
        self._phases.clear()
        for phase, seconds in last.get("phases_s", {}).items():
            self._phases.labels(phase).set(seconds)
        if last.get("is_warm") is not None:
            self._is_warm.set(last["is_warm"])
        for gauge, name in ((self._ndcg, "ndcg_at_10"), (self._value, "value_hr_at_10")):
            for model, found in (("new", last.get(name)), ("served", last.get(f"served_{name}"))):
                if found is not None:
                    gauge.labels(model).set(found)

    def _set_newest(self, folder: Path, report: TrainerReport) -> None:
        ready = [folder / name / MANIFEST for name in report.made if (folder / name / MANIFEST).exists()]
        self._generation.set(ready[-1].stat().st_mtime if ready else 0)
