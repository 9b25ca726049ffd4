"""Training on a data directory: reads and prepares the data, trains a model, and writes it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch

from model.artifact import model_directory
from model.artifact.item_order import ordered_by_codes
from model.artifact.item_statistics import ItemStatistics
from model.artifact.item_table import ItemTable
from model.artifact.model_directory import tensors_of
from model.config import Config, DataCard, Recipe
from model.content.content_map import MAX_ITEMS, NO_CONTENT, ContentMap, learned_content
from model.content.text_features import Description
from model.data.arrays import OnStage, ignored
from model.data.interactions import REPEAT_SHARE_OF_SHOPS, Interactions, repeat_share, warn_of_bots
from model.data.item_vectors import ItemVectors, read_item_vectors
from model.data.readers import ItemTexts, read_interactions, read_items
from model.data.splits import Split, split, thinned
from model.lisa.item_complements import Complements
from model.lisa.item_intervals import Intervals, rarest_categories
from model.lisa.lisa_mini import Lisa
from model.training.counts import purchases
from model.training.distributed import shared_files
from model.training.distributed.shard_trainer import ShardTrainer
from model.training.loop import CHECKPOINT, LAST_CHECKPOINT, Progress, TrainError
from model.training.memory import UNLIMITED, Resources
from model.training.trainer import FirstModel, Preparation, Trainer, prepare
from model.training.warm_start import WarmStart

WRITING = "writing the model"  # a stage of every training

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


class TrainingInputs(NamedTuple, Generic[AnyRecipe]):
    """The data of a training, and its recipe completed with the card of that data."""

    recipe: AnyRecipe
    interactions: Interactions
    parts: Split
    texts: ItemTexts
    vectors: ItemVectors | None

    def statistics(self, model: Lisa, catalogue: ItemTable) -> ItemStatistics:
        """Return the item statistics that complement the model: from training events, and from items' content."""
        return ItemStatistics(self.complements(), self.intervals(), content(model, catalogue, self.vectors))

    def complements(self) -> Complements:
        """Return the items that were bought together in the training events."""
        return purchases.complements(self.interactions, self.parts.train)

    def intervals(self) -> Intervals:
        """Return the intervals after which items were bought again in the training events, if these have real times."""
        categories = [self.texts.categories.get(name, ()) for name in self.interactions.item_ids]
        return purchases.intervals(self.interactions, self.parts.train, rarest_categories(categories))

    def with_items_first(self, item_ids: Sequence[str]) -> Self:
        """Return the same data, with these items before all others, in this order."""
        return self._replace(interactions=self.interactions.with_items_first(item_ids))

    def first_model(self, start: WarmStart) -> FirstModel:
        """Return a function that makes the first model of a warm training. Its known items come first in the data."""
        titles, categories = self.texts.titles, self.texts.categories
        new = [
            (name, Description(titles.get(name, ""), categories.get(name, ())))
            for name in self.interactions.item_ids[len(start.item_ids) :]
        ]
        recipe = self.recipe
        assert isinstance(recipe, Config)
        return lambda histories: start.model(histories, recipe.model, new)

    def catalogue(self) -> ItemTable:
        """Return the items of the data, with their training counts."""
        ids = self.interactions.item_ids
        counts = self.interactions.arrays.counted(self.interactions.item, len(ids), self.parts.train)
        titles, categories = self.texts.titles, self.texts.categories
        return ItemTable(
            ids, [titles.get(name, "") for name in ids], [categories.get(name, ()) for name in ids], counts
        )


@contextmanager
def reserved(out: Path, resume: bool) -> Iterator[None]:
    """Reserve a model directory for one training, before that reads anything.

    resume  whether the training continues from a checkpoint in the directory
    raises  TrainError  when the directory contains a model, when another training works in it, or when there is no
                        checkpoint to resume from, or one and ``resume`` is False
            OSError     when it cannot be created, or the checkpoint cannot be read
    """
    _require_usable(out, resume)
    folder = out / CHECKPOINT
    made = [path for path in (folder, out) if not path.exists()]
    lock = _locked(folder)
    try:
        _require_usable(out, resume)  # another training may have ended in the meantime
        yield
    finally:
        for path in made:
            with suppress(OSError):  # unless something was written
                path.rmdir()
        os.close(lock)


