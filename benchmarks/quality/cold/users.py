"""Compare rankings for users with few events: personal, popular, trending, and personal blended with trending.

Each validation event of the model's own split is ranked as if its user had only the newest n events before it. The
trending ranking counts events with a half-life of HALF_LIFE_S, and popularity as a prior. The blend scores an item ``w
/ (1 + its personal rank) + (1 - w) / (1 + its trending rank)`` with w = n / (n + c). All choices of the service were
made here, on validation events; test events are not used. Ties count against the scorer.

    python -m benchmarks.quality.cold.users --model models/online-retail --data $LISAREC_DATA/online-retail
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from app.recommendation.ranking.trending import PRIOR_EVENTS
from benchmarks.machine import cpu
from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from model.data.interactions import Histories, Interactions
from model.evaluation.evaluate import prepare_trial
from model.evaluation.trial import model_scorer
from model.metrics import difference, difference_interval_95, metrics
from storage.items.trends import HALF_LIFE_S

HISTORIES = (0, 1, 2, 3, 5, 10)
CONSTANTS = (0.03, 0.1, 0.3, 1.0)  # c
PRIORS = (0.0, 10.0, 100.0, 1000.0)  # the weight, in events, of the popularity in training
BATCH = 256
DAY_S = 86_400.0

console = Console()


def recent_counts(interactions: Interactions, positions: NDArray[np.int64], half_life_s: float) -> NDArray[np.float64]:
    """Return each item's decayed number of events before each position: (positions, items)."""
    counts, since_us = np.zeros(len(interactions.item_ids)), int(interactions.timestamp_us.min())
    index_of = {int(position): index for index, position in enumerate(positions)}
    found = np.zeros((len(positions), len(counts)))
    for position in np.argsort(interactions.timestamp_us, kind="stable").tolist():
        half_lives = (int(interactions.timestamp_us[position]) - since_us) / (half_life_s * 1e6)
        if half_lives > 30:
            counts, since_us, half_lives = counts * 2.0**-half_lives, int(interactions.timestamp_us[position]), 0.0
        if position in index_of:
            found[index_of[position]] = counts * 2.0**-half_lives
        counts[interactions.item[position]] += 2.0**half_lives
    return found


def personal_scores(
    model: Artifact, interactions: Interactions, positions: NDArray[np.int64], newest: int
) -> NDArray[np.float32]:
    """Return the model's scores, from only the `newest` events before each position: (positions, items)."""
    firsts = np.maximum(interactions.starts[interactions.user[positions]], positions - newest)
    histories = [interactions.item[first:end] for first, end in zip(firsts, positions, strict=True)]
    scorer = model_scorer(model)
    blocks = (histories[begin : begin + BATCH] for begin in range(0, len(histories), BATCH))
    return np.concatenate([scorer(Histories.joined(block)) for block in blocks])


def ranks_of(scores: NDArray[np.floating], targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank of each target among its scores; ties count against it."""
    own = scores[np.arange(len(targets)), targets][:, None]
    ranks: NDArray[np.int64] = (scores >= own).sum(axis=1)
    return ranks


def item_ranks(scores: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return the rank of each item, from 1: (Q, N)."""
    found = np.empty(scores.shape, np.float32)
    order = np.argsort(-scores, axis=1, kind="stable")
    np.put_along_axis(found, order, np.arange(1, scores.shape[1] + 1, dtype=np.float32)[None], axis=1)
    return found


def format_metrics(ranks: NDArray[np.int64]) -> str:
    """Return HR@10 and NDCG@10 as text."""
    found = metrics(ranks)
    return f"{found['hr_at_10']:.4f} / {found['ndcg_at_10']:.4f}"


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    data_dir: Annotated[Path, typer.Option("--data", help="The data directory that it was trained on.")],
    most: Annotated[int, typer.Option(help="Validation events.")] = 1200,
) -> None:
    """Compare the rankings."""
    trained = model_directory.load(model)
    trial = prepare_trial(trained, data_dir, None, "none", rows_of_model=True)
    interactions = trial.interactions
    if list(trained.items.ids) != list(interactions.item_ids):
        raise typer.BadParameter("the model has other items than the data", param_hint="--model")
    positions = np.random.default_rng(0).permutation(trial.parts.validation)[:most]
    targets = interactions.item[positions].astype(np.int64)
    popular = np.tile(trial.counts / trial.counts.sum(), (len(positions), 1))
    trending = popular
    if not interactions.time_is_order:
        for half_life_s in (DAY_S, HALF_LIFE_S, 30 * DAY_S):
            recent = recent_counts(interactions, positions, half_life_s)
            results = [
                f"prior {prior:g}: {format_metrics(ranks_of(recent + prior * popular, targets))}" for prior in PRIORS
            ]
            console.print(f"no event, trending, halving in {half_life_s / DAY_S:g} days: {'; '.join(results)}")
        trending = recent_counts(interactions, positions, HALF_LIFE_S) + PRIOR_EVENTS * popular
    table = Table(title=f"{cpu()}, {len(positions):,} validation events, HR@10 / NDCG@10")
    for name in ("events", "popular", "trending", "personalised", *(f"blended, c = {c:g}" for c in CONSTANTS)):
        table.add_column(name)
    table.add_row("0", format_metrics(ranks_of(popular, targets)), format_metrics(ranks_of(trending, targets)))
    trending_ranks = item_ranks(trending)
    for newest in HISTORIES[1:]:
        scores = personal_scores(trained, interactions, positions, newest)
        own, own_ranks = ranks_of(scores, targets), item_ranks(scores)
        row = [str(newest), "", "", format_metrics(own)]
        for constant in CONSTANTS:
            weight = newest / (newest + constant)
            blended = ranks_of(weight / (1 + own_ranks) + (1 - weight) / (1 + trending_ranks), targets)
            low, high = difference_interval_95(blended, own, "ndcg_at_10")
            row.append(
                f"{format_metrics(blended)} ({difference(blended, own, 'ndcg_at_10'):+.4f}, {low:+.4f} to {high:+.4f})"
            )
        table.add_row(*row)
    console.print("blended: in brackets NDCG@10 minus personalised, and its paired 95 % interval")
    Console(width=240).print(table)


if __name__ == "__main__":
    typer.run(main)
