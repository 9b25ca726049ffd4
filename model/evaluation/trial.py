"""One trial: held-out events, and the rules by which a model and every baseline are ranked on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.artifact.model_directory import Artifact
from model.config import Protocol, Recipe, SeenRule, TrainConfig
from model.data.interactions import DataError, Histories, Interactions, training_histories
from model.data.splits import Split, split, thinned
from model.evaluation.baselines import Baseline
from model.evaluation.neural_baselines import NeuralBaseline, Notify, Validate
from model.holdout_ranks import (
    PAPER_SAMPLING,
    HeldOutEvents,
    NegativeSampling,
    Scorer,
    held_out_events,
    ranks_and_recommendations,
    ranks_full,
    ranks_sampled,
    state_scorer,
)
from model.inference.engine import Engine
from model.mechanisms import train as mechanisms
from model.mechanisms.train import TrainedMechanism
from model.metrics import CUTOFFS, metrics

VALIDATION_USERS = 5_000
METRIC_SUFFIXES: dict[Protocol, str] = {
    "loo_full": "full",
    "loo_sampled100": "sampled100",
    "loo_paper100": "paper100",
    "temporal": "temporal",
}
SAMPLED_PROTOCOLS: dict[Protocol, NegativeSampling] = {
    "loo_sampled100": NegativeSampling(),
    "loo_paper100": PAPER_SAMPLING,
}


@dataclass(frozen=True)
class Result:
    """The ranks that one scorer gave to the held-out items.

    settings       a model's name, generation and seed, or a baseline's hyperparameters
    ranks          (Q,)
    recommended    (Q, 50) items, best first, filled up with -1; None if only some candidates were ranked
    event_options  the options that chose the events it learned from
    """

    name: str
    settings: dict[str, Any]
    ranks: NDArray[np.int64]
    recommended: NDArray[np.int32] | None
    event_options: str = ""

    @property
    def ndcg_at_10(self) -> float:
        """The NDCG@10 of the ranks."""
        return metrics(self.ranks)["ndcg_at_10"]


@dataclass(frozen=True)
class Trial:
    """Held-out events, and the rules by which scorers are tested on them.

    counts  (N,)  training events of each item
    """

    protocol: Protocol
    seen_rule: SeenRule
    config: Recipe
    interactions: Interactions
    parts: Split
    events: HeldOutEvents
    counts: NDArray[np.int64]

    @property
    def items(self) -> int:
        """The number of items of the catalogue."""
        return len(self.interactions.item_ids)

    def test(self, name: str, settings: dict[str, Any], scorer: Scorer, events: HeldOutEvents | None = None) -> Result:
        """Rank the held-out events by the scorer, as the protocol says.

        events  the trial's events, with the scorer's weights in the histories; None: with those of the trial's model
        """
        events = self.events if events is None else events
        event_options = self.config.data.event_options
        if self.protocol in SAMPLED_PROTOCOLS:
            ranks = ranks_sampled(events, scorer, 0, SAMPLED_PROTOCOLS[self.protocol])
            return Result(name, settings, ranks, None, event_options)
        k = min(max(CUTOFFS), self.items)
        return Result(name, settings, *ranks_and_recommendations(events, scorer, self.seen_rule, k), event_options)

    def test_model(self, model: Artifact | TrainedMechanism) -> Result:
        """Test a model. Raise DataError if it may have seen a test event in training."""
        require_unseen_test_events(model.config, self.interactions, self.protocol)
        settings = {"name": model.name, "generation": model.tag, "seed": model.config.training.seed}
        scorer = scorer_of(model)
        if isinstance(model, Artifact) and list(model.items.ids) != self.interactions.item_ids:
            rows = np.array([model.items.rows.get(name, -1) for name in self.interactions.item_ids], np.int64)
            scorer = _renumbered(scorer, rows)
        found = self.test(model.config.model.preset, settings, scorer, self._events_as_weighed_by(model))
        return replace(found, event_options=model.config.data.event_options)

    def _events_as_weighed_by(self, model: Artifact | TrainedMechanism) -> HeldOutEvents:
        """Return the held-out events, with the model's weights in the histories, but with the trial's seen items."""
        own, others = (
            {name for name in self.interactions.type_names if config.event_weights.get(name, 0) > 0}
            for config in (self.config, model.config)
        )
        if own != others:
            named = ", ".join(sorted(own ^ others))
            raise DataError(
                f"events of type {named} have weight 0 in only one of the first model and {model.name!r}, so the "
                "held-out events differ; compare models whose types of weight 0 are the same"
            )
        if model.config.event_weights == self.config.event_weights:
            return self.events
        weighed = held_out_events(self.interactions, self.parts.test, model.config)
        return replace(weighed, seen=self.events.seen)

    def test_baseline(self, name: str, grid: Sequence[Baseline], notify: Notify = lambda _: None) -> Result:
        """Test the baseline of the grid that is best on validation events. It learns the model's training events.

        raises TooManyItems
        """
        if len(grid) == 1:
            return self.test(name, asdict(grid[0]), self._fit(grid[0], notify))
        baseline, scorer = self._best(grid)
        if self.config.data.train_on != "train":
            scorer = self._fit(baseline, notify)
        return self.test(name, asdict(baseline), scorer)

    def _fit(self, baseline: Baseline, notify: Notify) -> Scorer:
        histories = training_histories(self.interactions, self.parts.train, self.config.event_weights)
        if not isinstance(baseline, NeuralBaseline):
            return baseline.fit(histories, self.items)
        if self.config.data.train_on != "train" or not len(self.parts.validation):
            return baseline.fit(histories, self.items, notify)
        return baseline.fit(histories, self.items, notify, self._validation_measure())

    def _validation_measure(self) -> Validate:
        """Return a measure: validation NDCG@10 over the whole catalogue, of at most 5,000 users."""
        rng = np.random.default_rng(0)
        positions = rng.permutation(self.parts.validation)[:VALIDATION_USERS]
        events = held_out_events(self.interactions, np.sort(positions), self.config)
        return lambda scorer: metrics(ranks_full(events, scorer, self.seen_rule))["ndcg_at_10"]

    def _best(self, grid: Sequence[Baseline]) -> tuple[Baseline, Scorer]:
        """Find the best baseline by validation NDCG@10 over the whole catalogue. None trains on validation events."""
        weights = self.config.event_weights
        card = self.config.data
        parts = thinned(self.interactions, split(self.interactions, card.split), card)
        histories = training_histories(self.interactions, parts.train, weights)
        validation = held_out_events(self.interactions, parts.validation, self.config)
        best, best_quality = None, -1.0
        for baseline in grid:
            scorer, quality = baseline.fit(histories, self.items), 0.0
            if len(validation):
                quality = metrics(ranks_full(validation, scorer, self.seen_rule))["ndcg_at_10"]
            if quality > best_quality:
                best, best_quality = (baseline, scorer), quality
        assert best is not None
        return best


def require_unseen_test_events(recipe: Recipe, interactions: Interactions, protocol: Protocol) -> None:
    """Raise DataError if the model may have been trained on the test events, or on other data."""
    card, training = recipe.data, recipe.training
    if interactions.sha256 != card.sha256:
        raise DataError(
            f"the model was trained on the table {card.sha256[:16]}, but this table is {interactions.sha256[:16]}; "
            "evaluate on the data that the model was trained on"
        )
    if card.train_on == "all":
        raise DataError("the model was trained on all events, including the test events; train with --train-on train")
    if (protocol == "temporal") != (card.split == "temporal"):
        raise DataError(f"the model was trained for the split {card.split!r}, which {protocol!r} does not use")
    if isinstance(training, TrainConfig) and training.warm_from and not training.warm_knows_no_tests:
        raise DataError(
            "the model continues from one that was trained on all events, for another split, or on a table whose "
            "earlier events differ, so it may know the test events; evaluate a model without --warm-from"
        )


def _renumbered(scorer: Scorer, rows: NDArray[np.int64]) -> Scorer:
    """Return a scorer of a trial's items by a model whose items differ, in number or order.

    rows  (N,)  the model's row of each item of the trial, -1 for one that it does not know, which comes last
    """
    is_complete = bool((rows >= 0).all())

    def scored(histories: Histories) -> NDArray[np.float32]:
        item = rows[histories.item].astype(np.int32)
        scores = scorer(Histories(item, histories.weights, histories.starts))
        if is_complete:
            return scores[:, rows]
        own: NDArray[np.float32] = np.where(rows >= 0, scores[:, rows], scores.min(axis=1, keepdims=True))
        return own

    return scored


def scorer_of(model: Artifact | TrainedMechanism) -> Scorer:
    """Return the scorer of a model that can be served, or of a mechanism."""
    return mechanisms.mechanism_scorer(model.network) if isinstance(model, TrainedMechanism) else model_scorer(model)


def model_scorer(model: Artifact) -> Scorer:
    """Return a scorer that uses the engine that serves the model."""
    engine = Engine(model)
    return state_scorer(
        lambda *state: engine.scores(engine.step(*state)).cpu().numpy(),
        model.history_counts,
        model.config.model,
    )
