"""Models and baselines of an evaluation in the order of their NDCG@10, and the winner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from model.evaluation.comparison import Comparison, Difference, Variant
from model.evaluation.trial import Result
from model.metrics import HEADLINES, Interval, mean_interval_95

DECIDES = "ndcg_at_10"
FEW_USERS = 30  # with fewer, the bootstrap's intervals are too narrow


@dataclass(frozen=True)
class Standing:
    """One model or baseline, by the mean of its seeds.

    metrics      all metrics
    intervals    of the headline metrics, over users
    best_minus   how much better the best model is, by headline metric; None for that model itself
    """

    variant: Variant
    is_baseline: bool
    metrics: dict[str, float]
    intervals: dict[str, Interval]
    best_minus: dict[str, Difference] | None

    @property
    def name(self) -> str:
        """The name of the model or the baseline."""
        return self.variant.name

    @property
    def about(self) -> str:
        """A model's preset and its number of seeds, or a baseline's settings."""
        first, seeds = self.variant.results[0], len(self.variant.results)
        if self.is_baseline:
            return ", ".join(f"{name} {_setting_text(value)}" for name, value in first.settings.items())
        return first.name if seeds == 1 else f"{first.name}, {seeds} seeds"


@dataclass(frozen=True)
class Leaderboard:
    """All models and baselines of an evaluation.

    standings  the highest NDCG@10 first
    best       the best model
    rival      the best baseline; without baselines the next model; None if there is neither
    """

    standings: Sequence[Standing]
    best: Standing
    rival: Standing | None

    @classmethod
    def of(cls, models: Sequence[Variant], baselines: Sequence[Result]) -> Leaderboard:
        """Rank models, at least one, and baselines that were tested on the same events."""
        winner = max(models, key=lambda variant: variant.metrics()[DECIDES])
        entries = [*((model, False) for model in models), *((Variant(b.name, [b]), True) for b in baselines)]
        standings = [_standing(variant, is_baseline, winner) for variant, is_baseline in entries]
        standings.sort(key=lambda standing: -standing.metrics[DECIDES])
        best = next(standing for standing in standings if standing.variant is winner)
        others = [standing for standing in standings if standing is not best]
        rivals = [standing for standing in others if standing.is_baseline] or others
        return cls(standings, best, rivals[0] if rivals else None)

    @property
    def models(self) -> list[Standing]:
        """The models, best first."""
        return [standing for standing in self.standings if not standing.is_baseline]

    @property
    def verdict(self) -> str:
        """The winner, its margin and the certainty, in a sentence; others tell of unequal training and few users."""
        caveat = "" if self.rival is None else self.best.variant.unequal_to(self.rival.variant)
        users = len(self.best.variant.results[0].ranks)
        few = (
            f" With fewer than {FEW_USERS} users in the test, this says little about others."
            if users < FEW_USERS
            else ""
        )
        return f"{self._result}{caveat}{few}"

    @property
    def _result(self) -> str:
        best = f"{self.best.name} ({self.best.about})"
        if self.rival is None or self.rival.best_minus is None:
            value = f"{self.best.metrics[DECIDES]:.4f} (95% interval {_text(self.best.intervals[DECIDES])})"
            return f"{best} has an NDCG@10 of {value}, with nothing to compare it with."
        rival, found = f"{self.rival.name}, {self._place_of(self.rival)}", self.rival.best_minus[DECIDES]
        if found.sign == 0:
            margin = f"{found.difference:+.4f}, and the 95% interval, {_text(found.interval_95, '+.4f')}, contains 0"
            return f"No certain difference between {best} and {rival}: NDCG@10 differs by {margin}."
        low, high = sorted(map(abs, found.interval_95))
        margin = f"NDCG@10 is {abs(found.difference):.4f} higher (95% interval {low:.4f} to {high:.4f})"
        if found.sign > 0:
            return f"{best} beats {rival}: {margin}."
        return f"{rival}, beats {best}, {self._place_of(self.best)}: {margin}."

    @property
    def in_plain_words(self) -> str:
        """How often the best model and its rival list the actual next item, as a sentence."""
        users = len(self.best.variant.results[0].ranks)
        rival = "" if self.rival is None else f", {self.rival.name} for {_share(self.rival)}"
        found = f"{self.best.name} lists the item that came next among its first ten for {_share(self.best)}"
        return f"{found} of {users:,} users{rival}."

    def _place_of(self, standing: Standing) -> str:
        """Return the place of a standing among those of its kind, as text: it is the best one, or the second model."""
        noun = "baseline" if standing.is_baseline else "model"
        alike = sum(each.is_baseline == standing.is_baseline for each in self.standings)
        if standing is not self.best and not standing.is_baseline:
            return "the other model" if alike == 2 else f"the second best of {alike} models"
        return f"the only {noun}" if alike == 1 else f"the best of {alike} {noun}s"


def _standing(variant: Variant, is_baseline: bool, winner: Variant) -> Standing:
    intervals = {name: mean_interval_95(variant.gains(name)) for name in HEADLINES}
    best_minus = None if variant is winner else Comparison.of(winner, variant).differences
    return Standing(variant, is_baseline, variant.metrics(), intervals, best_minus)


def _share(standing: Standing) -> str:
    return f"{standing.metrics['hr_at_10']:.1%}"


def _text(interval: Interval, form: str = ".4f") -> str:
    return " to ".join(format(bound, form) for bound in interval)


def _setting_text(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
