"""Warm starts: which rounds continue from the served model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from app.jobs import generations
from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from model.config import EVENT_WEIGHTS
from tests.app.jobs.retraining.shops import WARM_PLAN, Shop


def test_every_nth_round_trains_from_scratch(shop: Shop) -> None:
    """So does a round after a rejection, or with another kind of model."""
    shop.collect(200)
    name = shop.retrain().name
    assert name is not None
    served = model_directory.load(shop.models / name)

    def continues(model: Artifact | None, outcome: str = "activated", **options: Any) -> bool:
        return replace(WARM_PLAN, **options).model_to_continue(model, {"outcome": outcome}) is not None

    assert continues(served)
    assert not continues(None)
    assert not continues(served, warm=False)
    assert not continues(served, outcome="refused")
    assert not continues(served, preset="lisa-mini")
    assert [continues(served, full_every=full_every) for full_every in (1, 2)] == [False, True]
    of_two = served.config.training.model_copy(update={"warm_count": 2})
    after_two = replace(served, config=served.config.model_copy(update={"training": of_two}))
    assert [continues(after_two, full_every=full_every) for full_every in (2, 3, 4)] == [False, False, True]


def test_a_round_with_other_items_trains_from_scratch(shop: Shop) -> None:
    shop.collect(200)
    assert shop.retrain().outcome == "activated"
    for number in range(200):
        assert shop.client.request("DELETE", f"/v1/users/u{number}").is_success
    shop.collect(110, renamed="new-{}")
    outcome = shop.retrain(WARM_PLAN)
    assert (outcome.outcome, outcome.is_warm) == ("activated", False), outcome
    assert outcome.name is not None
    made = model_directory.load(shop.models / outcome.name)
    assert all(item_id.startswith("new-") for item_id in made.items.ids)


def test_a_warm_round_keeps_event_weights_and_unseen_types(shop: Shop) -> None:
    shop.collect(200)
    made = model_directory.load(shop.models / str(shop.retrain().name))
    kept = {"event_weights": EVENT_WEIGHTS | {"purchase": 3.0, "glance": 0.5}, "unseen_types": ("view",)}
    model_directory.save(shop.models / "own", made.model, made.config.model_copy(update=kept), made.items, made.metrics)
    asyncio.run(generations.activate(shop.settings, "own"))
    shop.follows("own")
    glances = [{"user_id": f"u{number}", "item_id": "glanced", "type": "glance"} for number in range(5)]
    assert shop.client.post("/v1/events", json=glances).json()["unknown_types"] == 0
    shop.collect(110)
    outcome = shop.retrain(WARM_PLAN)
    assert (outcome.outcome, outcome.is_warm) == ("activated", True), outcome
    retrained = model_directory.load(shop.models / str(outcome.name))
    assert retrained.config.model_dump(include=set(kept)) == kept
    assert "glanced" in list(retrained.items.ids)
