"""The comparison of models on the same held-out events: paired differences, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.evaluation.trial import Result
from model.metrics import HEADLINES, Interval, gains, mean_interval_95, metrics

JUDGED = {"hr_at_10": "HR@10", "ndcg_at_10": "NDCG@10"}  # the metrics of a verdict


class Difference(NamedTuple):
    """The difference of a metric's means between two models, with its interval over users."""

    difference: float
    interval_95: Interval

    @property
    def sign(self) -> int:
        """1 or -1 if the whole interval is above or below 0; else 0, because the difference may be chance."""
        low, high = self.interval_95
        return int(low > 0) - int(high < 0)

    def __str__(self) -> str:
        low, high = self.interval_95
        return f"{self.difference:+.4f}, 95% {low:+.4f} to {high:+.4f}"


@dataclass(frozen=True)
class Variant:
    """One way to train a model, with the results of its seeds on the same Q events.

    name     of its first model, different from those of other variants
    results  at least one
    """

    name: str
    results: Sequence[Result]

    def unequal_to(self, other: Variant) -> str:
        """A sentence, after a space, that says so if the two learned from different events; else nothing."""
        own, theirs = (one.results[0].event_options for one in (self, other))
        if own == theirs:
            return ""
        return f" They learned from different events: {self.name} with {own}, {other.name} with {theirs}."

    def metrics(self) -> dict[str, float]:
        """Return every metric, averaged over the seeds."""
        of_each = [metrics(result.ranks) for result in self.results]
        return {name: float(np.mean([each[name] for each in of_each])) for name in of_each[0]}

    def deviations(self) -> dict[str, float]:
        """Return the standard deviation of every metric over the seeds, at least two."""
        of_each = [metrics(result.ranks) for result in self.results]
        return {name: float(np.std([each[name] for each in of_each], ddof=1)) for name in of_each[0]}

    def gains(self, metric: str) -> NDArray[np.float64]:
        """Return each event's contribution to the metric, averaged over the seeds: (Q,)."""
        of_each = np.stack([gains(result.ranks, metric) for result in self.results])
        mean: NDArray[np.float64] = of_each.mean(axis=0).round(12)  # values that differ by rounding errors become equal
        return mean


@dataclass(frozen=True)
class Comparison:
    """The differences between the first model and another one, by metric.

    caveat  a sentence, after a space, if they learned from different events
    """

    first: str
    other: str
    differences: dict[str, Difference]
    caveat: str

    @classmethod
    def of(cls, first: Variant, other: Variant) -> Comparison:
        """Compare two variants on the events that both were tested on.

        Intervals are paired: each bootstrap sample of users has the ranks of both variants. They do not include the
        variation between seeds.
        """
        differences = {}
        for name in HEADLINES:
            by_user = first.gains(name) - other.gains(name)
            differences[name] = Difference(float(by_user.mean()), mean_interval_95(by_user))
        return cls(first.name, other.name, differences, first.unequal_to(other))

    @property
    def verdict(self) -> str:
        """The result of the comparison as a sentence, and a second one if they learned from different events."""
        found: dict[int, list[str]] = {1: [], -1: [], 0: []}
        for name, label in JUDGED.items():
            difference = self.differences[name]
            found[difference.sign].append(f"{label} ({difference})")
        better, worse, unclear = (" and ".join(found[sign]) for sign in (1, -1, 0))
        if not better and not worse:
            return (
                f"{self.first} and {self.other} do not differ significantly: in {unclear} the difference may be "
                f"chance.{self.caveat}"
            )
        parts = [f"{word} in {names}" for word, names in (("better", better), ("worse", worse)) if names]
        parts[0] = parts[0].replace(" in ", f" than {self.other} in ", 1)
        rest = f"; in {unclear} the difference may be chance" if unclear else ""
        return f"{self.first} is {' and '.join(parts)}{rest}.{self.caveat}"
