"""Let numba compile, while the image is built, all that its services and commands run: so that a container need not.

What is compiled is for this CPU; on one of another kind numba finds nothing that fits and compiles for that.

    NUMBA_CACHE_DIR=DIR python docker/compile.py

The wheel has it as `lisarec.compile_kernels`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np
from rich.console import Console
from starlette.types import Receive, Scope, Send

from app.jobs.archive import ArchiverMetrics, ArchiverPlan, run_archiver
from app.jobs.datasets import synthetic_shop
from app.jobs.generations import rebuild
from app.jobs.retraining.loop import run_trainer
from app.jobs.retraining.metrics import TrainerMetrics
from app.jobs.retraining.plan import RetrainingPlan
from app.main import create_app, rare_garbage_collection
from app.settings import Settings
from model.config import MECHANISMS, PRESETS, SERVED_TRAINING, Config, MechanismRecipe
from model.data.readers import read_interactions
from model.mechanisms import train as mechanisms
from model.training.loop import Progress
from model.training.train import train

SHOPPERS = 120  # nearly all do something after the others, and 100 have to, for the trainer to compare models
BATCH = 1000
CONSOLE = Console(quiet=True)
Click = dict[str, str]


def main(place: Path) -> None:
    (place / "shop").mkdir()
    synthetic_shop.generate(place / "shop", shoppers=SHOPPERS)
    shop = read_interactions(place / "shop")
    clicks = [
        {"user_id": shop.user_ids[shop.user[row]], "item_id": shop.item_ids[shop.item[row]]}
        for row in np.random.default_rng(0).permutation(len(shop))
    ]
    for model in train_models(place):
        settings = Settings(model_dir=model, data_dir=place / "state" / model.name)
        asyncio.run(use(settings, clicks[:3]))
        asyncio.run(rebuild(settings, model, lambda _: None))
    retrain(place, clicks)  # last, as the trainer is a nice process from then on


def retrain(place: Path, clicks: list[Click]) -> None:
    """Run a service without a model, the archiver and the trainer on what it logged, and a service with that model.

    Its items have neither titles nor categories.
    """
    settings = Settings(data_dir=place / "log", archive_dir=place / "archive", models_dir=place / "models")
    asyncio.run(use(settings, clicks))
    run_archiver(settings, ArchiverPlan(None, 0, None), lambda _: None, ArchiverMetrics())
    outcome = run_trainer(settings, RetrainingPlan(epochs=1, min_events=1), None, CONSOLE, TrainerMetrics())
    assert outcome.outcome == "activated", outcome.reason
    asyncio.run(use(settings, clicks[:3]))


def train_models(place: Path) -> list[Path]:
    """Train a model of each kind."""
    for name, (shape, training) in PRESETS.items():
        recipe = Config(model=shape, training=training.model_copy(update={"epochs": 1}))
        train(place / "shop", place / name, recipe, progress=Progress())
    learned = SERVED_TRAINING.model_copy(update={"epochs": 1})
    mechanism = MechanismRecipe(model=MECHANISMS["lisa-soft"], training=learned)
    mechanisms.train(place / "shop", place / "lisa-soft", mechanism, progress=Progress())
    return [place / name for name in (*PRESETS, "lisa-soft")]


async def use(settings: Settings, clicks: list[Click]) -> None:
    """Ask a service that runs in this process."""
    app = create_app(settings)
    async with app.router.lifespan_context(app) as state:

        async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "state": dict(state or {})}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://service") as client:
            for begin in range(0, len(clicks), BATCH):
                (await client.post("/v1/events", json=clicks[begin : begin + BATCH])).raise_for_status()
            user_id, item_ids = clicks[0]["user_id"], sorted({click["item_id"] for click in clicks[:3]})
            few = {"user_id": user_id, "candidates": item_ids}
            asked = [{"user_id": user_id, "explain": True}, {"user_id": "visitor"}, few, {"history": item_ids}]
            (await client.post("/v1/recommendations", json={"requests": asked})).raise_for_status()
            for query in ("k", "red", "red kettle"):
                (await client.get("/v1/items", params={"query": query})).raise_for_status()
            (await client.get("/v1/items", params={"query": "kettle", "user_id": user_id})).raise_for_status()


if __name__ == "__main__":
    with TemporaryDirectory() as place, rare_garbage_collection():
        main(Path(place))
