"""The training and scoring of mechanisms: batches of histories of similar length.

Source: the binary loss, with one uniform negative for each position, of Kang and McAuley, SASRec, ICDM 2018, by which
Wu et al., LISA, WWW 2021, train.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from model.config import SERVED_MECHANISMS, MechanismRecipe
from model.data.interactions import DataError, Histories, Interactions, starts_of, training_histories
from model.data.splits import Split
from model.holdout_ranks import Scorer
from model.mechanisms.export import served_model, served_recipe
from model.mechanisms.network import MechanismNetwork
from model.training.batches.padding import padded_batches, padded_rows
from model.training.loop import CHECKPOINT, EpochReport, Progress, TrainError, TrainingLoop, validation_events
from model.training.loss import sampled_softmax_loss, uniform_negatives
from model.training.memory import Resources
from model.training.train import WRITING, prepare_training, reserved

POSITIONS_AT_ONCE = 8_192  # when scoring


@dataclass(frozen=True)
class TrainedMechanism:
    """A loaded model directory of a mechanism. Its ``tag`` is computed like that of a served model."""

    name: str
    tag: str
    config: MechanismRecipe
    network: MechanismNetwork
    metrics: dict[str, Any]


class MechanismBatch(NamedTuple):
    """Histories and their next items.

    items      (S, L)  padded at the end
    lengths    (S,)
    targets    (Q,)    of the real positions
    negatives  (Q,) with the binary loss, one for each position; else (negatives,), for all of them
    """

    items: Tensor
    lengths: Tensor
    targets: Tensor
    negatives: Tensor


class MechanismTrainer(TrainingLoop[MechanismBatch]):
    """Trains one mechanism; the codes of ``network`` may be frozen already."""

    def __init__(
        self,
        network: MechanismNetwork,
        interactions: Interactions,
        parts: Split,
        recipe: MechanismRecipe,
        directory: Path,
        device: str,
    ) -> None:
        histories = training_histories(interactions, parts.train, recipe.event_weights)
        if not histories.positions:
            raise DataError("no user has two training events, so there is nothing to learn; add more events")
        newest = newest_events(histories, recipe.model.window + 1)
        super().__init__(network, newest, validation_events(interactions, parts, recipe), recipe, directory, device)
        self._net = network
        self._window = recipe.model.window
        self._items = len(interactions.item_ids)
        self._training = recipe.training
        self._is_binary = recipe.training.loss == "binary"
        self._had = np.unique(histories.rows * np.int64(self._items) + histories.item)

    @override
    def _epoch(self, epoch: int, progress: Progress) -> EpochReport:
        if epoch >= self._training.codes_learned_share * self._training.epochs:
            self._net.freeze_codes()
        return super()._epoch(epoch, progress)

    @override
    def _batches(self, seed: int) -> Iterator[tuple[MechanismBatch, float]]:
        rng = np.random.default_rng(seed)
        for batch in padded_batches(self.histories, self._window, rng, self._training.histories_per_batch):
            lengths = batch.real.sum(dim=1)
            if self._is_binary:
                negatives = self.draw_negatives(np.repeat(batch.users, lengths.numpy()), rng)
            else:
                negatives = rng.permutation(self._items)[: self._training.sampled_negatives]
            tensors = (batch.items, lengths, batch.targets, torch.from_numpy(negatives))
            yield (
                MechanismBatch(*(part.to(self.device) for part in tensors)),
                len(batch.targets) / self.histories.positions,
            )

    def draw_negatives(self, users: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw an item for each position, uniformly among those that its user never had in training."""
        drawn = rng.integers(0, self._items, len(users))
        for _ in range(100):  # a user who had every item gets any of them
            wanted = users * np.int64(self._items) + drawn
            place = np.minimum(np.searchsorted(self._had, wanted), len(self._had) - 1)
            again = np.flatnonzero(self._had[place] == wanted)
            if not len(again):
                break
            drawn[again] = rng.integers(0, self._items, len(again))
        return drawn

    @override
    def _loss(self, batch: MechanismBatch) -> Tensor:
        distinct = self._net.distinct(batch.items, batch.targets, batch.negatives)
        read = self._net(batch.items, batch.lengths, distinct)
        real = torch.arange(read.shape[1], device=read.device) < batch.lengths[:, None]
        queries = read[real]

        def vectors(items: Tensor) -> Tensor:
            return F.embedding(distinct.places(items), distinct.targets)

        if self._is_binary:
            wanted, unwanted = ((queries * vectors(items)).sum(dim=-1) for items in (batch.targets, batch.negatives))
            return F.softplus(-wanted).mean() + F.softplus(unwanted).mean()
        bias = torch.zeros(self._items, device=read.device)
        negatives = uniform_negatives(batch.negatives, self._items)
        return sampled_softmax_loss(queries, vectors, bias, batch.targets, negatives, torch.float32)

    @override
    def _scorer(self) -> Scorer:
        return mechanism_scorer(self._net)


