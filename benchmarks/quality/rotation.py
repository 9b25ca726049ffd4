"""Simulate the benefit of rotation: the share of the items that users want, and find within some visits.

The model comes from ``lisarec train --protocol temporal``. A user *wants* what this user chose after the training's
end, at least three items that the model knows; the service has the events before it. The user comes once a day and sees
ten items.

*Attention*: the user looks at the first place, and continues from each place to the next with the probability
`GOES_ON`, so that the mean is about five of ten places. An item that is looked at, wanted and not yet chosen is chosen
with the probability `CHOOSES`; other items never are. What was looked at is posted as an impression, and what was
chosen as an event. All arms are equal: a user looks equally far on the same visit.

The simulation omits that users tire of repeated items, which would favour rotation. Users never begin to want an item,
which also favours it. Wanted items can be looked at without being chosen, which disfavours it.

The strength is chosen on one half of the users, and compared once with the plain list on the other half.

    python -m benchmarks.quality.rotation --model models/retail --data $LISAREC_DATA/online-retail
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from app.recommendation.ranking import rotation
from app.schemas.recommendations import RecommendationRequest
from app.serving.lifespan import Service
from benchmarks.machine import cpu
from benchmarks.quality.cold.items import service_of
from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from model.evaluation.evaluate import prepare_trial
from model.evaluation.trial import Trial

K = 10
VISITS = 10
GOES_ON = 0.85
CHOOSES = 0.5
FEWEST_WANTED, FEWEST_USERS = 3, 20
STRENGTHS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)  # the first one is the plain list
POSTED_AT_ONCE, ASKED_AT_ONCE = 1_000, 64
DRAWS = 1_000
DAY_S = 86_400.0
BEGIN_S = 1.7e9

console = Console()


class Visitor(NamedTuple):
    """A user: the items before the end of the training, oldest first, and the items wanted after it."""

    history: Sequence[str]
    wanted: frozenset[str]


def visitors_of(trained: Artifact, trial: Trial, most: int, seed: int) -> list[Visitor]:
    """Return at most `most` users who want enough items."""
    interactions, known, found = trial.interactions, trained.items.rows, list[Visitor]()
    is_later = ~trial.parts.train
    is_later[trial.parts.validation] = False
    for user in np.random.default_rng(seed).permutation(len(interactions.user_ids)).tolist():
        own = slice(*interactions.starts[user : user + 2].tolist())
        items = [interactions.item_ids[item] for item in interactions.item[own].tolist()]
        later = is_later[own].tolist()
        history = [item for item, is_wanted in zip(items, later, strict=True) if not is_wanted]
        wanted = {item for item, is_wanted in zip(items, later, strict=True) if is_wanted and item in known}
        if history and len(wanted) >= FEWEST_WANTED:
            found.append(Visitor(history, frozenset(wanted)))
    return found[:most]


async def simulate(service: Service, visitors: Sequence[Visitor], strength: float, seed: int) -> NDArray[np.float64]:
    """Return the share of the wanted items that each visitor has found after all visits."""
    draw = np.random.default_rng(seed)
    prefix = f"at-{round(100 * strength)}-"
    found: list[set[str]] = [set() for _ in visitors]
    before = [
        event(prefix, user, BEGIN_S - len(visitor.history) + place, item_id=item)
        for user, visitor in enumerate(visitors)
        for place, item in enumerate(visitor.history)
    ]
    await post(service, before)
    for visit in range(VISITS):
        now_s = BEGIN_S + DAY_S * (1 + visit)
        looks_on = draw.random((len(visitors), K)) < GOES_ON
        is_tempted = draw.random((len(visitors), K)) < CHOOSES
        events = []
        with patch.object(rotation, "now_s", lambda now_s=now_s: now_s):
            lists = await lists_of(service, [f"{prefix}{user}" for user in range(len(visitors))], strength)
        for user, items in enumerate(lists):
            seen = items[: 1 + int(np.argmin([*looks_on[user, : K - 1], False]))]
            events.append(event(prefix, user, now_s, type="impression", items=seen))
            for place, item in enumerate(seen):
                if item in visitors[user].wanted - found[user] and is_tempted[user, place]:
                    found[user].add(item)
                    events.append(event(prefix, user, now_s + 1, item_id=item))
        await post(service, events)
    return np.array([len(own) / len(visitor.wanted) for own, visitor in zip(found, visitors, strict=True)])


async def lists_of(service: Service, user_ids: Sequence[str], strength: float) -> list[list[str]]:
    """Return the items of each user's list."""
    asked = [
        RecommendationRequest(user_id=name, k=K, exclude_seen="none", rotation=strength, rotation_days=VISITS)
        for name in user_ids
    ]
    answers = []
    for begin in range(0, len(asked), ASKED_AT_ONCE):
        answers += await service.switcher.recommender.recommend(asked[begin : begin + ASKED_AT_ONCE])
    return [[item["item_id"] for item in answer["items"]] for answer in answers]


