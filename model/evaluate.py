"""The evaluation protocols: one model, or several seeds of it, beside the baselines on the same held-out events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model import artifact
from model.artifact import Artifact
from model.baselines import Baseline, TooManyItems
from model.config import DataCard, Protocol, Recipe, SeenRule
from model.data import DataError, Interactions, training_histories
from model.data_readers import read_interactions
from model.data_splits import Split, split
from model.engine import Engine
from model.mechanisms import train as mechanisms
from model.mechanisms.train import Compared as Compared
from model.metrics import (
    CUTOFFS,
    FREQUENCY_EDGES,
    HEADLINES,
    HISTORY_EDGES,
    Bucket,
    beyond_accuracy,
    buckets,
    difference,
    difference_interval_95,
    interval_95,
    metrics,
)
from model.ranking import (
    PAPERS_DRAW,
    Draw,
    HeldOut,
    Scorer,
    from_states,
    held_out,
    ranks_and_recommendations,
    ranks_full,
    ranks_sampled,
)
from model.sequential import Judge, Neural, Say

JUDGING_USERS = 5_000
SUFFIXES: dict[Protocol, str] = {
    "loo_full": "full",
    "loo_sampled100": "sampled100",
    "loo_paper100": "paper100",
    "temporal": "temporal",
}
SAMPLED: dict[Protocol, Draw] = {"loo_sampled100": Draw(), "loo_paper100": PAPERS_DRAW}


@dataclass(frozen=True)
class Result:
    """How one scorer did.

    settings     what made it: a model's generation and seed, a baseline's hyperparameters
    ranks        (Q,)
    recommended  (Q, 50) items, best first, -1 where there are fewer; None where only some candidates were ranked
    """

    name: str
    settings: dict[str, Any]
    ranks: NDArray[np.int64]
    recommended: NDArray[np.int32] | None

    @property
    def ndcg_at_10(self) -> float:
        return metrics(self.ranks)["ndcg_at_10"]


@dataclass(frozen=True)
class Trial:
    """Held-out events and the rules by which one scorer after the other is tested on them.

    counts  (N,)  training events of each item
    """

    protocol: Protocol
    seen_rule: SeenRule
    config: Recipe
    interactions: Interactions
    parts: Split
    events: HeldOut
    counts: NDArray[np.int64]

    @property
    def items(self) -> int:
        return len(self.interactions.item_ids)

    def test(self, name: str, settings: dict[str, Any], scorer: Scorer) -> Result:
        """Rank the held-out events by the scorer, as the protocol says."""
        if self.protocol in SAMPLED:
            return Result(name, settings, ranks_sampled(self.events, scorer, 0, SAMPLED[self.protocol]), None)
        k = min(max(CUTOFFS), self.items)
        return Result(name, settings, *ranks_and_recommendations(self.events, scorer, self.seen_rule, k))

    def test_model(self, model: Artifact | Compared) -> Result:
        """Test a model; raises DataError for one that was trained on other events than the trial allows."""
        _require_honest(model.config.data, self.interactions, self.protocol)
        if model.config.data.train_on != self.config.data.train_on:
            raise DataError(f"the models were trained on different events: {model.name!r} with another --train-on")
        if _without_seed(model.config) != _without_seed(self.config):
            raise DataError(f"the models are not seeds of one: {model.name!r} was trained with other settings")
        settings = {"generation": model.tag, "seed": model.config.training.seed}
        return self.test(model.config.model.preset, settings, scorer_of(model))

    def test_baseline(self, name: str, grid: Sequence[Baseline], say: Say = lambda _: None) -> Result:
        """Test the baseline of the grid that validation chooses, on the training events that the model had.

        raises TooManyItems
        """
        if len(grid) == 1:
            return self.test(name, asdict(grid[0]), self._fit(grid[0], say))
        baseline, scorer = self._best(grid)
        if self.config.data.train_on != "train":
            scorer = self._fit(baseline, say)
        return self.test(name, asdict(baseline), scorer)

    def _fit(self, baseline: Baseline, say: Say) -> Scorer:
        histories = training_histories(self.interactions, self.parts.train, self.config.event_weights)
        if not isinstance(baseline, Neural):
            return baseline.fit(histories, self.items)
        if self.config.data.train_on != "train" or not len(self.parts.validation):
            return baseline.fit(histories, self.items, say)
        return baseline.fit(histories, self.items, say, self._judge())

    def _judge(self) -> Judge:
        """Validation NDCG@10 over the whole catalogue, of at most 5,000 users, the same at every call."""
        rng = np.random.default_rng(0)
        positions = rng.permutation(self.parts.validation)[:JUDGING_USERS]
        events = held_out(self.interactions, np.sort(positions), self.config)
        return lambda scorer: metrics(ranks_full(events, scorer, self.seen_rule))["ndcg_at_10"]

    def _best(self, grid: Sequence[Baseline]) -> tuple[Baseline, Scorer]:
        """The best validation NDCG@10, over the whole catalogue and without training on a validation event."""
        weights = self.config.event_weights
        parts = split(self.interactions, self.config.data.split)
        histories = training_histories(self.interactions, parts.train, weights)
        validation = held_out(self.interactions, parts.validation, self.config)
        best, best_quality = None, -1.0
        for baseline in grid:
            scorer, quality = baseline.fit(histories, self.items), 0.0
            if len(validation):
                quality = metrics(ranks_full(validation, scorer, self.seen_rule))["ndcg_at_10"]
            if quality > best_quality:
                best, best_quality = (baseline, scorer), quality
        assert best is not None
        return best


@dataclass(frozen=True)
class Report:
    """What an evaluation came to, with all that is needed to repeat it.

    models     one result for each model; the first is the one that the report is about, more are its other seeds
    baselines  on the same events
    skipped    why a baseline is not there, by name
    """

    trial: Trial
    models: list[Result]
    baselines: list[Result]
    skipped: dict[str, str]

    @property
    def ranks(self) -> NDArray[np.int64]:
        """Ranks of the first model: (Q,)."""
        return self.models[0].ranks

    @property
    def users(self) -> NDArray[np.int32]:
        """(Q,)"""
        return self.trial.events.users

    @property
    def best_baseline(self) -> Result | None:
        """The baseline of the highest NDCG@10, if there are any."""
        return max(self.baselines, key=lambda result: result.ndcg_at_10, default=None)

    def by_history_length(self, result: Result) -> list[Bucket]:
        return buckets(result.ranks, self.trial.events.histories.lengths, HISTORY_EDGES)

    def by_item_frequency(self, result: Result) -> list[Bucket]:
        """By the training events of the held-out item; the first bucket are the cold ones."""
        return buckets(result.ranks, self.trial.counts[self.trial.events.targets], FREQUENCY_EDGES)

    def spread(self) -> dict[str, dict[str, float]]:
        """Mean and standard deviation of every metric over the models."""
        found = [metrics(result.ranks) for result in self.models]
        values = {name: [each[name] for each in found] for name in found[0]}
        return {
            name: {"mean": float(np.mean(each)), "standard_deviation": float(np.std(each, ddof=1))}
            for name, each in values.items()
        }

    def rules(self) -> dict[str, Any]:
        """What was measured on what, and how."""
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
        """Metrics with their protocol in the name, e.g. ``hr_at_10_full``, and 95 % intervals for the cutoff 10."""
        first = self.models[0]
        found = {
            **self.rules(),
            **self._numbers(first),
            "by_history_length": [bucket._asdict() for bucket in self.by_history_length(first)],
            "by_item_frequency": [bucket._asdict() for bucket in self.by_item_frequency(first)],
        }
        if len(self.models) > 1:
            found["models"] = [{**result.settings, **self._numbers(result)} for result in self.models]
            found["spread"] = self._named(self.spread())
        if self.baselines or self.skipped:
            found["baselines"] = {
                result.name: {
                    "settings": result.settings,
                    **self._numbers(result),
                    "model_minus_baseline": self._differences(result),
                }
                for result in self.baselines
            }
            found["skipped_baselines"] = self.skipped
        return found

    def _numbers(self, result: Result) -> dict[str, Any]:
        numbers: dict[str, Any] = {
            "metrics": self._named(metrics(result.ranks)),
            "interval_95": self._named({name: interval_95(result.ranks, name) for name in HEADLINES}),
        }
        if result.recommended is not None:
            numbers["recommended"] = beyond_accuracy(result.recommended, self.trial.counts)
        return numbers

    def _differences(self, result: Result) -> dict[str, Any]:
        return self._named(
            {
                name: {
                    "difference": difference(self.ranks, result.ranks, name),
                    "interval_95": difference_interval_95(self.ranks, result.ranks, name),
                }
                for name in HEADLINES
            }
        )

    def _named(self, values: dict[str, Any]) -> dict[str, Any]:
        return {f"{name}_{SUFFIXES[self.trial.protocol]}": value for name, value in values.items()}

    def ranks_frame(self) -> pl.DataFrame:
        """One row for each model or baseline and held-out event; generation is null for baselines."""
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
            for result in (*self.models, *self.baselines)
        )

    def write_ranks(self, file: Path) -> None:
        """Write ``ranks_frame`` as Parquet, the protocol in its metadata."""
        rules = {name: str(value) for name, value in self.rules().items() if name != "generation"}
        self.ranks_frame().write_parquet(file, metadata=rules)


def evaluate(
    models: Sequence[Artifact | Compared],
    directory: Path,
    protocol: Protocol | None = None,
    seen_rule: SeenRule | None = None,
    grids: Mapping[str, Sequence[Baseline]] | None = None,
    say: Say = lambda _: None,
) -> Report:
    """Test a model on the held-out events of the data it was trained on.

    models     at least one; the others are the same trained with other seeds
    protocol   None: the one of the model's own split
    seen_rule  None: the one the model was chosen with
    grids      baselines to test beside it, by name; None: none
    say        is told what is being done
    raises     DataError when a model has seen the test events or another table, or nothing is held out
    """
    trial = prepare(models[0], directory, protocol, seen_rule)
    if len({(model.tag, model.config.model_dump_json()) for model in models}) < len(models):
        raise DataError("the same model is given twice; give models of different seeds")
    tested = []
    for model in models:
        say(f"testing {model.name}")
        tested.append(trial.test_model(model))
    baselines, skipped = [], {}
    for name, grid in (grids or {}).items():
        say(f"fitting {name}")
        try:
            baselines.append(trial.test_baseline(name, grid, say))
        except TooManyItems as exc:
            skipped[name] = str(exc)
    return Report(trial, tested, baselines, skipped)


def prepare(
    model: Artifact | Compared, directory: Path, protocol: Protocol | None, seen_rule: SeenRule | None
) -> Trial:
    """The trial that a model's own data and split make; arguments and errors as those of ``evaluate``."""
    config = model.config
    card = config.data
    protocol = protocol or ("temporal" if card.split == "temporal" else "loo_full")
    if protocol in SAMPLED:
        if seen_rule not in (None, "all"):
            raise DataError(f"the negatives of {protocol} lie outside the history; leave out --seen {seen_rule}")
        seen_rule = "all"
    interactions = read_interactions(directory).stepping(config.event_weights)
    _require_honest(card, interactions, protocol)
    parts = split(interactions, card.split, card.train_on)
    if not len(parts.test):
        raise DataError(f"the split {card.split!r} leaves no event to test; evaluate on a larger table")
    events = held_out(interactions, parts.test, config)
    counts = np.bincount(interactions.item[parts.train], minlength=len(interactions.item_ids)).astype(np.int64)
    return Trial(protocol, seen_rule or card.seen_rule, config, interactions, parts, events, counts)


