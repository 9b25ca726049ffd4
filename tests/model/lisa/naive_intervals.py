"""Oracle for repurchase intervals: plain lists, one item at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import exp, log, sqrt
from statistics import NormalDist, mean
from typing import NamedTuple

from model.lisa.item_intervals import (
    INTERVAL_STRENGTH,
    LEAST_SCORE,
    LEAST_SPREAD,
    ORDER_DAYS,
    REPEAT_STRENGTH,
    SHRINKAGE,
    SUREST,
    Intervals,
)


class NaiveDue(NamedTuple):
    score: float
    times: int
    last_days: float
    interval_days: float


def gaps_of(days: Iterable[float]) -> list[float]:
    """Days between purchases of an item by a user, without those within an order."""
    return [later - sooner for sooner, later in pairwise(sorted(days)) if later - sooner > ORDER_DAYS]


def due(ages_days: Sequence[float], intervals: Intervals, row: int) -> NaiveDue:
    """How due one item is after purchases this many days ago."""
    log_days, spread, repeat_share = (float(part[row]) for part in intervals[:3])
    gaps = gaps_of(ages_days)
    median = exp((INTERVAL_STRENGTH * log_days + sum(map(log, gaps))) / (INTERVAL_STRENGTH + len(gaps)))
    again = min((REPEAT_STRENGTH * repeat_share + len(gaps)) / (REPEAT_STRENGTH + len(gaps)), SUREST)
    days = max(min(ages_days), ORDER_DAYS)
    normal = NormalDist(log(median), spread)
    density, survival = normal.pdf(log(days)) / days, 1 - normal.cdf(log(days))
    score = max(again * density / (1 - again + again * survival), LEAST_SCORE)
    return NaiveDue(score, 1 + len(gaps), min(ages_days), median)


def _shrunk(values: Sequence[tuple[int, float]], category: Sequence[int]) -> list[float]:
    whole = mean(value for _, value in values)

    def towards(prior: float, own: list[float]) -> float:
        return (sum(own) + SHRINKAGE * prior) / (len(own) + SHRINKAGE)

    of_category = {
        one: towards(whole, [value for item, value in values if category[item] == one]) for one in set(category)
    }
    by_item = [
        towards(of_category[category[row]], [value for item, value in values if item == row])
        for row in range(len(category))
    ]
    return [*by_item, whole]


def learned(
    rows: Iterable[tuple[int, int, float]], category: Sequence[int]
) -> tuple[list[float], list[float], list[float]] | None:
    """Learned statistics of purchases (user, item, day), in the order of the table's fields; None if empty."""
    bought: dict[tuple[int, int], list[float]] = defaultdict(list)
    days_of: dict[int, list[float]] = defaultdict(list)
    for user, item, day in rows:
        bought[user, item].append(day)
        days_of[user].append(day)
    returned = {user for user, days in days_of.items() if max(days) - min(days) > ORDER_DAYS}
    gaps = [(item, log(gap)) for (_, item), days in bought.items() for gap in gaps_of(days)]
    if not gaps:
        return None
    log_days = _shrunk(gaps, category)
    variance = _shrunk([(item, (gap - log_days[item]) ** 2) for item, gap in gaps], category)
    repeats = [(item, float(bool(gaps_of(days)))) for (user, item), days in bought.items() if user in returned]
    return log_days, [max(sqrt(one), LEAST_SPREAD) for one in variance], _shrunk(repeats, category)
