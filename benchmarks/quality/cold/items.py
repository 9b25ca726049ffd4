"""Measure how often and how well the service recommends items that are not in its model, after events introduce them.

Every tenth item of a data set is held out of training. All events are then posted in order of time to a real service
with its embedded store. The service gives codes to new items when enough users with a history have chosen them
(app/events/cold_item_learner.py, model/cold_items.py). At the time of each test event the benchmark requests that
user's ten best items. After every request it waits for the service's background work.

    python -m benchmarks.quality.cold.items --data $LISAREC_DATA/online-retail --plain models/retail \\
        --without models/tenth

--plain is a model of all items, from ``lisarec train --protocol temporal``. The command trains --without, with the same
split and settings, if it does not exist.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from app.events import cold_item_learner
from app.http.services import open_services
from app.observability.metrics import Metrics
from app.schemas.recommendations import RecommendationRequest
from app.serving.lifespan import Service
from app.settings import Settings
from benchmarks.machine import cpu
from model.artifact import model_directory
from model.artifact.item_statistics import ItemStatistics
from model.artifact.item_table import ItemTable
from model.artifact.model_directory import Artifact
from model.config import Config, ServedRecipe
from model.data.interactions import Histories, Interactions
from model.data.readers import read_items
from model.data.splits import Split
from model.evaluation.evaluate import prepare_trial
from model.evaluation.trial import model_scorer
from model.metrics import difference, difference_interval_95, interval_95, metrics
from model.training.loop import EpochReport, Progress
from model.training.train import content
from model.training.trainer import Trainer, prepare

HELD_OUT_EVERY = 10
NOT_RANKED = 1 << 30  # the rank of an item that is not recommended
K = 10
POSTED_AT_ONCE = 100

console = Console()


def held_out_items(interactions: Interactions) -> NDArray[np.bool_]:
    """Return whether each item is held out, every tenth in order of ids: (items,)."""
    held = np.zeros(len(interactions.item_ids), bool)
    held[np.argsort(np.array(interactions.item_ids))[::HELD_OUT_EVERY]] = True
    return held


class ReportPrinter(Progress):
    """Prints the reports of epochs."""

    def epoch(self, report: EpochReport) -> None:
        """Print the report."""
        console.print(report)


def train_without(directory: Path, interactions: Interactions, parts: Split, recipe: ServedRecipe, out: Path) -> None:
    """Train with these settings on the same events, except those of the held-out items."""
    held = held_out_items(interactions)
    kept = ~held[interactions.item]
    row = np.cumsum(~held) - 1
    place = np.cumsum(kept) - 1
    known = replace(
        interactions,
        item_ids=[name for name, is_held in zip(interactions.item_ids, held, strict=True) if not is_held],
        user=interactions.user[kept],
        item=row[interactions.item[kept]].astype(np.int32),
        type=interactions.type[kept],
        timestamp_us=interactions.timestamp_us[kept],
        value=interactions.value[kept],
    )
    validation = place[parts.validation[kept[parts.validation]]]
    validation = validation[validation > known.starts[known.user[validation]]]  # an event needs a history
    train = parts.train[kept]
    config = Config.model_validate(recipe.model_dump())
    trainer = Trainer(prepare(known, Split(train, validation, validation[:0]), config), config, out, "cpu")
    trainer.fit(ReportPrinter(), resume=False)
    texts = read_items(directory)
    items = ItemTable(
        known.item_ids,
        [texts.titles.get(name, "") for name in known.item_ids],
        [texts.categories.get(name, ()) for name in known.item_ids],
        np.bincount(known.item[train], minlength=len(known.item_ids)).astype(np.int64),
    )
    statistics = ItemStatistics(content=content(trainer.model, items))
    model_directory.save(out, trainer.model, trainer.trained_config, items, {}, statistics)


@dataclass
class RankedAnswers:
    """The ranks of the test events, and the number of new items in each list of ten."""

    ranks: list[int] = field(default_factory=list)
    new_shown: list[int] = field(default_factory=list)

    def note(self, best: list[str], target: str, new: set[str]) -> None:
        """Record the items recommended to a user who then chose the target."""
        self.ranks.append(best.index(target) + 1 if target in best else NOT_RANKED)
        self.new_shown.append(sum(item_id in new for item_id in best))


@asynccontextmanager
async def service_of(trained: Artifact, model: Path, directory: Path) -> AsyncIterator[Service]:
    """Run the service of a trained model in this process."""
    settings = Settings(model_dir=model, data_dir=directory)
    async with open_services(settings, {settings.tenant: trained}, Metrics()) as services:
        yield services.by_tenant[settings.tenant]


async def finish(service: Service) -> None:
    """Wait for the service's background work, and make the service apply it."""
    await service.switcher.current.context.tasks.join()
    service.switcher.rebuild_at_s = 0.0
    await service.switcher.poll()