def _without_seed(config: Recipe) -> Recipe:
    return config.model_copy(update={"training": config.training.model_copy(update={"seed": 0})})


def _require_honest(card: DataCard, interactions: Interactions, protocol: Protocol) -> None:
    if interactions.sha256 != card.sha256:
        raise DataError(
            f"the model was trained on the table {card.sha256[:16]}, this one is {interactions.sha256[:16]}; "
            "evaluate on the data the model was trained on"
        )
    if card.train_on == "all":
        raise DataError("the model was trained on all events, the test events too; train with --train-on train")
    if (protocol == "temporal") != (card.split == "temporal"):
        raise DataError(f"the model was trained for the split {card.split!r}, which {protocol!r} does not test")


def load(directory: Path) -> Artifact | Compared:
    """A model that is served, or a mechanism that is compared; raises ArtifactError."""
    return mechanisms.load(directory) if artifact.is_compared(directory) else artifact.load(directory)


def scorer_of(model: Artifact | Compared) -> Scorer:
    return mechanisms.scorer_of(model.network) if isinstance(model, Compared) else model_scorer(model)


def model_scorer(model: Artifact) -> Scorer:
    """Score with the engine that serves."""
    engine = Engine(model)
    return from_states(
        lambda *state: engine.scores(engine.step(*state)).cpu().numpy(),
        model.history_counts,
        model.config.model,
    )
