"""Measure what to buy again: whether a list begins with the items of a user's next order that were bought before.

One order is drawn for each user. It begins in the evaluated part of the time, and contains something that the user has
bought before. The user's own items of all earlier orders are ranked, as the service ranks them with ``mode=repeat``;
the targets are those that the order contains again. An order is what one user buys within an hour of the previous
purchase, or under one ``order_id``. For validation, which is 10 % of the time (a quantile of the events), intervals are
learned from the 80 % before it. With ``--test`` they are learned from the first 90 %, and tested on the last 10 %. Ties
count against the method. 95 % intervals resample users.

``repeat``                   the hazard of ``model.lisa.item_intervals``, with its constants
``frequency``                how often the user has bought the item
``frequency, then recency``  the same, with equally frequent items ordered by recency
``decayed frequency``        purchases decay with age, with the half-life that is best on validation
``recency``                  how recently the user has bought the item

HR@10 is the share of orders with a target among the ten, recall@10 the mean share of targets.

    python -m benchmarks.quality.repeat --data $LISAREC_DATA/completejourney [--test]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.machine import cpu
from benchmarks.quality.rotation import with_interval
from model.data.interactions import Interactions
from model.data.orders import NO_ORDER, has_purchases, order_numbers
from model.data.readers import ItemTexts, read_interactions, read_items
from model.lisa import item_intervals
from model.lisa.item_intervals import Intervals, Purchases, due_items, learned_intervals, rarest_categories
from storage.records import MAX_SEEN_ENTRIES

K = 10
TRAIN_SHARE, VALIDATION_SHARE = 0.8, 0.9
DAY_US = 86_400e6
HALF_LIVES_DAYS = (7.0, 14.0, 30.0, 60.0, 120.0)
CHANGES: tuple[dict[str, Any], ...] = (
    *({"INTERVAL_STRENGTH": value} for value in (0.5, 1.0, 4.0, 8.0)),
    *({"REPEAT_STRENGTH": value} for value in (0.25, 1.0, 2.0, 4.0)),
    *({"SHRINKAGE": value} for value in (5.0, 80.0)),
    *({"LEAST_SPREAD": value} for value in (0.8, 1.2)),
)
ANY_TIME = 1e-6  # weight of recency, which orders equally frequent items

console = Console(width=160)
Score = Callable[[Purchases], tuple[NDArray[np.int64], NDArray[np.float64]]]
"""The user's own items and their scores."""


class Question(NamedTuple):
    """What a user has bought when an order begins, and which of these items the order contains again."""

    bought: Purchases
    again: NDArray[np.int64]


class Found(NamedTuple):
    """The metrics of Q questions: (Q,) each."""

    hit: NDArray[np.float64]
    recall: NDArray[np.float64]
    ndcg: NDArray[np.float64]


class Bought(NamedTuple):
    """All purchases of a table, grouped by user, oldest first.

    user, item, time_us, order  (E,)
    starts        (users + 1,)  where each user's purchases begin, and the end
    category      (N,)  the rarest category of each item
    of_purchases  whether the table has events of that type
    """

    user: NDArray[np.int32]
    item: NDArray[np.int32]
    time_us: NDArray[np.int64]
    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    category: NDArray[np.int64]
    of_purchases: bool

    @classmethod
    def of(cls, interactions: Interactions, texts: ItemTexts) -> Bought:
        """Return the purchases of a table."""
        order = order_numbers(interactions)
        chosen = order != NO_ORDER
        user = interactions.user[chosen]
        starts = np.searchsorted(user, np.arange(len(interactions.user_ids) + 1)).astype(np.int64)
        category = rarest_categories([texts.categories.get(name, ()) for name in interactions.item_ids])
        events = user, interactions.item[chosen], interactions.timestamp_us[chosen], order[chosen]
        return cls(*events, starts, category, has_purchases(interactions))

    def learned(self, end_us: float) -> Intervals:
        """Learn the intervals from the purchases before this time, as training does."""
        known = self.time_us < end_us
        user, item, days = self.user[known], self.item[known], self.time_us[known] / DAY_US
        return learned_intervals(user, item, days, self.category, of_purchases=self.of_purchases)


def questions_of(bought: Bought, begin_us: float, end_us: float, most: int, seed: int) -> list[Question]:
    """Return one question for each of at most `most` users; users and orders are drawn."""
    draw, found = np.random.default_rng(seed), list[Question]()
    for user in draw.permutation(len(bought.starts) - 1).tolist():
        begin, end = bought.starts[user : user + 2].tolist()
        item, time_us, order = (part[begin:end] for part in (bought.item, bought.time_us, bought.order))
        firsts = np.unique(order, return_index=True)[1]
        asked = firsts[(begin_us <= time_us[firsts]) & (time_us[firsts] < end_us)]
        for first in draw.permutation(asked).tolist():
            before = int(np.searchsorted(time_us, time_us[first]))
            own = slice(max(0, before - MAX_SEEN_ENTRIES), before)
            again = np.intersect1d(item[order == order[first]], item[own]).astype(np.int64)
            if len(again):
                age_days = (time_us[first] - time_us[own]) / DAY_US
                found.append(Question(Purchases(item[own].astype(np.int64), age_days), again))
                break
        if len(found) == most:
            break
    return found


def repeat(intervals: Intervals) -> Score:
    """Return a function that scores items as the service does."""
    return lambda bought: due_items(bought, intervals)[:2]


