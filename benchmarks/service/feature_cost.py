"""Compare each feature of a recommendation with the plain request, in one process without a network.

Each request takes the whole path from the ASGI call to the bytes of the response, over the embedded store; the features
take turns.

    python -m benchmarks.service.feature_cost --model models/ml-1m --items 100000
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from app.jobs.loadtest import synthetic_catalogue
from app.schemas.scenarios import ScenarioSettings
from app.settings import Settings
from benchmarks.harness.service_process import in_process_service
from model.artifact import model_directory

USERS = 64
HISTORY = 30
SHOWN = 50
BURST = 10  # consecutive requests of one kind
DIVERSITY, SCENARIO = 0.5, "diverse"

console = Console()


def features(categories: list[str], item_ids: Sequence[str], cursor: str) -> dict[str, dict[str, Any]]:
    """Return the request options of each feature; `categories` are ordered by descending frequency."""
    some, other, third = categories[:3]
    found: dict[str, dict[str, Any]] = {
        "categories, any of two": {"categories": [some, other]},
        "categories, all of two": {"categories_all": [some, other]},
        "categories, none of two": {"categories_none": [some, other]},
        "exclude 20 items": {"exclude": item_ids[:20]},
        "boost of one category": {"boost": {some: 0.7}},
        "boost of three, one of them down": {"boost": {some: 0.7, other: 0.5, third: -0.7}},
        "pins at three places": {"pin": [{"item_id": item_ids[n * 50], "place": n + 1} for n in range(3)]},
        "a basket of 5": {"basket": item_ids[:5]},
        "a basket of 50": {"basket": item_ids[:50]},
        "a basket of 5 alone": {"basket": item_ids[:5], "basket_only": True},
        "what to buy again": {"mode": "repeat"},
        "nothing that was ever seen": {"exclude_seen": "all"},
        "diversity 0.5": {"diversity": DIVERSITY},
        "diversity 0.5 by a scenario": {"scenario": SCENARIO},
        "rotation of 50 items that were shown": {"rotation": 0.5},
        "at most 3 of a category": {"max_per_category": 3},
        "at most 1 of a title": {"max_per": {"title": 1}},
        "the first page": {"cursor": ""},
        "the fifth page": {"cursor": cursor},
        "explain": {"explain": True},
        "like the user's newest item": {"because": ""},
    }
    together = [
        "categories, none of two",
        "exclude 20 items",
        "boost of one category",
        "pins at three places",
        "diversity 0.5",
        "at most 3 of a category",
        "the first page",
        "explain",
    ]
    found["all together"] = {
        name: value
        for feature in together
        for name, value in found[feature].items()
        if feature != "categories, none of two"
    } | {"categories_none": [categories[-1]]}
    return found


async def measure(
    model: Path, data_dir: Path, rounds: int, only: Sequence[str] = ()
) -> dict[str, list[tuple[float, float]]]:
    """Return seconds and CPU seconds of all threads for each request, by feature: all features, or only these."""
    async with in_process_service(Settings(model_dir=model, data_dir=data_dir)) as service:
        await service.tenant.scenarios.put(SCENARIO, ScenarioSettings(diversity=DIVERSITY), "benchmark")
        await service.add_histories(USERS, HISTORY, type="purchase")

        async def answer(options: dict[str, Any], user: int) -> Any:
            body = json.dumps({"user_id": f"user-{user}", **options}).encode()
            found = await service.call("POST", "/v1/recommendations", body)
            assert found.status == 200
            taken_s.append((found.seconds, found.cpu_s))
            return json.loads(found.body)

        taken_s: list[tuple[float, float]] = []
        for user in range(USERS):  # the first items of a plain list, so that rotation can lower them
            shown = [item["item_id"] for item in (await answer({"k": SHOWN}, user))["items"]]
            impression = {"user_id": f"user-{user}", "type": "impression", "items": shown}
            await service.tenant.ingest.append(impression)
        cursor = ""
        for _ in range(4):
            cursor = (await answer({"cursor": cursor}, 0))["cursor"]
        items, labels = service.tenant.catalogue.item_ids, model_directory.load(model).items.categories
        names = sorted(labels.names, key=lambda name: -len(labels.items_with(name)))
        wanted = features(names, items[:1000], cursor)
        options_of = {"plain": {}, **{name: wanted[name] for name in only or wanted}}
        found: dict[str, list[tuple[float, float]]] = {feature: [] for feature in options_of}
        rng = np.random.default_rng(0)
        for turn in range(rounds // BURST):
            for feature in rng.permutation(list(options_of)).tolist():
                taken_s.clear()
                for n in range(1 + BURST):
                    await answer(options_of[feature], (turn * BURST + n) % USERS)
                found[feature] += taken_s[1:]  # a warm-up: the previous feature has filled the caches
    return found


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory, of items with categories.")],
    items: Annotated[int, typer.Option(help="Items of the catalogue: the model's, and copies of them.")] = 100_000,
    rounds: Annotated[int, typer.Option(help="Requests of each kind.")] = 500,
    only: Annotated[list[str] | None, typer.Option(help="A feature, by its name; more of them, and no others.")] = None,
) -> None:
    """Print the cost of each feature compared with the plain request."""
    with TemporaryDirectory() as directory:
        large = Path(directory) / "large"
        synthetic_catalogue.write_enlarged(large, model, items, "trained")
        found = asyncio.run(measure(large, Path(directory) / "state", rounds, only or ()))
    plain = np.array(found["plain"])
    table = Table(f"one of {items:,} items", "median µs", "beside plain", "CPU, median µs", "beside plain")
    for feature, taken_s in found.items():
        medians = np.median(taken_s, axis=0) * 1e6
        more = [f"{ratio - 1:+.0%}" for ratio in medians / (np.median(plain, axis=0) * 1e6)]
        table.add_row(feature, f"{medians[0]:.0f}", more[0], f"{medians[1]:.0f}", more[1])
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
