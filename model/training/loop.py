"""The training loop of every model: epochs, checkpoints, learning rate and early stopping."""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from model import holdout_ranks, metrics
from model.artifact.tensor_file import replace_tensors
from model.config import Recipe
from model.data.arrays import shares_of
from model.data.interactions import Histories, Interactions
from model.data.splits import Split
from model.holdout_ranks import HeldOutEvents, Scorer

CHECKPOINT = "checkpoint"
BEST_CHECKPOINT, LAST_CHECKPOINT = f"{CHECKPOINT}/best.safetensors", f"{CHECKPOINT}/last.safetensors"
OPTIMIZER_PREFIX = "optimizer."
VALIDATION_USERS = 10_000

Batch = TypeVar("Batch")


class TrainError(ValueError):
    """A training cannot start or continue. The message says what to do."""


class Validation(NamedTuple):
    """The quality of an epoch's weights on held-out events, as they would be served.

    lift  the lift that validation chose for them, if the model has one
    """

    ndcg_at_10: float
    hr_at_10: float
    lift: dict[str, float] | None = None


class EpochReport(NamedTuple):
    """The result of an epoch. The fields of ``Validation`` are None if no events are held out."""

    epoch: int
    loss: float
    ndcg_at_10: float | None
    hr_at_10: float | None
    elapsed_s: float
    lift: dict[str, float] | None = None


class Progress:
    """Follows a training run and shows nothing; subclasses show what they override."""

    def stage(self, name: str) -> None:
        """Report the current stage, until the next batch or stage."""

    def batch(self, epoch: int, share: float, loss: float, events: int) -> None:
        """Report a batch: the completed share of the epoch, the batch's loss, and the number of events of an epoch."""

    def epoch(self, report: EpochReport) -> None:
        """Report the end of an epoch."""