def event(prefix: str, user: int, at_s: float, **about: Any) -> dict[str, Any]:
    """Return a visitor's event as it is posted."""
    return {"user_id": f"{prefix}{user}", "timestamp": at_s, **about}


async def post(service: Service, events: Sequence[dict[str, Any]]) -> None:
    """Post events in order."""
    for begin in range(0, len(events), POSTED_AT_ONCE):
        await service.ingest.append(list(events[begin : begin + POSTED_AT_ONCE]))


async def measure(trained: Artifact, model: Path, visitors: Sequence[Visitor]) -> dict[float, NDArray[np.float64]]:
    """Return the shares found, by strength of the rotation."""
    with tempfile.TemporaryDirectory() as directory:
        async with service_of(trained, model, Path(directory)) as service:
            return {strength: await simulate(service, visitors, strength, seed=1) for strength in STRENGTHS}


def interval_95(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % interval of a mean, by resampling users."""
    draw = np.random.default_rng(0)
    means = [values[draw.integers(0, len(values), len(values))].mean() for _ in range(DRAWS)]
    low, high = np.quantile(means, [0.025, 0.975]).tolist()
    return low, high


def with_interval(values: NDArray[np.float64], sign: str = "") -> str:
    """Return a mean and its 95 % interval as text, with a sign for differences."""
    low, high = interval_95(values)
    return f"{values.mean():{sign}.4f} ({low:{sign}.4f} to {high:{sign}.4f})"


def report(found: dict[float, NDArray[np.float64]]) -> float:
    """Print the shares found, and return the strength that is best for the first half of the users."""
    half = len(found[0.0]) // 2
    table = Table("rotation", "share found, validation", "95 %", title=cpu())
    for strength, shares in found.items():
        low, high = interval_95(shares[:half])
        table.add_row(f"{strength:g}", f"{shares[:half].mean():.4f}", f"{low:.4f} to {high:.4f}")
    console.print(table)
    chosen = max(found, key=lambda strength: found[strength][:half].mean())
    plain, best = found[0.0][half:], found[chosen][half:]
    console.print(
        f"test, {len(plain):,} users: {plain.mean():.4f} without, {best.mean():.4f} with rotation {chosen:g}; "
        f"difference {with_interval(best - plain, '+')}"
    )
    return chosen


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory.")],
    data_dir: Annotated[Path, typer.Option("--data", help="The data it was trained on.")],
    users: Annotated[int, typer.Option(help="Users at most.")] = 1_000,
    seed: Annotated[int, typer.Option(help="Of the order in which users are taken.")] = 0,
) -> None:
    """Simulate and compare."""
    trained = model_directory.load(model)
    visitors = visitors_of(trained, prepare_trial(trained, data_dir, "temporal", "none"), users, seed)
    if len(visitors) < FEWEST_USERS:
        raise typer.BadParameter(f"only {len(visitors)} of the users want {FEWEST_WANTED} items or more")
    report(asyncio.run(measure(trained, model, visitors)))


if __name__ == "__main__":
    typer.run(main)
