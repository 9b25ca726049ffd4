"""Lift a trained model with each decay and strength, and evaluate each on validation events; no test event is read.

The results are compared with co-visitation, with the best hyperparameters on the same events, also by the number of
training events of the held-out item.

    lisarec demo
    python -m benchmarks.quality.training.lifts --model var/demo/models/demo --data var/demo/shop
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from model.config import SeenRule, TrainConfig
from model.data.interactions import Histories, training_histories
from model.evaluation.baselines import GRIDS
from model.evaluation.evaluate import prepare_trial
from model.evaluation.holdout_comparison import unlifted
from model.evaluation.trial import Trial, model_scorer
from model.holdout_ranks import HeldOutEvents, held_out_events, ranks_full
from model.lisa.item_followers import DEFAULT_LIFT_STRENGTH, LIFT_DECAYS, LIFT_STRENGTHS, Lift
from model.metrics import difference, difference_interval_95, gains
from model.training.counts.pair_counts import PairCounts
from model.training.lift_choice import LiftedRanks, chosen_lift

METRICS = {"hr_at_10": "HR@10", "ndcg_at_10": "NDCG@10"}
EVENTS_OF_ITEMS = ((0, 0), (1, 4), (5, 19), (20, 99), (100, None))

console = Console(width=220)
Ranks = NDArray[np.int64]


def lifts_of(
    model: Artifact, histories: Histories, events: HeldOutEvents, seen_rule: SeenRule
) -> tuple[dict[Lift, Ranks], Lift]:
    """Rank the held-out items with each lift; return the ranks, exact up to 10, and the lift that a training chooses.

    histories  the training events
    """
    shape, training = model.config.model, model.config.training
    assert isinstance(training, TrainConfig), "a model of a preset"
    usual = Lift(shape.followers, DEFAULT_LIFT_STRENGTH, training.lift_count_decay, training.lift_faint_share)
    table = PairCounts(histories, len(model.items)).followers(usual.followers, usual.count_decay)
    ranked = LiftedRanks(events, model_scorer(unlifted(model)), seen_rule, table)
    found = {
        lift: ranked.ranks(lift)
        for decay in LIFT_DECAYS
        for lift in (usual._replace(strength=strength, decay=decay) for strength in LIFT_STRENGTHS)
    }
    return found, chosen_lift(found.__getitem__, usual).lift


def best_co_visitation(trial: Trial, histories: Histories, events: HeldOutEvents) -> tuple[str, Ranks]:
    """Return the hyperparameters with the best NDCG@10 on these events, and the ranks."""
    found = {
        ", ".join(f"{name} {value:g}" for name, value in asdict(one).items()): ranks_full(
            events, one.fit(histories, trial.items), trial.seen_rule
        )
        for one in GRIDS["co-visitation"]
    }
    best = max(found, key=lambda name: gains(found[name], "ndcg_at_10").mean())
    return best, found[best]


def quality(ranks: Ranks) -> str:
    """Return both metrics as text."""
    return " / ".join(f"{gains(ranks, metric).mean():.4f}" for metric in METRICS)


def grid_table(found: dict[Lift, Ranks]) -> Table:
    """Return HR@10 / NDCG@10 of each decay and strength."""
    table = Table("decay", *(f"{strength:g}" for strength in LIFT_STRENGTHS), box=box.MARKDOWN)
    for decay in LIFT_DECAYS:
        table.add_row(f"{decay:g}", *(quality(ranks) for lift, ranks in found.items() if lift.decay == decay))
    return table


def buckets_table(counts: NDArray[np.int64], chosen: Ranks, usual: Ranks, other: Ranks) -> Table:
    """Return the quality by the number of training events (Q,) of the held-out items."""
    of_margins = [f"chosen minus co-visitation, {name}" for name in METRICS.values()]
    table = Table("events", "users", "chosen", "usual decay", "co-visitation", *of_margins, box=box.MARKDOWN)
    for first, last in [(0, None), *EVENTS_OF_ITEMS]:
        some = (counts >= first) & (counts <= (np.inf if last is None else last))
        if not some.any():
            continue
        label = f"{first} or more" if last is None else str(first) if first == last else f"{first} to {last}"
        margins = [margin(chosen[some], other[some], metric) for metric in METRICS]
        table.add_row(label, str(some.sum()), *(quality(ranks[some]) for ranks in (chosen, usual, other)), *margins)
    return table


def margin(ranks: Ranks, others: Ranks, metric: str) -> str:
    """Return the paired difference with its interval over users, as text."""
    low, high = difference_interval_95(ranks, others, metric)
    return f"{difference(ranks, others, metric):+.4f} ({low:+.4f} to {high:+.4f})"


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    data: Annotated[Path, typer.Option(help="Data directory it was trained on.")],
    users: Annotated[int, typer.Option(min=1, help="Validation users at most.")] = 10_000,
) -> None:
    """Print the quality of all lifts, and compare the chosen one with co-visitation."""
    trained = model_directory.load(model)
    trial = prepare_trial(trained, data, None, None, rows_of_model=True)
    drawn = np.random.default_rng(0).permutation(trial.parts.validation)[:users]
    events = held_out_events(trial.interactions, np.sort(drawn), trained.config)
    histories = training_histories(trial.interactions, trial.parts.train, trained.config.event_weights)
    found, chosen = lifts_of(trained, histories, events, trial.seen_rule)
    usual = max((lift for lift in found if lift.decay == LIFT_DECAYS[0]), key=lambda one: _ndcg_at_10(found[one]))
    named, co_visitation = best_co_visitation(trial, histories, events)
    console.print(grid_table(found))
    console.print(f"chosen: {chosen}; co-visitation: {named}", soft_wrap=True)
    console.print(buckets_table(trial.counts[events.targets], found[chosen], found[usual], co_visitation))


def _ndcg_at_10(ranks: Ranks) -> float:
    return float(gains(ranks, "ndcg_at_10").mean())


if __name__ == "__main__":
    typer.run(main)