def mechanism_scorer(network: MechanismNetwork) -> Scorer:
    """Return a scorer that uses the query after the newest event of each history."""
    with torch.inference_mode():
        distinct = network.eval().distinct()

    @torch.inference_mode()
    def scorer(prefixes: Histories) -> NDArray[np.float32]:
        lengths = np.minimum(prefixes.lengths, network.config.window)
        queries = torch.empty(len(lengths), network.config.width)
        order = np.argsort(lengths, kind="stable")
        for chosen in np.split(order, np.flatnonzero(np.diff(np.cumsum(lengths[order]) // POSITIONS_AT_ONCE)) + 1):
            items = torch.from_numpy(
                padded_rows(prefixes.item, (prefixes.starts[1:] - lengths)[chosen], lengths[chosen])
            )
            length = torch.from_numpy(lengths[chosen])
            read = network(items.to(distinct.items.device), length.to(distinct.items.device), distinct)
            queries[chosen] = read[torch.arange(len(chosen)), length - 1].cpu()
        scores: NDArray[np.float32] = (queries @ distinct.targets.cpu().T).numpy()
        return scores

    return scorer


def newest_events(histories: Histories, max_events: int) -> Histories:
    """Cut each history to its newest events, at most `max_events`."""
    lengths = np.minimum(histories.lengths, max_events)
    starts = starts_of(lengths)
    kept = np.arange(starts[-1]) + np.repeat(histories.starts[1:] - lengths - starts[:-1], lengths)
    return Histories(histories.item[kept], histories.weights[kept], starts)


def train(
    directory: Path,
    out: Path,
    recipe: MechanismRecipe,
    *,
    codes_from: Path | None = None,
    device: str = "cpu",
    resume: bool = False,
    progress: Progress,
) -> TrainedMechanism | Artifact:
    """Train a mechanism on a data directory and save it as a model directory, converted if its preset is served.

    codes_from  a model directory with the same codebooks and items, whose codes are copied: the codebook migration of
                Wu et al., LISA, WWW 2021, table 6
    raises      DataError   when the data cannot be read or split
                TrainError  when ``out`` contains a model or an unfinished training, or the codes do not fit
    """
    with reserved(out, resume):
        inputs = prepare_training(directory, out, recipe, Resources(device), progress.stage)
        torch.manual_seed(recipe.training.seed)
        network = MechanismNetwork(recipe.model, len(inputs.interactions.item_ids))
        if codes_from is not None:
            _migrate(load(codes_from), network, inputs.recipe)
        trainer = MechanismTrainer(network, inputs.interactions, inputs.parts, inputs.recipe, out, device)
        trainer.fit(progress, resume)
        progress.stage(WRITING)
        metrics = {"epochs": [report._asdict() for report in trainer.reports]}
        is_served = recipe.model.preset in SERVED_MECHANISMS
        if is_served:
            model, catalogue = served_model(network), inputs.catalogue()
            statistics = inputs.statistics(model, catalogue)
            model_directory.save(out, model, served_recipe(inputs.recipe), catalogue, metrics, statistics)
        else:
            weights = {name: tensor.detach() for name, tensor in network.state_dict().items()}
            model_directory.write(out, weights, inputs.recipe, inputs.catalogue().to_frame(), metrics)
        shutil.rmtree(out / CHECKPOINT)
    return model_directory.load(out) if is_served else load(out)


def load(directory: Path) -> TrainedMechanism:
    """Load a trained mechanism; raises ArtifactError when a file is missing, changed or does not fit."""
    tag = model_directory.verified_tag(directory)
    try:
        recipe = MechanismRecipe.model_validate_json((directory / model_directory.CONFIG).read_bytes())
        weights = load_file(directory / model_directory.WEIGHTS)
        network = MechanismNetwork(recipe.model, len(weights["embedding.weight"]))
        network.load_state_dict(weights)
        metrics = json.loads((directory / model_directory.METRICS).read_text())
    except model_directory.BROKEN_FILE_ERRORS as exc:
        raise model_directory.ArtifactError(
            f"model directory {str(directory)!r} contains no mechanism of this version: {str(exc)[:1000]}"
        ) from exc
    return TrainedMechanism(directory.resolve().name, tag, recipe, network.eval(), metrics)


def _migrate(source: TrainedMechanism, network: MechanismNetwork, recipe: MechanismRecipe) -> None:
    if source.config.data.sha256 != recipe.data.sha256 or source.config.data.train_on != recipe.data.train_on:
        raise TrainError(f"the codes of {source.name!r} were learned from other events; train it on the same events")
    try:
        network.migrate(source.network)
    except ValueError as exc:
        raise TrainError(f"the codes of {source.name!r} do not fit: {exc}") from exc
