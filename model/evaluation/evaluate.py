"""The evaluation of a model, or of several seeds of it, beside baselines on the same held-out events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from model.config import Protocol, SeenRule
from model.data.interactions import DataError
from model.data.readers import read_interactions
from model.data.splits import split
from model.evaluation.baselines import Baseline, TooManyItems
from model.evaluation.neural_baselines import Notify
from model.evaluation.report import Report
from model.evaluation.trial import SAMPLED_PROTOCOLS, Trial, require_unseen_test_events
from model.holdout_ranks import held_out_events
from model.mechanisms import train as mechanisms
from model.mechanisms.train import TrainedMechanism


def evaluate(
    models: Sequence[Artifact | TrainedMechanism],
    directory: Path,
    protocol: Protocol | None = None,
    seen_rule: SeenRule | None = None,
    grids: Mapping[str, Sequence[Baseline]] | None = None,
    notify: Notify = lambda _: None,
) -> Report:
    """Test a model on the held-out events of the data it was trained on.

    models     at least one; the others are the same trained with other seeds
    protocol   None: the one of the model's own split
    seen_rule  None: the one the model was chosen with
    grids      baselines to test beside it, by name; None: none
    notify     receives a line about each step
    raises     DataError when a model has seen the test events or another table, or nothing is held out
    """
    trial = prepare_trial(models[0], directory, protocol, seen_rule)
    if len({(model.tag, model.config.model_dump_json()) for model in models}) < len(models):
        raise DataError("the same model is given twice; give models of different seeds")
    tested = []
    for model in models:
        notify(f"testing {model.name}")
        tested.append(trial.test_model(model))
    baselines, skipped = [], {}
    for name, grid in (grids or {}).items():
        notify(f"fitting {name}")
        try:
            baselines.append(trial.test_baseline(name, grid, notify))
        except TooManyItems as exc:
            skipped[name] = str(exc)
    return Report(trial, tested, baselines, skipped)


def prepare_trial(
    model: Artifact | TrainedMechanism, directory: Path, protocol: Protocol | None, seen_rule: SeenRule | None
) -> Trial:
    """Make the trial of a model's own data and split; arguments and errors as those of ``evaluate``."""
    config = model.config
    card = config.data
    protocol = protocol or ("temporal" if card.split == "temporal" else "loo_full")
    if protocol in SAMPLED_PROTOCOLS:
        if seen_rule not in (None, "all"):
            raise DataError(f"the negatives of {protocol} lie outside the history; leave out --seen {seen_rule}")
        seen_rule = "all"
    interactions = read_interactions(directory).stepping(config.event_weights)
    require_unseen_test_events(card, interactions, protocol)
    parts = split(interactions, card.split, card.train_on)
    if not len(parts.test):
        raise DataError(f"the split {card.split!r} leaves no event to test; evaluate on a larger table")
    events = held_out_events(interactions, parts.test, config)
    counts = np.bincount(interactions.item[parts.train], minlength=len(interactions.item_ids)).astype(np.int64)
    return Trial(protocol, seen_rule or card.seen_rule, config, interactions, parts, events, counts)


def load_model(directory: Path) -> Artifact | TrainedMechanism:
    """Load a model that is served, or a mechanism that is compared; raises ArtifactError."""
    return mechanisms.load(directory) if model_directory.is_mechanism(directory) else model_directory.load(directory)
