"""The training of LISA-Mini: positions of many users' histories, shuffled together, each a state and its next item.

Codes are fixed, so the histogram of a position is data: a scan computes it once per epoch, and no batch is padded.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from model import holdout_ranks
from model.artifact import model_directory
from model.artifact.item_statistics import ItemStatistics
from model.artifact.item_table import ItemTable
from model.config import Config, DataCard, ModelConfig, Recipe
from model.content.content_map import MAX_ITEMS, NO_CONTENT, ContentMap, learned_content
from model.content.text_features import Description
from model.data.interactions import (
    REPEAT_SHARE_OF_SHOPS,
    DataError,
    Histories,
    Interactions,
    repeat_share,
    training_histories,
)
from model.data.item_vectors import ItemVectors, read_item_vectors
from model.data.readers import ItemTexts, read_interactions, read_items
from model.data.splits import Split, split
from model.holdout_ranks import HeldOutEvents, Scorer
from model.lisa import item_codes
from model.lisa.histogram import running_histograms
from model.lisa.item_complements import Complements
from model.lisa.item_followers import Lift
from model.lisa.item_intervals import Intervals, rarest_categories
from model.lisa.lisa_mini import Lisa, build_lisa_mini
from model.lisa.recent_attention import recent_windows
from model.training import purchases
from model.training.lift_choice import ChosenLift, LiftChooser, LiftedRanks
from model.training.loop import (
    CHECKPOINT,
    LAST_CHECKPOINT,
    Progress,
    TrainError,
    TrainingLoop,
    Validation,
    validation_events,
)
from model.training.loss import full_softmax_loss, matmul_dtype, sampled_softmax_loss
from model.training.memory import UNLIMITED, Resources
from model.training.padding import STEPS_PER_EPOCH
from model.training.pair_counts import PairCounts
from model.training.regularisation import regularised

POOL_POSITIONS = 32_768  # positions shuffled together; about 100 MB of histograms
READING, WRITING = "reading the data", "writing the model"  # stages of every training
SMALLEST_BATCH = 64  # of STEPS_PER_EPOCH rather than few steps, where data is small


class PositionBatch(NamedTuple):
    """Positions of histories and their next items: histogram (Q, R, B, W), last (Q,), recent (Q, K), targets (Q,)."""

    histogram: Tensor
    last: Tensor
    recent: Tensor
    targets: Tensor


def position_batches(
    histories: Histories, history_codes: NDArray[np.uint8], config: ModelConfig, batch_size: int, seed: int
) -> Iterator[PositionBatch]:
    """Iterate over all positions of an epoch, shuffled within pools of some hundred random users."""
    rng = np.random.default_rng(seed)
    lengths = np.diff(histories.starts)
    users = rng.permutation(np.flatnonzero(lengths >= 2))
    pool_of = np.cumsum(lengths[users]) // POOL_POSITIONS
    for pool in np.split(users, np.flatnonzero(np.diff(pool_of)) + 1):
        if not len(pool):
            continue
        rows = np.concatenate([np.arange(histories.starts[user], histories.starts[user + 1]) for user in pool])
        starts = np.concatenate([[0], np.cumsum(lengths[pool])])
        item = histories.item[rows]
        psi = history_codes[item]
        histograms = running_histograms(
            psi, histories.weights[rows], starts, config.decay_rates, config.history_codewords
        )
        has_next = np.ones(len(rows), bool)
        has_next[starts[1:] - 1] = False
        shuffled = rng.permutation(np.flatnonzero(has_next))
        for chosen in np.array_split(shuffled, max(1, round(len(shuffled) / batch_size))):
            yield PositionBatch(
                torch.from_numpy(histograms[chosen]),
                torch.from_numpy(item[chosen].astype(np.int64)),
                torch.from_numpy(recent_windows(item, starts, chosen, config.recent_items).astype(np.int64)),
                torch.from_numpy(item[chosen + 1].astype(np.int64)),
            )


class Trainer(TrainingLoop[PositionBatch]):
    """Trains LISA-Mini. Validation judges each epoch with the lift that it likes best, and with it the model ends."""

    def __init__(self, interactions: Interactions, parts: Split, config: Config, directory: Path, device: str) -> None:
        histories = training_histories(interactions, parts.train, config.event_weights)
        if not histories.positions:
            raise DataError("no user has two training events, so there is nothing to learn; add interactions")
        items = len(interactions.item_ids)
        counts, seed = PairCounts(histories, items, interactions.arrays), config.training.seed
        self.item_codes = item_codes.codes_of(counts.item_vectors(config.model.width, seed), config.model, seed)
        torch.manual_seed(seed)
        self.lifts = LiftChooser(histories, items, config, counts)
        self.model = build_lisa_mini(config.model, self.item_codes)
        self._set_lift(self.lifts.usual)
        super().__init__(
            self.model, histories, validation_events(interactions, parts, config), config, directory, device
        )
        self.config = config
        self._arrays = interactions.arrays
        self.ranked: LiftedRanks | None = None  # what the last validation scored
        self.chosen: ChosenLift | None = None  # and chose
        wanted = max(self.histories.positions // STEPS_PER_EPOCH, SMALLEST_BATCH)
        self._batch_size = min(config.training.batch_size, wanted)
        self._dtype = matmul_dtype(self.device)

    @property
    def trained_config(self) -> Config:
        """The configuration of the model, which has as many followers of each item as validation has chosen."""
        return self.config.model_copy(update={"model": self.model.config})

    @property
    def lift(self) -> Lift:
        """What the model lifts: what the last validation chose, or the usual."""
        return self.lifts.usual if self.chosen is None else self.chosen.lift

    @override
    def _finish(self, progress: Progress) -> None:
        self.model.fold_norms_and_round()
        self.validate(lambda done: progress.stage(f"choosing the lift, {done:.0%} of the users"))
        self._set_lift(self.lift)

    def _set_lift(self, lift: Lift) -> None:
        self.model.set_followers(self.lifts.followers(lift), lift)

    @override
    def _batches(self, seed: int) -> Iterator[tuple[PositionBatch, float]]:
        made = position_batches(
            self.histories, self.item_codes.history.codes, self.config.model, self._batch_size, seed
        )
        positions = self.histories.positions
        for batch in made:
            yield PositionBatch(*(part.to(self.device) for part in batch)), len(batch.targets) / positions
            self._arrays.release()

    @override
    def _loss(self, batch: PositionBatch) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            queries = self.model.read(batch.histogram, batch.last, batch.recent).float()
        items = len(self.model.bias)
        if items <= self.config.training.full_softmax_items:
            return full_softmax_loss(queries, self.model.item_vectors(), self.model.bias, batch.targets, self._dtype)
        negatives = torch.randperm(items)[: self.config.training.sampled_negatives].to(self.device)
        return sampled_softmax_loss(
            queries, self.model.item_vectors, self.model.bias, batch.targets, negatives, self._dtype
        )

    @override
    def _judge(self, events: HeldOutEvents, scorer: Scorer) -> Validation:
        """Choose the lift for these weights: a model is served with it."""
        self.ranked = self.lifts.ranked(events, scorer, self.config.data.seen_rule)
        self.chosen = self.lifts.choose(self.ranked)
        lift = self.chosen.lift._asdict()
        return Validation(self.chosen.mean("ndcg_at_10"), self.chosen.mean("hr_at_10"), lift)

    @override
    def _scorer(self) -> Scorer:
        """Return a scorer by the weights as they are served, without a lift."""
        with torch.inference_mode(mode=False), torch.no_grad():
            served = copy.deepcopy(self.model).eval()
            served.fold_norms_and_round()
        tables, vectors = served.tables(), served.item_vectors()

        def score(*state: NDArray[Any]) -> NDArray[np.float32]:
            histograms, last, recent = (torch.from_numpy(part).to(self.device) for part in state)
            scores = served.read(histograms, last, recent, tables) @ vectors.T + served.bias
            return scores.cpu().numpy()

        return holdout_ranks.state_scorer(score, self.item_codes.history.codes, self.config.model)

    @override
    def _require_same_training(self, path: Path, tensors: dict[str, Tensor]) -> None:
        if not torch.equal(tensors["history_codes"], self.model.history_codes.cpu()):
            raise TrainError(f"the checkpoint {path} was made on another kind of machine; train without --resume")


AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


class TrainingInputs(NamedTuple, Generic[AnyRecipe]):
    """The data of a training, and its recipe completed with the card of that data."""

    recipe: AnyRecipe
    interactions: Interactions
    parts: Split
    texts: ItemTexts
    vectors: ItemVectors | None

    def statistics(self, model: Lisa, catalogue: ItemTable) -> ItemStatistics:
        """Return what the training events tell beside the trained model, and what its items' content tells."""
        return ItemStatistics(self.complements(), self.intervals(), content(model, catalogue, self.vectors))

    def complements(self) -> Complements:
        """Return what was bought together in the training events."""
        return purchases.complements(self.interactions, self.parts.train)

    def intervals(self) -> Intervals:
        """Return after how long items were bought again in the training events, where their times tell."""
        categories = [self.texts.categories.get(name, ()) for name in self.interactions.item_ids]
        return purchases.intervals(self.interactions, self.parts.train, rarest_categories(categories))

    def catalogue(self) -> ItemTable:
        """Return the items of the data, with their training counts."""
        ids = self.interactions.item_ids
        counts = self.interactions.arrays.counted(self.interactions.item, len(ids), self.parts.train)
        titles, categories = self.texts.titles, self.texts.categories
        return ItemTable(
            ids, [titles.get(name, "") for name in ids], [categories.get(name, ()) for name in ids], counts
        )


