"""A shop with a trainer."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from app.jobs.archive import ArchiverMetrics, ArchiverPlan
from app.jobs.archive import run_archiver as archive
from app.jobs.retraining.loop import run_trainer
from app.jobs.retraining.metrics import TrainerMetrics
from app.jobs.retraining.plan import RetrainingPlan
from app.jobs.retraining.report import RoundOutcome
from app.settings import Settings
from model.config import ModelConfig, TrainConfig
from storage.folders.place import Place
from tests.app.conftest import Client
from tests.waiting import wait_until

PLAN = RetrainingPlan("tiny", epochs=1, min_events=600, warm=False)
WARM_PLAN = replace(PLAN, warm=True)
TINY = (
    ModelConfig(preset="tiny", width=16, history_codewords=8, target_codewords=32, ffn_multiple=1, hops=0),
    TrainConfig(learning_rate=0.01),
)


class Shop:
    """A service without a model, and the trainer's commands on its store."""

    def __init__(self, directory: Path, visits: list[list[str]], place: Place | None = None) -> None:
        self.models = directory / "models"
        place = place or directory
        self.settings = Settings(
            data_dir=directory / "state",
            archive_dir=place / "archive",
            models_dir=place / "models",
            cache_dir=directory / "cache",
        )
        self.client = Client(self.settings)
        self.trainer = TrainerMetrics()
        self._visits = iter(enumerate(visits))

    def collect(self, shoppers: int, renamed: str = "{}") -> None:
        """Let further shoppers click on items with this prefix, all at the same time, and archive the events."""
        rng = random.Random(shoppers)
        some = [next(self._visits) for _ in range(shoppers)]
        moments = [sorted(rng.random() for _ in visit) for _, visit in some]
        clicks = sorted(
            (moment, f"u{number}", item)
            for own, (number, visit) in zip(moments, some, strict=True)
            for moment, item in zip(own, map(renamed.format, visit), strict=True)
        )
        for begin in range(0, len(clicks), 1000):
            events = [
                {"user_id": user_id, "item_id": item, "value": 2.5} for _, user_id, item in clicks[begin : begin + 1000]
            ]
            assert self.client.post("/v1/events", json=events).json()["accepted"] == len(events)
        self.archive()

    def archive(self) -> None:
        archive(self.settings, ArchiverPlan(None, 0, None), lambda _: None, ArchiverMetrics())

    def retrain(self, plan: RetrainingPlan = PLAN) -> RoundOutcome:
        return run_trainer(self.settings, plan, None, Console(quiet=True), self.trainer)

    def sample(self, metric: str, **labels: str) -> float | None:
        """A sample of the trainer's metrics."""
        return self.trainer.registry.get_sample_value(f"lisarec_trainer_{metric}", labels)

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.models / "retrain.json").read_text())
        return report

    def names(self) -> list[str]:
        return sorted(place.name for place in self.models.iterdir() if place.is_dir())

    def follows(self, name: str | None) -> None:
        wait_until(lambda: self.client.get("/v1/model").json()["generation"] == name)
