"""The report of an evaluation: metrics, intervals and ranks, with all that is needed to repeat it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.evaluation.comparison import Comparison, Variant
from model.evaluation.leaderboard import Leaderboard
from model.evaluation.trial import METRIC_SUFFIXES, Result, Trial
from model.metrics import (
    FREQUENCY_EDGES,
    HEADLINES,
    HISTORY_EDGES,
    Bucket,
    beyond_accuracy,
    buckets,
    interval_95,
    metrics,
)


@dataclass(frozen=True)
class Report:
    """The results of an evaluation, with all that is needed to repeat it.

    first      its first model is the subject of the report; it may have other seeds
    others     other models, compared with the first variant
    baselines  tested on the same events
    skipped    the reason for each baseline that was left out, by name
    """

    trial: Trial
    first: Variant
    others: list[Variant]
    baselines: list[Result]
    skipped: dict[str, str]

    @property
    def models(self) -> list[Result]:
        """The results of all seeds of the first variant."""
        return [*self.first.results]

    @property
    def ranks(self) -> NDArray[np.int64]:
        """The ranks of the first model: (Q,)."""
        return self.models[0].ranks

    @property
    def users(self) -> NDArray[np.int32]:
        """The user of each held-out event: (Q,)."""
        return self.trial.events.users

    @property
    def best_baseline(self) -> Result | None:
        """The baseline with the highest NDCG@10, if there are any."""
        return max(self.baselines, key=lambda result: result.ndcg_at_10, default=None)

    @property
    def leaderboard(self) -> Leaderboard:
        """All models and baselines, with the verdict."""
        return Leaderboard.of([self.first, *self.others], self.baselines)

    def by_history_length(self, result: Result) -> list[Bucket]:
        """Return the quality by the length of the histories."""
        return buckets(result.ranks, self.trial.events.histories.lengths, HISTORY_EDGES)

    def by_item_frequency(self, result: Result) -> list[Bucket]:
        """Return the quality by the training events of the held-out item; the first bucket has the cold items."""
        return buckets(result.ranks, self.trial.counts[self.trial.events.targets], FREQUENCY_EDGES)

    def drawn_users(self, count: int, seed: int) -> NDArray[np.int64]:
        """Select example users at random: ascending positions of held-out events, ``count`` of them or all."""
        drawn = np.random.default_rng(seed).permutation(len(self.ranks))[:count]
        return np.sort(drawn).astype(np.int64)

    def rules(self) -> dict[str, Any]:
        """Return the protocol: the measured model, the data and the rules."""
        trial, card = self.trial, self.trial.config.data
        return {
            "generation": self.models[0].settings["generation"],
            "protocol": trial.protocol,
            "data_sha256": card.sha256,
            "split": card.split,
            "train_on": card.train_on,
            "seen_rule": trial.seen_rule,
            "tie_rule": "against the model" if trial.protocol != "loo_paper100" else "in the model's favour",
            "users": len(self.ranks),
            "items": trial.items,
            "cold_items": int((trial.counts == 0).sum()),
            "cold_targets": int((trial.counts[trial.events.targets] == 0).sum()),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the metrics, named with their protocol, e.g. ``hr_at_10_full``; 95% intervals for the cutoff 10."""
        first = self.models[0]
        numbers = {
            "name": self.first.name,
            "verdict": self.leaderboard.verdict,
            **self.rules(),
            "event_options": first.event_options,
            **self._numbers(first),
            "by_history_length": [bucket._asdict() for bucket in self.by_history_length(first)],
            "by_item_frequency": [bucket._asdict() for bucket in self.by_item_frequency(first)],
        }
        if len(self.models) > 1:
            numbers["models"] = self._each_of(self.first)
            means, deviations = self.first.metrics(), self.first.deviations()
            spread = {name: {"mean": means[name], "standard_deviation": deviations[name]} for name in means}
            numbers["spread"] = self._named(spread)
        if self.others:
            numbers["other_models"] = {variant.name: self._compared(variant) for variant in self.others}
        if self.baselines or self.skipped:
            numbers["baselines"] = {
                result.name: {
                    "settings": result.settings,
                    **self._numbers(result),
                    "model_minus_baseline": self._minus(result),
                }
                for result in self.baselines
            }
            numbers["skipped_baselines"] = self.skipped
        return numbers

    def _each_of(self, variant: Variant) -> list[dict[str, Any]]:
        return [
            {**result.settings, "event_options": result.event_options, **self._numbers(result)}
            for result in variant.results
        ]

    def _compared(self, variant: Variant) -> dict[str, Any]:
        comparison = Comparison.of(self.first, variant)
        return {
            "metrics": self._named(variant.metrics()),
            "models": self._each_of(variant),
            "first_minus_it": self._differences(comparison),
            "verdict": comparison.verdict,
        }

    def _numbers(self, result: Result) -> dict[str, Any]:
        numbers: dict[str, Any] = {
            "metrics": self._named(metrics(result.ranks)),
            "interval_95": self._named({name: interval_95(result.ranks, name) for name in HEADLINES}),
        }
        if result.recommended is not None:
            numbers["recommended"] = beyond_accuracy(result.recommended, self.trial.counts)
        return numbers

    def _minus(self, baseline: Result) -> dict[str, Any]:
        return self._differences(Comparison.of(self.first, Variant(baseline.name, [baseline])))

    def _differences(self, comparison: Comparison) -> dict[str, Any]:
        return self._named({name: difference._asdict() for name, difference in comparison.differences.items()})

    def _named(self, values: dict[str, Any]) -> dict[str, Any]:
        return {f"{name}_{METRIC_SUFFIXES[self.trial.protocol]}": value for name, value in values.items()}

    def ranks_frame(self) -> pl.DataFrame:
        """Return a row for each model or baseline and held-out event; the generation of a baseline is null."""
        trial, ids = self.trial, self.trial.interactions
        targets = trial.events.targets
        events = pl.DataFrame(
            {
                "user_id": [ids.user_ids[user] for user in self.users],
                "item_id": [ids.item_ids[item] for item in targets],
                "history_length": trial.events.histories.lengths,
                "item_training_events": trial.counts[targets],
            }
        )
        return pl.concat(
            events.select(
                pl.lit(result.name).alias("scorer"),
                pl.lit(result.settings.get("generation"), pl.String).alias("generation"),
                pl.all(),
                pl.Series("rank", result.ranks),
            )
            for result in (*self._all_models(), *self.baselines)
        )

    def _all_models(self) -> Iterator[Result]:
        return (result for variant in (self.first, *self.others) for result in variant.results)

    def write_ranks(self, file: Path) -> None:
        """Write ``ranks_frame`` as Parquet, with the protocol in its metadata."""
        rules = {name: str(value) for name, value in self.rules().items() if name != "generation"}
        self.ranks_frame().write_parquet(file, metadata=rules)