class TrainingLoop(ABC, Generic[Batch]):
    """Trains one network on one split; every epoch ends with a checkpoint that ``fit`` can resume from.

    All randomness of an epoch comes from (seed, epoch), so a resumed run equals one that was never interrupted.
    """

    def __init__(
        self,
        network: nn.Module,
        histories: Histories,
        validation: HeldOutEvents | None,
        recipe: Recipe,
        directory: Path,
        device: str,
    ) -> None:
        self.recipe = recipe
        self.directory = directory
        self.device = torch.device(device)
        self.network = network.to(self.device)
        self.histories = histories
        self.positions = histories.positions  # of an epoch
        self.optimizer = torch.optim.AdamW(
            network.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=recipe.training.weight_decay, fused=True
        )
        self.validation = validation
        self.reports: list[EpochReport] = []

    @abstractmethod
    def _batches(self, seed: int) -> Iterator[tuple[Batch, float]]:
        """Iterate over the batches of an epoch, each with its share of the epoch."""

    @abstractmethod
    def _loss(self, batch: Batch) -> Tensor:
        """Compute the mean loss of a batch."""

    def _forward(self, batch: Batch) -> Tensor:
        """Compute the loss of a step. A subclass may combine several processes."""
        return self._loss(batch)

    @property
    def _writes(self) -> bool:
        """Whether this process writes checkpoints, and ends with the best weights."""
        return True

    def _shared(self, report: EpochReport) -> EpochReport:
        """Return the report that is valid for all processes of the training."""
        return report

    @abstractmethod
    def _scorer(self) -> Scorer:
        """Return a scorer with the network's current weights. The network does not change."""

    def fit(self, progress: Progress, resume: bool) -> None:
        """Train to the last epoch, or until validation stops improving; the model ends with its best weights."""
        if resume:
            self._load_checkpoint()
        while len(self.reports) < self.recipe.training.epochs and not self._out_of_patience():
            report = self._shared(self._epoch(len(self.reports), progress))
            self.reports.append(report)
            if self._writes:
                self._save_checkpoint()
            progress.epoch(report)
        if not self._writes:
            return
        if self.validation is not None:
            self.network.load_state_dict(_read_checkpoint(self.directory / BEST_CHECKPOINT)[1])
        self._finish(progress)
        self.network.to("cpu").eval()

    def _finish(self, progress: Progress) -> None:
        """Complete the best weights, on the device of the training."""

    def _epoch(self, epoch: int, progress: Progress) -> EpochReport:
        started = time.monotonic()
        training = self.recipe.training
        seed = training.seed * 100_003 + epoch
        torch.manual_seed(seed)
        self.network.train()
        done, losses = 0.0, []
        for batch, share in self._batches(seed):
            factor = learning_rate_factor((epoch + done) / training.epochs, training.warmup_share)
            for group in self.optimizer.param_groups:
                group["lr"] = training.learning_rate * factor
            losses.append(self.train_batch(batch))
            done += share
            progress.batch(epoch, min(done, 1.0), losses[-1], self.positions)
        validated = self.validate(shares_of(f"validating epoch {epoch + 1}", progress.stage))
        elapsed_s, loss = time.monotonic() - started, sum(losses) / len(losses)
        if validated is None:
            return EpochReport(epoch, loss, None, None, elapsed_s)
        return EpochReport(epoch, loss, validated.ndcg_at_10, validated.hr_at_10, elapsed_s, validated.lift)

    def train_batch(self, batch: Batch) -> float:
        """Learn from one batch; return its loss."""
        loss = self._forward(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())

    @torch.inference_mode()
    def validate(self, on_progress: Callable[[float], None] = lambda _: None) -> Validation | None:
        """Validate the current weights on the held-out events. Return None if there are none.

        on_progress  is called with the share of the events that is ranked
        """
        if self.validation is None or not len(self.validation):
            return None
        self.network.eval()
        return self._judge(self.validation, _reporting(self._scorer(), len(self.validation), on_progress))

    def _judge(self, events: HeldOutEvents, scorer: Scorer) -> Validation:
        """Measure the scorer's ranking. A subclass may also choose parameters that are served with the weights."""
        ranks = holdout_ranks.ranks_full(events, scorer, self.recipe.data.seen_rule)
        found = metrics.metrics(ranks)
        return Validation(found["ndcg_at_10"], found["hr_at_10"])

    def _best(self) -> int:
        """Return the epoch with the best validation NDCG@10; the last one if no events are held out."""
        return max(range(len(self.reports)), key=lambda epoch: (self.reports[epoch].ndcg_at_10 or 0.0, epoch))

    def _out_of_patience(self) -> bool:
        is_judged = bool(self.reports) and self.reports[-1].ndcg_at_10 is not None
        return is_judged and len(self.reports) - 1 - self._best() >= self.recipe.training.patience

    def _save_checkpoint(self) -> None:
        weights = {name: tensor.cpu() for name, tensor in self.network.state_dict().items()}
        names = [name for name, _ in self.network.named_parameters()]
        moments = {
            f"{OPTIMIZER_PREFIX}{names[index]}.{key}": tensor.cpu()
            for index, state in self.optimizer.state_dict()["state"].items()
            for key, tensor in state.items()
        }
        about = {
            "config": self.recipe.model_dump_json(),
            "reports": json.dumps([report._asdict() for report in self.reports]),
        }
        (self.directory / CHECKPOINT).mkdir(parents=True, exist_ok=True)
        if self._best() == len(self.reports) - 1:
            replace_tensors(self.directory / BEST_CHECKPOINT, weights)
        replace_tensors(self.directory / LAST_CHECKPOINT, weights | moments, about)

    def _load_checkpoint(self) -> None:
        path = self.directory / LAST_CHECKPOINT
        about, tensors = _read_checkpoint(path)
        own = self.recipe.model_dump_json()
        if _without_origins(about["config"]) != _without_origins(own):
            if _options(about["config"]) == _options(own):
                raise TrainError(
                    f"the checkpoint {path} was trained on other events; resume with the events it began with, and "
                    "copy an archive that grows before training on it"
                )
            raise TrainError(
                f"the checkpoint {path} was trained with other options; use the same options to resume: "
                f"{_changes(_options(about['config']), _options(own))}"
            )
        self._require_same_training(path, tensors)
        self.reports = [EpochReport(**report) for report in json.loads(about["reports"])]
        self.network.load_state_dict({name: t for name, t in tensors.items() if not name.startswith(OPTIMIZER_PREFIX)})
        names = [name for name, _ in self.network.named_parameters()]
        state = {
            index: {key: tensors[f"{OPTIMIZER_PREFIX}{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            for index, name in enumerate(names)
            if f"{OPTIMIZER_PREFIX}{name}.step" in tensors  # frozen parameters have none
        }
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})

    def _require_same_training(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Raise TrainError if the checkpoint's tensors belong to another training. Subclasses may check this."""
        return


def _read_checkpoint(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return a checkpoint's metadata and tensors; raises TrainError when it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as exc:
        raise TrainError(
            f"the checkpoint {path} is damaged; delete '{path.parent}', and train without --resume: {exc}"
        ) from exc


def learning_rate_factor(share: float, warmup_share: float) -> float:
    """Return the factor after a share of the training: warm up linearly, then follow a cosine down to a hundredth."""
    warm = min(1.0, (share + 1e-4) / warmup_share) if warmup_share else 1.0
    return max(warm * (0.5 + 0.5 * math.cos(math.pi * share)), 0.01)


def _options(config: str) -> dict[str, Any]:
    """Return a configuration without what its data have given."""
    options = _without_origins(config)
    for name in ("sha256", "seen_rule", "users", "events", "events_per_item"):
        options["data"].pop(name, None)
    return options


def _changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return text about the options that differ. Those that one configuration does not have are None."""
    old, new = _flat(before), _flat(now)
    names = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    return ", ".join(f"{name} was {old.get(name)}, now {new.get(name)}" for name in names)


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    parts = [part if isinstance(part, dict) else {name: part} for name, part in config.items()]
    return {name: value for part in parts for name, value in part.items()}


def _without_origins(config: str) -> dict[str, Any]:
    """Return a configuration without what an evaluation alone reads, which earlier versions did not write."""
    whole: dict[str, Any] = json.loads(config)
    for part, name in (("data", "cutoff_us"), ("data", "events_before_cutoff"), ("training", "warm_knows_no_tests")):
        whole[part].pop(name, None)
    return whole


def validation_events(interactions: Interactions, parts: Split, recipe: Recipe) -> HeldOutEvents | None:
    """Return the validation events for the epochs, or None if the model trains on them.

    At most 10,000 users are drawn, always the same ones, so that validation takes seconds.
    """
    if recipe.data.train_on != "train":
        return None
    drawn = np.random.default_rng(0).permutation(parts.validation)[:VALIDATION_USERS]
    return holdout_ranks.held_out_events(interactions, np.sort(drawn), recipe)


def _reporting(scorer: Scorer, histories: int, on_progress: Callable[[float], None]) -> Scorer:
    """Return a scorer that also reports its progress, block by block, as a share of this number of histories."""
    done = 0

    def scored(block: Histories) -> NDArray[np.float32]:
        nonlocal done
        on_progress(done / histories)
        done += len(block.lengths)
        return scorer(block)

    return scored
