"""The gate of a round: decides whether the new model may replace the active one, and by which metric.

NDCG@10 measures how well the held-out events are predicted, regardless of their value. Value-weighted HR@10 is the
share of their value among the first ten items: an event with value 100 counts a hundred times as much as one with value
1. If held-out events have values, both are measured, and the operator chooses which one decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from model.metrics import Interval, difference_interval_95, metrics, value_difference_interval_95, value_hit_rate

MIN_VALUED_EVENTS = 200  # among the held-out ones; with fewer, a few large values decide, and intervals are too narrow

Criterion = Literal["ndcg", "value"]
Ranks = NDArray[np.int64]
Values = NDArray[np.float64]


@dataclass(frozen=True)
class ModelComparison:
    """Whether the new model may replace the served one, and the metrics of both.

    valued_events  the number of held-out events with a value above 0; if there are none, the metrics of value are None
    decided_by     the metric that decided
    """

    passes: bool
    reason: str
    ndcg_at_10: float
    served_ndcg_at_10: float
    difference_interval_95: Interval
    valued_events: int = 0
    value_hr_at_10: float | None = None
    served_value_hr_at_10: float | None = None
    value_difference_interval_95: Interval | None = None
    decided_by: Criterion = "ndcg"


@dataclass(frozen=True)
class Gate:
    """Compares models on held-out events.

    values     (Q,) the value of each event; NaN for events without one
    criterion  the metric that the operator chose
    max_loss   the largest accepted loss, as a share of the active model's quality, if the loss is not significant
    """

    values: Values
    criterion: Criterion
    max_loss: float

    def compare(self, new: Ranks, served: Ranks, *, is_first: bool) -> ModelComparison:
        """Compare the ranks of the held-out events. The first model must be better than popular items.

        A later model may be worse than the active one, but not significantly, and by at most `max_loss`.
        """
        quality, served_quality = (metrics(each)["ndcg_at_10"] for each in (new, served))
        interval, decided_by = difference_interval_95(new, served, "ndcg_at_10"), self.decided_by
        passes = self._passes(quality, served_quality, interval, is_first=is_first)
        baseline = "popular items" if is_first else "the active model"
        reason = f"NDCG@10 {quality:.4f}, {baseline} {served_quality:.4f}, on {len(new):,} users"
        by_hits = ModelComparison(passes, f"{reason}{self._note}", quality, served_quality, interval)
        if not self.valued_events:
            return by_hits
        worth, served_worth = (value_hit_rate(each, self.values) for each in (new, served))
        worth_interval = value_difference_interval_95(new, served, self.values)
        if decided_by == "value":
            passes = self._passes(worth, served_worth, worth_interval, is_first=is_first)
        of_value = f"value-weighted HR@10 {worth:.4f}, {baseline} {served_worth:.4f}"
        return replace(
            by_hits,
            passes=passes,
            reason=f"{reason}; {of_value}, on {self.valued_events:,} events with a value{self._note}",
            valued_events=self.valued_events,
            value_hr_at_10=worth,
            served_value_hr_at_10=served_worth,
            value_difference_interval_95=worth_interval,
            decided_by=decided_by,
        )

    def fell(self, final: Ranks, candidate: Ranks) -> str | None:
        """Return how the model trained on all events is worse than the candidate, or None if it is within the limit."""
        found, before = (self._quality(each) for each in (final, candidate))
        name = "value-weighted HR@10" if self.decided_by == "value" else "NDCG@10"
        return None if found >= before * (1 - self.max_loss) else f"its {name} fell to {found:.4f}"

    @property
    def valued_events(self) -> int:
        """The number of held-out events with a value above 0."""
        return int((self.values > 0).sum())

    @property
    def decided_by(self) -> Criterion:
        """The deciding metric: the operator's choice, or NDCG if there are too few events with a value."""
        return "value" if self.criterion == "value" and self.valued_events >= MIN_VALUED_EVENTS else "ndcg"

    @property
    def _note(self) -> str:
        if self.criterion == "ndcg":
            return ""
        if self.decided_by == "value":
            return "; decided by value-weighted HR@10"
        return f"; decided by NDCG@10, because a decision by value needs {MIN_VALUED_EVENTS} events with a value"

    def _quality(self, ranks: Ranks) -> float:
        return value_hit_rate(ranks, self.values) if self.decided_by == "value" else metrics(ranks)["ndcg_at_10"]

    def _passes(self, new: float, served: float, interval: Interval, *, is_first: bool) -> bool:
        return new > served if is_first else interval[1] >= 0 and new >= served * (1 - self.max_loss)
