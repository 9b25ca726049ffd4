"""Simulate shops whose arms are known to be alike, or to differ, and count how often `lisarec compare` is wrong.

A user of a shop looks at lists on some of the days: few do often, most hardly ever (log-normal), and each has another
inclination to click (beta), so a user's clicks are alike. Some clicks are followed by a purchase with a log-normal
value. Half of the users, or a share of them, see the other arm, whose lists they click by the effect more often.

Coverage at the end: how often the 95% interval contains the true difference, over the shops with enough users; beside
it, that of an interval that takes lists as independent. Peeking: in how many shops without a difference a look on any
day finds one, by the 95% interval and by the verdict.

    python -m benchmarks.quality.experiments
"""

from __future__ import annotations

from collections import Counter
from math import sqrt
from typing import Annotated, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray
from rich.table import Table

from app.cli.console import print_table
from app.jobs.reports.experiment_result import NORMAL_95, difference
from benchmarks.machine import cpu

DAYS = 20
BUYS = 0.15


Days = NDArray[np.float64]  # (days, users), what each user has done until the end of each day


class Simulated(NamedTuple):
    """A kind of shop: its users, how unequal their activity is, the share of the other arm, and its effect."""

    users: int
    spread: float = 1.2
    share: float = 0.5
    effect: float = 0.0


class Shop(NamedTuple):
    """What the users of one shop have done, and who sees the other arm."""

    is_other: NDArray[np.bool_]
    lists: Days
    measures: dict[str, Days]


KINDS = (
    Simulated(2_000),
    Simulated(10_000),
    Simulated(10_000, spread=1.8),
    Simulated(10_000, share=0.1),
    Simulated(10_000, effect=0.2),
)


def simulate(kind: Simulated, rng: np.random.Generator) -> Shop:
    """Return a shop of this kind."""
    activity = rng.lognormal(0.5, kind.spread, kind.users) / DAYS
    lists = rng.poisson(activity, (DAYS, kind.users))
    is_other = rng.random(kind.users) < kind.share
    clicks = rng.binomial(lists, rng.beta(1, 19, kind.users) * np.where(is_other, 1 + kind.effect, 1))
    purchases = rng.binomial(clicks, BUYS)
    done = {"clicks": clicks, "purchases": purchases, "value": purchases * rng.lognormal(3, 1, purchases.shape)}
    measures = {name: each.cumsum(0).astype(float) for name, each in done.items()}
    if not kind.effect:  # else the ratio of users with a click is not that of their clicks
        measures["users with a click"] = (measures["clicks"] > 0).astype(float)
    return Shop(is_other, lists.cumsum(0).astype(float), measures)


def holds_by_lists(shop: Shop, effect: float) -> bool:
    """Return whether the usual interval of two shares of clicked lists, as if lists were independent, holds."""
    lists, clicks = shop.lists[-1], shop.measures["clicks"][-1]
    rates, variance = [], 0.0
    for chosen in (shop.is_other, ~shop.is_other):
        rates.append(clicks[chosen].sum() / lists[chosen].sum())
        variance += rates[-1] * (1 - rates[-1]) / lists[chosen].sum()
    return bool(abs(rates[0] - rates[1] * (1 + effect)) <= NORMAL_95 * sqrt(variance))


def count(kind: Simulated, shops: int, seed: int) -> dict[str, Counter[str]]:
    """Return by measure in how many of the shops an interval held, and in how many a look found a difference."""
    rng, counts = np.random.default_rng(seed), dict[str, Counter[str]]()
    for _ in range(shops):
        shop = simulate(kind, rng)
        for name, days in shop.measures.items():
            looks = [
                difference(
                    day[shop.is_other & (day > 0)].tolist(),
                    day[~shop.is_other & (day > 0)].tolist(),
                    kind.share / (1 - kind.share),
                )
                for day in days
            ]
            counted = counts.setdefault(name, Counter())
            if (last := looks[-1]) is not None:
                counted["judged"] += 1
                counted["held"] += last.interval_95[0] <= kind.effect <= last.interval_95[1]
                counted["found"] += any(one is not None and one.is_significant for one in looks)
                counted["decided"] += any(one is not None and one.is_decided for one in looks)
        counts["clicks"]["held by lists"] += holds_by_lists(shop, kind.effect)
    return counts


def main(
    shops: Annotated[int, typer.Option(help="Simulated shops of each kind.")] = 1_000,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Print how often the intervals hold, and how often looking every day finds a difference."""
    columns = ("measure", "shops judged", "95% interval holds", "as if lists were independent")
    table = Table("shop", *columns, "a daily look finds a difference", "and calls it decided", caption=cpu())
    for kind in KINDS:
        about = f"{kind.users:,} users, spread {kind.spread}, share {kind.share}, effect {kind.effect:+.0%}"
        for name, counted in count(kind, shops, seed).items():
            judged = counted["judged"]
            if judged:
                shares = [f"{counted[what] / judged:.1%}" for what in ("held", "found", "decided")]
                by_lists = f"{counted['held by lists'] / shops:.1%}" if name == "clicks" else ""
                table.add_row(about, name, f"{judged:,}", shares[0], by_lists, *shares[1:])
    print_table(table)


if __name__ == "__main__":
    typer.run(main)