async def replayed(
    trained: Artifact, model: Path, interactions: Interactions, parts: Split
) -> tuple[RankedAnswers, RankedAnswers]:
    """Return the answers of the service and of popularity at that time, in the order of the split's test events."""
    cold_item_learner.MIN_SAMPLE_INTERVAL_S = 0.0  # because a year is replayed in minutes
    new = set(interactions.item_ids) - set(trained.items.ids)
    tested = {int(position): place for place, position in enumerate(parts.test)}
    by_place = [(RankedAnswers(), RankedAnswers()) for _ in tested]
    counts, waiting = np.zeros(len(interactions.item_ids)), list[dict[str, object]]()
    with tempfile.TemporaryDirectory() as directory:
        async with service_of(trained, model, Path(directory)) as service:

            async def post() -> None:
                if waiting:
                    await service.ingest.append(waiting)
                    waiting.clear()
                    await finish(service)

            for position in np.argsort(interactions.timestamp_us, kind="stable").tolist():
                user, item = int(interactions.user[position]), int(interactions.item[position])
                user_id, item_id = interactions.user_ids[user], interactions.item_ids[item]
                if position in tested:
                    await post()
                    asked = RecommendationRequest(user_id=user_id, k=K, exclude_seen="none")
                    (answer,) = await service.switcher.recommender.recommend([asked])
                    of_service, of_popularity = by_place[tested[position]]
                    of_service.note([one["item_id"] for one in answer["items"]], item_id, new)
                    most = np.argsort(-counts, kind="stable")[:K].tolist()
                    of_popularity.note([interactions.item_ids[row] for row in most], item_id, new)
                waiting.append(
                    {
                        "user_id": user_id,
                        "item_id": item_id,
                        "type": interactions.type_names[interactions.type[position]],
                        "timestamp": int(interactions.timestamp_us[position]) / 1e6,
                    }
                )
                counts[item] += 1
                if len(waiting) == POSTED_AT_ONCE:
                    await post()
    first, second = (
        RankedAnswers([one[which].ranks[0] for one in by_place], [one[which].new_shown[0] for one in by_place])
        for which in (0, 1)
    )
    return first, second


def never_learned(trained: Artifact, interactions: Interactions, parts: Split) -> RankedAnswers:
    """Rank by the model without new items in histories and answers; an empty history is no hit."""
    rows = trained.items.rows.places_of(interactions.item_ids)[interactions.item]
    scorer, answers = model_scorer(trained), RankedAnswers()
    for position in parts.test.tolist():
        history = rows[interactions.starts[interactions.user[position]] : position]
        history, target, rank = history[history >= 0], rows[position], NOT_RANKED
        if len(history) and target >= 0:
            (scores,) = scorer(Histories.joined([history]))
            rank = int((scores >= scores[target]).sum())
        answers.ranks.append(rank)
        answers.new_shown.append(0)
    return answers


def main(
    data_dir: Annotated[Path, typer.Option("--data", help="Data directory with real times.")],
    plain: Annotated[Path, typer.Option(help="Model of all items.")],
    without: Annotated[Path, typer.Option(help="Model without every tenth item; trained where it is missing.")],
) -> None:
    """Compare the results."""
    of_all = model_directory.load(plain)
    trial = prepare_trial(of_all, data_dir, "temporal", "none")
    interactions, parts = trial.interactions, trial.parts
    if not model_directory.exists(without):
        train_without(data_dir, interactions, parts, of_all.config, without)
    trained = model_directory.load(without)
    of_plain = trial.test_model(of_all)
    never = never_learned(trained, interactions, parts)
    service, popular = asyncio.run(replayed(trained, without, interactions, parts))
    is_new = held_out_items(interactions)[interactions.item[parts.test]]
    new_plain = held_out_items(interactions)[of_plain.recommended[:, :K]].sum(axis=1)  # type: ignore[index]

    table = Table(
        title=f"{cpu()}, {len(is_new):,} test events, {is_new.sum()} of them of {is_new.mean():.1%} new items"
    )
    for name in ("", "HR@10", "NDCG@10", "HR@10, new items", "HR@10, others", "new among the ten"):
        table.add_column(name)
    named = {
        "trained on all items": (of_plain.ranks, new_plain),
        "without every tenth, never learned": (np.array(never.ranks), np.array(never.new_shown)),
        "without, served with live events": (np.array(service.ranks), np.array(service.new_shown)),
        "popularity at that moment": (np.array(popular.ranks), np.array(popular.new_shown)),
    }
    for name, (ranks, shown) in named.items():
        table.add_row(
            name,
            _with_interval(ranks, "hr_at_10"),
            _with_interval(ranks, "ndcg_at_10"),
            _with_interval(ranks[is_new], "hr_at_10"),
            f"{metrics(ranks[~is_new])['hr_at_10']:.3f}",
            f"{shown.mean() / K:.1%}",
        )
    console.print(table)
    learned = named["without, served with live events"][0]
    for name in ("without every tenth, never learned", "trained on all items"):
        others = named[name][0]
        low, high = difference_interval_95(learned, others, "hr_at_10")
        gain = difference(learned, others, "hr_at_10")
        console.print(f"HR@10, served with live events minus {name}: {gain:+.3f} ({low:+.3f} to {high:+.3f})")


def _with_interval(ranks: NDArray[np.int64], metric: str) -> str:
    low, high = interval_95(ranks, metric)
    return f"{metrics(ranks)[metric]:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    typer.run(main)