def prepare_training(
    directory: Path, out: Path, recipe: AnyRecipe, resources: Resources, resume: bool
) -> TrainingInputs[AnyRecipe]:
    """Read and split the data of a training; raises as ``train``."""
    if model_directory.exists(out):
        raise TrainError(f"{str(out)!r} holds a model already; choose another --out or remove it")
    if (out / LAST_CHECKPOINT).exists() and not resume:
        raise TrainError(f"{str(out)!r} holds an unfinished training; go on with --resume, or remove it")
    require_device(resources.device)
    interactions = read_interactions(directory, resources.arrays(out)).stepping(recipe.event_weights)
    texts = read_items(directory)
    recipe = recipe.model_copy(update={"data": data_card(interactions, recipe.data)})
    parts = split(interactions, recipe.data.split, recipe.data.train_on)
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

    on_config  is called with the configuration as the data has completed it
    raises     DataError   when the data cannot be read or split
               TrainError  when ``out`` holds a model or an unfinished training, or a checkpoint of other options, or
                           the model needs more memory than it may take
    """
    progress.stage(READING)
    inputs = prepare_training(directory, out, config, resources, resume)
    inputs = inputs._replace(recipe=regularised(inputs.recipe))
    resources.require_enough(inputs.interactions, inputs.recipe)
    on_config(inputs.recipe)
    progress.stage(f"computing the codes of {len(inputs.interactions.item_ids):,} items")
    trainer = Trainer(inputs.interactions, inputs.parts, inputs.recipe, out, resources.device)
    trainer.fit(progress, resume)
    reports = [report._asdict() for report in trainer.reports]
    progress.stage(WRITING)
    by_strength = {} if trainer.chosen is None else trainer.chosen.ndcg_at_10_by_strength
    metrics = {"epochs": reports, "lift": trainer.lift._asdict(), "ndcg_at_10_by_lift_strength": by_strength}
    catalogue = inputs.catalogue()
    statistics = inputs.statistics(trainer.model, catalogue)
    model_directory.save(out, trainer.model, trainer.trained_config, catalogue, metrics, statistics)
    shutil.rmtree(out / CHECKPOINT)
    return model_directory.load(out)


@torch.no_grad()
def content(model: Lisa, catalogue: ItemTable, own_vectors: ItemVectors | None = None) -> ContentMap:
    """Learn what the titles, categories and own vectors of a trained model's items tell of their codes."""
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
    """Describe the data; where people return to items, as in shops, seen items stay in the ranking."""
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
        raise TrainError(f"device {device!r} is not there: torch finds no GPU; use --device cpu")
