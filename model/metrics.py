"""Metrics as pure functions of ranks, which begin at 1, and of the recommended items; with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CUTOFFS = (1, 5, 10, 50)
HEADLINES = ("hr_at_10", "ndcg_at_10", "mrr_at_10")  # those that get intervals
BOOTSTRAP_DRAWS = 1000
HISTORY_EDGES = (1, 5, 10, 20, 50, 100, 200, 500)
FREQUENCY_EDGES = (0, 1, 5, 20, 50, 100, 200, 500, 1000, 2000)

Interval = tuple[float, float]


class Bucket(NamedTuple):
    """Quality where a property of the held-out event lies within ``first`` to ``last``, both included; None: open."""

    first: int
    last: int | None
    users: int
    hr_at_10: float
    hr_at_10_interval_95: Interval
    ndcg_at_10: float
    ndcg_at_10_interval_95: Interval

    @property
    def label(self) -> str:
        """The range of the bucket, for people."""
        if self.last is None:
            return f"{self.first:,} or more"
        return f"{self.first:,}" if self.first == self.last else f"{self.first:,} to {self.last:,}"


def gains(ranks: NDArray[np.int64], metric: str) -> NDArray[np.float64]:
    """Return each rank's contribution to a metric such as ``ndcg_at_10``, which is their mean: (Q,)."""
    name, cutoff = metric.split("_at_")
    value = {"hr": np.ones(len(ranks)), "ndcg": 1 / np.log2(ranks + 1), "mrr": 1 / ranks}[name]
    return np.where(ranks <= int(cutoff), value, 0.0)


def metrics(ranks: NDArray[np.int64]) -> dict[str, float]:
    """Compute hit rate, NDCG and MRR at the cutoffs from ranks (Q,)."""
    names = [f"{name}_at_{cutoff}" for cutoff in CUTOFFS for name in ("hr", "ndcg", "mrr")]
    return {name: float(gains(ranks, name).mean()) for name in names}


def interval_95(ranks: NDArray[np.int64], metric: str, draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> Interval:
    """Compute the bootstrap interval of a metric over users: the 2.5 and 97.5 percentiles."""
    return mean_interval_95(gains(ranks, metric), draws, seed)


def difference(ranks: NDArray[np.int64], others: NDArray[np.int64], metric: str) -> float:
    """Compute how much better the first ranks are than the others, of the same held-out events."""
    return float((gains(ranks, metric) - gains(others, metric)).mean())


def difference_interval_95(ranks: NDArray[np.int64], others: NDArray[np.int64], metric: str, seed: int = 0) -> Interval:
    """Compute the paired bootstrap interval of ``difference``: a draw of users takes both ranks of each."""
    return mean_interval_95(gains(ranks, metric) - gains(others, metric), seed=seed)


def mean_interval_95(values: NDArray[np.float64], draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> Interval:
    """Compute the bootstrap interval of the mean of what each user adds to it (Q,), which takes few distinct values."""
    # so drawing users is drawing how often each value occurs
    distinct, counts = np.unique(values, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(len(values), counts / len(values), size=draws)
    low, high = np.percentile(drawn @ distinct / len(values), [2.5, 97.5])
    return float(low), float(high)


def value_hit_rate(ranks: NDArray[np.int64], values: NDArray[np.float64], cutoff: int = 10) -> float:
    """Compute the value-weighted hit rate: the share of the held-out events' value whose items are among the first.

    values  (Q,) in any unit; events without a value, NaN, or with one of 0 or less weigh nothing

    Returns 0 where no event weighs anything.
    """
    weights = np.where(values > 0, values, 0.0)
    total = weights.sum()
    return float(weights[ranks <= cutoff].sum() / total) if total else 0.0


def value_difference_interval_95(
    ranks: NDArray[np.int64],
    others: NDArray[np.int64],
    values: NDArray[np.float64],
    draws: int = BOOTSTRAP_DRAWS,
    seed: int = 0,
) -> Interval:
    """Compute the paired bootstrap interval of the difference of two value-weighted hit rates at 10.

    A draw of users takes their values along, so that the interval is wide where few events have most of the value.
    """
    weighs = values > 0
    weights, better = values[weighs], (ranks[weighs] <= 10).astype(np.int64) - (others[weighs] <= 10)
    if not len(weights):
        return 0.0, 0.0
    rng = np.random.default_rng(seed)
    differences = []
    for _ in range(draws):
        drawn = rng.integers(0, len(weights), len(weights))
        differences.append(weights[drawn] @ better[drawn] / weights[drawn].sum())
    low, high = np.percentile(differences, [2.5, 97.5])
    return float(low), float(high)


def buckets(ranks: NDArray[np.int64], values: NDArray[np.integer], edges: Sequence[int]) -> list[Bucket]:
    """Compute the quality by a property of the held-out events.

    values  (Q,)  e.g. the length of each history
    edges         where buckets begin, ascending; the last one is open, those without an event are left out
    """
    results = []
    bucket_of = np.searchsorted(edges, values, side="right") - 1
    for place, (first, following) in enumerate(pairwise([*edges, None])):
        chosen = ranks[bucket_of == place]
        if first is None or not len(chosen):
            continue
        hit_rate, ndcg = float(gains(chosen, "hr_at_10").mean()), float(gains(chosen, "ndcg_at_10").mean())
        intervals = interval_95(chosen, "hr_at_10"), interval_95(chosen, "ndcg_at_10")
        last = None if following is None else following - 1
        results.append(Bucket(first, last, len(chosen), hit_rate, intervals[0], ndcg, intervals[1]))
    return results


def beyond_accuracy(recommended: NDArray[np.integer], counts: NDArray[np.int64]) -> dict[str, float]:
    """Measure which items are recommended.

    recommended  (Q, k)  items, best first, k at least the largest cutoff or the whole catalogue; -1 fills the rest
    counts       (N,)    training events of each item

    coverage_at_k             share of the catalogue that stands in at least one user's top k
    novelty_at_10             mean self-information, in bits, of the top 10: -log2 of an item's share of the training
                              events, an item without any counting as one event (Vargas and Castells, 2011)
    mean_popularity_at_10     mean training events of the top 10
    """
    results = {f"coverage_at_{cutoff}": _coverage(recommended[:, :cutoff], len(counts)) for cutoff in CUTOFFS}
    top = recommended[:, :10]
    popularity = counts[top[top >= 0]]
    information = -np.log2(np.maximum(popularity, 1) / max(int(counts.sum()), 1))
    empty = not len(popularity)
    results["novelty_at_10"] = 0.0 if empty else float(information.mean())
    results["mean_popularity_at_10"] = 0.0 if empty else float(popularity.mean())
    return results


def _coverage(recommended: NDArray[np.integer], items: int) -> float:
    return len(np.unique(recommended[recommended >= 0])) / items
