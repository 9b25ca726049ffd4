"""The trainer of LISA-Mini. It learns from shuffled positions of many users, each a state and its next item.

Codes are fixed, so the histogram of a position is constant: a scan computes it once per epoch, and batches need no
padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from model import holdout_ranks
from model.config import Config
from model.data.arrays import Arrays, OnStage, ignored, shares_of
from model.data.interactions import DataError, Histories, Interactions, training_histories
from model.data.splits import Split
from model.holdout_ranks import HeldOutEvents, Scorer
from model.lisa import item_codes
from model.lisa.item_followers import Lift
from model.lisa.lisa_mini import LisaMini, build_lisa_mini
from model.training.batches.ahead import made_ahead
from model.training.batches.padding import STEPS_PER_EPOCH
from model.training.batches.positions import BatchMaker, Bound, PositionBatch
from model.training.counts.pair_counts import PairCounts
from model.training.lift_choice import ChosenLift, LiftChooser, LiftedRanks
from model.training.loop import Progress, TrainError, TrainingLoop, Validation, validation_events
from model.training.loss import (
    Negatives,
    full_softmax_loss,
    matmul_dtype,
    negative_shares,
    popular_negatives,
    sampled_softmax_loss,
    uniform_negatives,
)

SMALLEST_BATCH = 64  # small data gets smaller batches, down to this, rather than fewer than STEPS_PER_EPOCH steps

FirstModel: TypeAlias = Callable[[Histories], LisaMini]
"""A function that makes the first model of a training from its training events."""


class Preparation(NamedTuple):
    """The results that a training computes before its first epoch.

    model       with its first weights, and the codes of all items
    lifts       None in a process that does not validate
    validation  None in a process that does not validate, or if no events are held out
    """

    histories: Histories
    model: LisaMini
    lifts: LiftChooser | None
    validation: HeldOutEvents | None
    arrays: Arrays


def prepare(
    interactions: Interactions,
    parts: Split,
    config: Config,
    start: FirstModel | None = None,
    on_stage: OnStage = ignored,
) -> Preparation:
    """Compute the codes of all items, and their followers; raises DataError when there is nothing to learn.

    start  makes the first model, instead of one with fresh codes and weights
    """
    on_stage("counting training events")
    histories = training_histories(interactions, parts.train, config.event_weights)
    if not histories.positions:
        raise DataError("no user has two training events, so there is nothing to learn; add more events")
    items = len(interactions.item_ids)
    counts, seed = PairCounts(histories, items, interactions.arrays, on_stage), config.training.seed
    if start is None:
        vectors = counts.item_vectors(config.model.width, seed)
        on_stage(f"computing the codes of {items:,} items")
        codes = item_codes.codes_of(vectors, config.model, seed)
    torch.manual_seed(seed)
    lifts = LiftChooser(histories, items, config, counts)
    if start is not None:
        on_stage("computing the codes of new items")
    model = build_lisa_mini(config.model, codes) if start is None else start(histories)
    validation = validation_events(interactions, parts, config)
    return Preparation(histories, model, lifts, validation, interactions.arrays)


class Trainer(TrainingLoop[PositionBatch]):
    """Trains LISA-Mini. Validation judges each epoch with its best lift, which the final model has, too."""

    def __init__(self, prepared: Preparation, config: Config, directory: Path, device: str) -> None:
        self.model, self.lifts = prepared.model, prepared.lifts
        if self.lifts is not None:
            self._set_lift(self.lifts.usual)
        super().__init__(self.model, prepared.histories, prepared.validation, config, directory, device)
        self.config = config
        self.arrays = prepared.arrays
        self.ranked: LiftedRanks | None = None  # what the last validation scored
        self.chosen: ChosenLift | None = None  # and chose
        wanted = max(self.histories.positions // STEPS_PER_EPOCH, SMALLEST_BATCH)
        bound = Bound.of(self.histories, config.training)
        self.history_codes = self.model.history_codes.cpu().numpy()
        self.positions = bound.positions(self.histories)
        self.batch_maker = BatchMaker(
            self.histories, self.history_codes, config.model, min(config.training.batch_size, wanted), bound
        )
        self._dtype = matmul_dtype(self.device)
        self._shares: Tensor | None = None  # each item's probability to be a negative
        if config.training.negatives == "popular":
            counts = self.arrays.counted(self.histories.item, len(self.model.bias))
            self._shares = negative_shares(torch.from_numpy(counts).to(self.device))

    @property
    def trained_config(self) -> Config:
        """The configuration of the model, with the decay of the lift that validation has chosen."""
        return self.config.model_copy(update={"model": self.model.config})

    @property
    def lift(self) -> Lift:
        """The lift of the model: the choice of the last validation, or the usual one."""
        return self.chooser.usual if self.chosen is None else self.chosen.lift

    @property
    def chooser(self) -> LiftChooser:
        """The chooser of the lift, in a process that validates."""
        assert self.lifts is not None, "another process judges the epochs"
        return self.lifts

    @override
    def _finish(self, progress: Progress) -> None:
        self.model.fold_norms_and_round()
        self.validate(shares_of("choosing the lift", progress.stage))
        self._set_lift(self.lift)

    def _set_lift(self, lift: Lift) -> None:
        self.model.set_followers(self.chooser.followers, lift)

    @property
    def _makes_ahead(self) -> bool:
        """Whether another thread makes the next batches while the device computes."""
        return self.device.type == "cuda"

    @override
    def _batches(self, seed: int) -> Iterator[tuple[PositionBatch, float]]:
        batches = self.batch_maker.batches(seed)
        if self._makes_ahead:
            batches = made_ahead(batches, PositionBatch.pinned)
        for batch in batches:
            yield batch.on(self.device), len(batch.targets) / self.positions
            self.arrays.release()

    @override
    def _loss(self, batch: PositionBatch) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            queries = self.model.read(batch.histogram, batch.last, batch.recent).float()
        negatives = self.negatives()
        if negatives is None:
            return full_softmax_loss(queries, self.model.item_vectors(), self.model.bias, batch.targets, self._dtype)
        return sampled_softmax_loss(
            queries, self.model.item_vectors, self.model.bias, batch.targets, negatives, self._dtype
        )

    def negatives(self) -> Negatives | None:
        """Draw the negatives of a batch; None for all items."""
        items, training = len(self.model.bias), self.config.training
        if items <= training.full_softmax_items:
            return None
        if self._shares is None:
            return uniform_negatives(torch.randperm(items)[: training.sampled_negatives].to(self.device), items)
        return popular_negatives(self._shares, training.sampled_negatives)

    @override
    def _judge(self, events: HeldOutEvents, scorer: Scorer) -> Validation:
        """Choose the lift for these weights, because a model is served with a lift."""
        self.ranked = self.chooser.ranked(events, scorer, self.config.data.seen_rule)
        self.chosen = self.chooser.choose(self.ranked)
        lift = self.chosen.lift._asdict()
        return Validation(self.chosen.mean("ndcg_at_10"), self.chosen.mean("hr_at_10"), lift)

    @override
    def _scorer(self) -> Scorer:
        """Return a scorer with the weights as served, without a lift."""
        with torch.inference_mode(mode=False), torch.no_grad():
            served = copy.deepcopy(self.model).eval()
            served.fold_norms_and_round()
        tables, vectors = served.tables(), served.item_vectors()

        def score(*state: NDArray[Any]) -> NDArray[np.float32]:
            histograms, last, recent = (torch.from_numpy(part).to(self.device) for part in state)
            scores = served.read(histograms, last, recent, tables) @ vectors.T + served.bias
            return scores.cpu().numpy()

        return holdout_ranks.state_scorer(score, self.history_codes, self.config.model)

    @override
    def _require_same_training(self, path: Path, tensors: dict[str, Tensor]) -> None:
        if not torch.equal(tensors["history_codes"], self.model.history_codes.cpu()):
            raise TrainError(f"the checkpoint {path} comes from another kind of machine; omit --resume")
