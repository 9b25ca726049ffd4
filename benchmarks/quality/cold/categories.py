"""Measure whether items of which only the categories are known are recommended to the right users.

Every tenth item of a model gets a twin, an item with another id and the same categories, which is added to a running
service. The service then ranks the next item of each user, from the events before the last one. Users whose last item
has a twin are ranked with the original excluded: is the twin among the ten best? All users are ranked with and without
the twins: do the twins displace the wanted items?

    python -m benchmarks.quality.cold.categories --model models/ml-1m --data $LISAREC_DATA/ml-1m
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from app.schemas.recommendations import RecommendationRequest
from app.serving.item_updates import parse_items
from app.serving.lifespan import Service
from benchmarks.machine import cpu
from benchmarks.quality.cold.items import HELD_OUT_EVERY, NOT_RANKED, K, finish, service_of
from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from model.data.readers import read_interactions
from model.metrics import interval_95, metrics

TWIN = "twin-of-"
POSTED_AT_ONCE = 500
console = Console()

Case = tuple[list[str], str]
"""The items that a user chose, oldest first, and the next one."""


def cases_of(trained: Artifact, directory: Path, users: int, seed: int) -> list[Case]:
    """Return the cases of at most `users` users whose last item the model knows."""
    interactions = read_interactions(directory)
    starts, found = interactions.starts, list[Case]()
    for user in np.random.default_rng(seed).permutation(len(interactions.user_ids)).tolist():
        own = [interactions.item_ids[item] for item in interactions.item[starts[user] : starts[user + 1]]]
        if len(own) > 2 and own[-1] in trained.items.rows:
            found.append((own[:-1], own[-1]))
    return found[:users]


async def measure(
    trained: Artifact, model: Path, cases: Sequence[Case]
) -> tuple[dict[str, NDArray[np.int64]], list[int]]:
    """Return the ranks by kind of request, and the numbers of twins among the ten best."""
    items = trained.items
    twins = {items.ids[row]: list(items.categories[row]) for row in range(0, len(items), HELD_OUT_EVERY)}
    twins = {name: categories for name, categories in twins.items() if categories}
    asked = [(history, wanted) for history, wanted in cases if wanted in twins]
    with tempfile.TemporaryDirectory() as directory:
        async with service_of(trained, model, Path(directory)) as service:
            found = {
                "items with a twin, as the model knows them": await _ranks(service, asked),
                "all, without twins": await _ranks(service, cases),
            }
            popular = [items.ids[row] for row in items.popular_first[:K].tolist()]
            found["items with a twin, by popularity"] = np.array([_rank(popular, wanted) for _, wanted in asked])
            bodies = [{"item_id": TWIN + name, "categories": categories} for name, categories in twins.items()]
            for begin in range(0, len(bodies), POSTED_AT_ONCE):
                await service.item_updates.post(parse_items(bodies[begin : begin + POSTED_AT_ONCE], {}))
            await service.switcher.poll()
            await finish(service)
            assert len(service.switcher.current.cold_items) == len(twins)
            of_twins = [(history, TWIN + wanted) for history, wanted in asked]
            excluded = [[wanted] for _, wanted in asked]
            found["their twins, by categories alone"] = await _ranks(service, of_twins, excluded)
            shown = list[int]()
            found["all, beside twins"] = await _ranks(service, cases, shown=shown)
    return found, shown


async def _ranks(
    service: Service,
    cases: Sequence[Case],
    excluded: Sequence[list[str]] | None = None,
    shown: list[int] | None = None,
) -> NDArray[np.int64]:
    """Return the rank of each next item among the ten best; append the number of twins among these to `shown`."""
    ranks = []
    for number, (history, wanted) in enumerate(cases):
        request = RecommendationRequest(
            history=history, k=K, exclude_seen="all", exclude=[] if excluded is None else excluded[number]
        )
        (answer,) = await service.switcher.recommender.recommend([request])
        best = [item["item_id"] for item in answer["items"]]
        ranks.append(_rank(best, wanted))
        if shown is not None:
            shown.append(sum(name.startswith(TWIN) for name in best))
    return np.array(ranks)


def _rank(best: list[str], wanted: str) -> int:
    return best.index(wanted) + 1 if wanted in best else NOT_RANKED


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory, of items with categories.")],
    data_dir: Annotated[Path, typer.Option("--data", help="The data it was trained on.")],
    users: Annotated[int, typer.Option(help="Users at most.")] = 6000,
    seed: Annotated[int, typer.Option(help="Of the order in which users are taken.")] = 0,
) -> None:
    """Compare the ranks."""
    trained = model_directory.load(model)
    found, shown = asyncio.run(measure(trained, model, cases_of(trained, data_dir, users, seed)))
    table = Table("", "users", "HR@10", "95 %", title=cpu())
    for name, ranks in found.items():
        low, high = interval_95(ranks, "hr_at_10")
        table.add_row(name, f"{len(ranks):,}", f"{metrics(ranks)['hr_at_10']:.4f}", f"{low:.4f} to {high:.4f}")
    console.print(table)
    most = (np.array(shown) > K // 2).mean()
    console.print(f"twins among the ten: {np.mean(shown) / K:.1%}; more than half of them for {most:.1%} of the users")


if __name__ == "__main__":
    typer.run(main)