def _locked(folder: Path) -> int:
    """Create a directory unless it exists, lock it, and return its descriptor."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            _lock(descriptor, folder.parent)
            if _is_at(descriptor, folder):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another training has ended and removed it


def _lock(descriptor: int, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TrainError(f"another training is working in {str(out)!r}; wait for it, or choose another --out") from None
    except OSError:
        pass  # NFS cannot lock a directory


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _require_usable(out: Path, resume: bool) -> None:
    if model_directory.exists(out):
        raise TrainError(f"{str(out)!r} already contains a model; choose another --out, or delete it")
    checkpoint = out / LAST_CHECKPOINT
    if checkpoint.exists() and not resume:
        raise TrainError(f"{str(out)!r} contains an unfinished training; continue it with --resume, or delete it")
    if resume:
        try:
            checkpoint.open("rb").close()  # safetensors calls a file missing that this user may not read
        except FileNotFoundError:
            raise TrainError(f"no checkpoint {checkpoint} to resume from; omit --resume") from None


def prepare_training(
    directory: Path,
    out: Path,
    recipe: AnyRecipe,
    resources: Resources,
    on_stage: OnStage = ignored,
) -> TrainingInputs[AnyRecipe]:
    """Read and split the data of a training; raises as ``train``."""
    require_device(resources.device)
    interactions = read_interactions(directory, resources.arrays(out), on_stage).stepping(recipe.event_weights)
    warn_of_bots(interactions)
    texts = read_items(directory)
    recipe = recipe.model_copy(update={"data": data_card(interactions, recipe.data)})
    recipe = recipe.for_catalogue(len(interactions.item_ids))
    parts = thinned(interactions, split(interactions, recipe.data.split, recipe.data.train_on), recipe.data)
    if parts.cutoff_us is not None and recipe.data.train_on != "all":
        cutoff = {"cutoff_us": parts.cutoff_us, "events_before_cutoff": interactions.count_before(parts.cutoff_us)}
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=cutoff)})
    return TrainingInputs(recipe, interactions, parts, texts, read_item_vectors(directory))


def train(
    directory: Path,
    out: Path,
    config: Config,
    *,
    resources: Resources = UNLIMITED,
    resume: bool = False,
    progress: Progress,
    on_config: Callable[[Config], None] = lambda _: None,
) -> model_directory.Artifact:
    """Train a model on a data directory and save it as a model directory.

    ``config.data`` names the split and what to train on; the data gives its hash, counts and seen rule.

    on_config  is called with the configuration, completed from the data
    raises     DataError   when the data cannot be read or split
               TrainError  when ``out`` contains a model, an unfinished or a running training, or a checkpoint of other
                           options, or the model needs more memory than the limit, or another process has ended
    """
    return _Training(directory, out, resources, resume, progress).run(config, None, on_config)


def train_warm(
    trained: model_directory.Artifact,
    directory: Path,
    out: Path,
    config: Config,
    *,
    resources: Resources = UNLIMITED,
    resume: bool = False,
    progress: Progress,
) -> model_directory.Artifact:
    """Train like ``train``, but start from the codes and weights of a trained model, whose items keep their rows.

    raises  also WarmStartError  when the model does not fit the configuration
    """
    start = WarmStart(trained)
    return _Training(directory, out, resources, resume, progress).run(start.continued(config), start, lambda _: None)


class _Training(NamedTuple):
    """A training, in this process alone or in several."""

    directory: Path
    out: Path
    resources: Resources
    resume: bool
    progress: Progress

    def run(
        self, config: Config, start: WarmStart | None, on_config: Callable[[Config], None]
    ) -> model_directory.Artifact:
        """Train, and return the model when the first process has written it."""
        processes = self.resources.processes
        if processes.count > 1 and self.resources.device != "cpu":
            raise TrainError("training with several processes works on CPUs only; omit --device")
        with processes.together():
            if processes.is_first:
                with reserved(self.out, self.resume):
                    self._lead(config, start, on_config)
            else:
                processes.wait()
                recipe, prepared = shared_files.read(self.out, self.resources.arrays(self.out))
                on_config(recipe)
                self._fit(prepared, recipe)
            processes.wait()
        return model_directory.load(self.out)

    def _lead(self, config: Config, start: WarmStart | None, on_config: Callable[[Config], None]) -> None:
        """Prepare for all processes, train, and write the model."""
        progress = self.progress
        inputs = prepare_training(self.directory, self.out, config, self.resources, progress.stage)
        if start is not None:
            inputs = inputs.with_items_first(start.item_ids)
            inputs = inputs._replace(recipe=start.judged(inputs.recipe, inputs.interactions))
        interactions, recipe = inputs.interactions, inputs.recipe
        self.resources.require_enough(interactions, recipe)
        on_config(recipe)
        first_model = None if start is None else inputs.first_model(start)
        prepared = prepare(interactions, inputs.parts, recipe, first_model, progress.stage)
        if self.resources.processes.count > 1:
            shared_files.write(self.out, recipe, prepared)
            self.resources.processes.wait()
        trainer = self._fit(prepared, recipe)
        progress.stage(WRITING)
        _write(self.out, inputs, trainer, kept=0 if start is None else len(start.item_ids))

    def _fit(self, prepared: Preparation, recipe: Config) -> Trainer:
        processes = self.resources.processes
        if processes.count > 1:
            trainer: Trainer = ShardTrainer(prepared, recipe, self.out, processes)
        else:
            trainer = Trainer(prepared, recipe, self.out, self.resources.device)
        trainer.fit(self.progress, self.resume)
        return trainer


def _write(out: Path, inputs: TrainingInputs[Config], trainer: Trainer, kept: int) -> None:
    """Save the trained model, and remove the checkpoints, which an interrupted training would need.

    kept  the number of items that keep their rows, by which the states of an earlier model are carried over
    """
    reports = [report._asdict() for report in trainer.reports]
    by_strength = {} if trainer.chosen is None else trainer.chosen.ndcg_at_10_by_strength
    metrics = {"epochs": reports, "lift": trainer.lift._asdict(), "ndcg_at_10_by_lift_strength": by_strength}
    catalogue = inputs.catalogue()
    statistics = inputs.statistics(trainer.model, catalogue)
    tensors, items, statistics = ordered_by_codes(tensors_of(trainer.model), catalogue.to_frame(), statistics, kept)
    model_directory.write(out, tensors, trainer.trained_config, items, metrics, statistics)
    shutil.rmtree(out / CHECKPOINT)


@torch.no_grad()
def content(model: Lisa, catalogue: ItemTable, own_vectors: ItemVectors | None = None) -> ContentMap:
    """Learn to predict item vectors of a trained model from titles, categories and the shop's own vectors."""
    rows = catalogue.popular_first[:MAX_ITEMS]
    rows = rows[catalogue.counts[rows] > 0]
    if not len(rows):
        return NO_CONTENT
    vectors = model.item_vectors(torch.from_numpy(rows.astype(np.int64)).to(model.target_codes.device))
    titles = catalogue.titles.at(rows)
    descriptions = [
        Description(title, catalogue.categories[row]) for title, row in zip(titles, rows.tolist(), strict=True)
    ]
    own = None if own_vectors is None else own_vectors.of(catalogue.ids.at(rows))
    return learned_content(vectors.float().cpu().numpy(), catalogue.counts[rows], descriptions, own)


def data_card(interactions: Interactions, wanted: DataCard) -> DataCard:
    """Describe the data. If users return to items, as in shops, seen items stay in the ranking."""
    repeats = repeat_share(interactions) > REPEAT_SHARE_OF_SHOPS
    of_each = interactions.arrays.counted(interactions.item, len(interactions.item_ids))
    return wanted.model_copy(
        update={
            "sha256": interactions.sha256,
            "seen_rule": "none" if repeats else "all",
            "users": len(interactions.user_ids),
            "events": len(interactions),
            "events_per_item": len(interactions) / max(int(np.count_nonzero(of_each)), 1),
        }
    )


def require_device(device: str) -> None:
    """Raise TrainError for a device that this machine does not have."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise TrainError(f"device {device!r} is not available: torch finds no GPU; use --device cpu")