def frequency(bought: Purchases) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Score items by how often they were bought."""
    due = due_items(bought, item_intervals.NO_INTERVALS)
    return due.items, due.times.astype(np.float64)


def frequency_then_recency(bought: Purchases) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Score items by how often they were bought, then by how recently."""
    due = due_items(bought, item_intervals.NO_INTERVALS)
    return due.items, due.times - ANY_TIME * due.age_days


def recency(bought: Purchases) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Score items by how recently they were bought."""
    due = due_items(bought, item_intervals.NO_INTERVALS)
    return due.items, -due.age_days


def decayed_frequency(half_life_days: float) -> Score:
    """Return a function that scores items by how often they were bought, with older purchases decayed."""

    def score(bought: Purchases) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        items, owner = np.unique(bought.item, return_inverse=True)
        return items, np.bincount(owner.ravel(), 0.5 ** (bought.age_days / half_life_days)).astype(np.float64)

    return score


def measured(questions: Sequence[Question], score: Score) -> Found:
    """Rank each user's own items; among ties, targets come last."""
    found = []
    discounts = 1 / np.log2(np.arange(2, K + 2))
    for one in questions:
        items, scores = score(one.bought)
        is_wanted = np.isin(items, one.again)
        listed = is_wanted[np.lexsort((is_wanted, -scores))][:K]
        ideal = discounts[: len(one.again)].sum()
        found.append((listed.any(), listed.sum() / len(one.again), discounts[: len(listed)] @ listed / ideal))
    return Found(*np.array(found, np.float64).reshape(-1, 3).T)


def choose(bought: Bought, most: int, seed: int) -> float:
    """Print the results on validation, and return the best half-life of decayed frequency."""
    first_us, last_us = _parts(bought)
    questions = questions_of(bought, first_us, last_us, most, seed)
    table = Table("validation", f"HR@{K}", f"recall@{K}", f"NDCG@{K}", title=f"{len(questions):,} users, {cpu()}")

    def add(name: str, score: Score) -> float:
        found = measured(questions, score)
        table.add_row(name, *(f"{part.mean():.4f}" for part in found))
        return float(found.ndcg.mean())

    variants: tuple[dict[str, Any], ...] = ({}, *CHANGES)
    for changed in variants:
        with patch.multiple(item_intervals, **{"SHRINKAGE": item_intervals.SHRINKAGE, **changed}):
            named = ", ".join(f"{name.lower()} {value:g}" for name, value in changed.items()) or "as served"
            add(f"repeat, {named}", repeat(bought.learned(first_us)))
    add("frequency", frequency)
    add("frequency, then recency", frequency_then_recency)
    add("recency", recency)
    by_half_life = {
        half_life: add(f"decayed frequency, {half_life:g} days", decayed_frequency(half_life))
        for half_life in HALF_LIVES_DAYS
    }
    console.print(table)
    return max(by_half_life, key=by_half_life.__getitem__)


def measure(bought: Bought, half_life_days: float, most: int, seed: int) -> Mapping[str, Found]:
    """Return the results of each method on the test."""
    last_us = _parts(bought)[1]
    questions = questions_of(bought, last_us, np.inf, most, seed + 1)
    methods: dict[str, Score] = {
        "repeat": repeat(bought.learned(last_us)),
        "frequency": frequency,
        "frequency, then recency": frequency_then_recency,
        f"decayed frequency, {half_life_days:g} days": decayed_frequency(half_life_days),
        "recency": recency,
    }
    return {name: measured(questions, score) for name, score in methods.items()}


def _parts(bought: Bought) -> tuple[float, float]:
    """Return when validation and test begin."""
    first_us, last_us = np.quantile(bought.time_us, [TRAIN_SHARE, VALIDATION_SHARE], method="lower").tolist()
    return first_us, last_us


def report(found: Mapping[str, Found]) -> None:
    """Print the results on the test, and the difference of the first method to each other one."""
    first = next(iter(found.values()))
    columns = (f"{name}@{K} (95 %)" for name in ("HR", "recall", "NDCG"))
    table = Table("test", *columns, f"repeat minus it, NDCG@{K} (paired 95 %)", title=f"{len(first.hit):,} users")
    for name, own in found.items():
        gain = "" if own is first else with_interval(first.ndcg - own.ndcg, "+")
        table.add_row(name, *map(with_interval, own), gain)
    console.print(table)


def main(
    data_dir: Annotated[Path, typer.Option("--data", help="Data directory whose timestamps are times.")],
    most: Annotated[int, typer.Option("--users", help="Users at most, of each part.")] = 5_000,
    seed: Annotated[int, typer.Option(help="Of the users and orders that are drawn.")] = 0,
    test: Annotated[bool, typer.Option("--test", help="Read the test too, which is for once.")] = False,
) -> None:
    """Compare on validation, and on the test."""
    interactions = read_interactions(data_dir)
    console.print(
        f"{data_dir.name}, table {interactions.sha256}; one order of each user, split by time 80/10/10, the user's own "
        f"items ranked, ties against the method, seed {seed}"
    )
    bought = Bought.of(interactions, read_items(data_dir))
    half_life_days = choose(bought, most, seed)
    if test:
        report(measure(bought, half_life_days, most, seed))


if __name__ == "__main__":
    typer.run(main)
