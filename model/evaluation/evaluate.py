"""The evaluation of a model, together with others and baselines, on the same held-out events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from model.config import DEFAULT_LIFT_DECAY, ModelConfig, Protocol, Recipe, SeenRule, TrainConfig
from model.data.interactions import DataError
from model.data.readers import read_interactions
from model.data.splits import split, thinned
from model.evaluation.baselines import Baseline, TooManyItems
from model.evaluation.comparison import Variant
from model.evaluation.neural_baselines import Notify
from model.evaluation.report import Report
from model.evaluation.trial import SAMPLED_PROTOCOLS, Trial, require_unseen_test_events
from model.holdout_ranks import held_out_events
from model.mechanisms import train as mechanisms
from model.mechanisms.train import TrainedMechanism

AnyModel = Artifact | TrainedMechanism


def evaluate(
    models: Sequence[AnyModel],
    directory: Path,
    protocol: Protocol | None = None,
    seen_rule: SeenRule | None = None,
    grids: Mapping[str, Sequence[Baseline]] | None = None,
    notify: Notify = lambda _: None,
) -> Report:
    """Test a model on the held-out events of the data it was trained on, and compare it with other models.

    models     at least one, all of the same table and split. The first is compared with the others. Models that
               differ only in the seed count as one, with the mean of their results
    protocol   None: the one of the model's own split
    seen_rule  None: the one the model was chosen with
    grids      baselines to test as well, by name; None: none
    notify     receives a line about each step
    raises     DataError when a model has seen the test events or another table, or nothing is held out
    """
    trial = prepare_trial(models[0], directory, protocol, seen_rule)
    if len({(model.tag, model.config.model_dump_json()) for model in models}) < len(models):
        raise DataError("the same model is given twice; pass each model once")
    variants = []
    for name, seeds in by_variant(models).items():
        tested = []
        for model in seeds:
            notify(f"testing {model.name}")
            tested.append(trial.test_model(model))
        variants.append(Variant(name, tested))
    baselines, skipped = [], {}
    for name, grid in (grids or {}).items():
        notify(f"fitting {name}")
        try:
            baselines.append(trial.test_baseline(name, grid, notify))
        except TooManyItems as exc:
            skipped[name] = str(exc)
    return Report(trial, variants[0], variants[1:], baselines, skipped)


def by_variant(models: Sequence[AnyModel]) -> dict[str, list[AnyModel]]:
    """Group models that differ only in the seed, in the given order.

    A group has the name of its first model, with the generation if several groups have that name. Two models with the
    same seed are never in one group, because something else than their settings made them differ.
    """
    groups: list[list[AnyModel]] = []
    for model in models:
        for group in groups:
            seeds = {each.config.training.seed for each in group}
            alike = _without_seed(group[0].config) == _without_seed(model.config)
            if alike and model.config.training.seed not in seeds:
                group.append(model)
                break
        else:
            groups.append([model])
    often = Counter(group[0].name for group in groups)
    return {_label(group[0], often[group[0].name]): group for group in groups}


def _without_seed(config: Recipe) -> Recipe:
    """Return the recipe without its seed, and without the decay of the lift that validation chose for that seed."""
    without = config.model_copy(update={"training": config.training.model_copy(update={"seed": 0})})
    training, shape = config.training, config.model
    if isinstance(training, TrainConfig) and isinstance(shape, ModelConfig) and training.lift_strength is None:
        newest = shape.recent_items if shape.recent_heads else 1
        undecided = {"lift_decay": DEFAULT_LIFT_DECAY, "recent_items": newest}
        without = without.model_copy(update={"model": shape.model_copy(update=undecided)})
    return without


def _label(model: AnyModel, of_that_name: int) -> str:
    return model.name if of_that_name == 1 else f"{model.name} ({model.tag})"


def prepare_trial(
    model: AnyModel,
    directory: Path,
    protocol: Protocol | None,
    seen_rule: SeenRule | None,
    *,
    rows_of_model: bool = False,
) -> Trial:
    """Create the trial for a model's data and split. Other arguments and all errors are those of ``evaluate``.

    rows_of_model  whether items have the rows of a model that can be served, instead of those of the data, by which
                   trials of several models draw the same negatives
    """
    config = model.config
    card = config.data
    protocol = protocol or ("temporal" if card.split == "temporal" else "loo_full")
    if protocol in SAMPLED_PROTOCOLS:
        if seen_rule not in (None, "all"):
            raise DataError(f"the negatives of {protocol} are never in the history; omit --seen {seen_rule}")
        seen_rule = "all"
    interactions = read_interactions(directory).stepping(config.event_weights)
    require_unseen_test_events(config, interactions, protocol)
    if rows_of_model and isinstance(model, Artifact):
        interactions = interactions.with_items_first(list(model.items.ids))
    parts = thinned(interactions, split(interactions, card.split, card.train_on), card)
    if not len(parts.test):
        raise DataError(f"the split {card.split!r} leaves no test event; evaluate on a larger table")
    events = held_out_events(interactions, parts.test, config)
    counts = np.bincount(interactions.item[parts.train], minlength=len(interactions.item_ids)).astype(np.int64)
    return Trial(protocol, seen_rule or card.seen_rule, config, interactions, parts, events, counts)


def load_model(directory: Path) -> AnyModel:
    """Load a model that can be served, or a mechanism; raises ArtifactError."""
    return mechanisms.load(directory) if model_directory.is_mechanism(directory) else model_directory.load(directory)
