"""The training loop: positions of many users' histories, shuffled together, each a state and the item that came next.

Codes are fixed, so a position's histogram is data: it is computed once per epoch by a scan, and no batch is padded.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from model import artifact, codes, data, metrics, ranking
from model.config import Config, DataCard, ModelConfig
from model.followers import STRENGTH, STRENGTHS, strongest
from model.histogram import running_histograms
from model.items import Items
from model.lisa import build
from model.loss import full_softmax_loss, matmul_dtype, sampled_softmax_loss
from model.recent import windows

POOL_POSITIONS = 32_768  # positions shuffled together; about 100 MB of histograms
CHECKPOINT = "checkpoint"
BEST, LAST = f"{CHECKPOINT}/best.safetensors", f"{CHECKPOINT}/last.safetensors"
MOMENTS = "optimizer."
STEPS_PER_EPOCH = 256  # small data gets smaller batches, down to SMALLEST_BATCH, rather than few steps
SMALLEST_BATCH = 64


class TrainError(ValueError):
    """A training that cannot start; the message names the way out."""


class Batch(NamedTuple):
    """Positions of histories and what came next: histogram (Q, R, B, W), last (Q,), recent (Q, K), targets (Q,)."""

    histogram: Tensor
    last: Tensor
    recent: Tensor
    targets: Tensor


class EpochReport(NamedTuple):
    """What an epoch came to; ``ndcg_at_10`` is that of validation, None where nothing is held out."""

    epoch: int
    loss: float
    ndcg_at_10: float | None
    hr_at_10: float | None
    elapsed_s: float


class Progress(Protocol):
    """Follows a training run; the command line draws it."""

    def batch(self, epoch: int, share: float, loss: float) -> None: ...
    def epoch(self, report: EpochReport) -> None: ...


def batches(
    histories: data.Histories, history_codes: NDArray[np.uint8], config: ModelConfig, batch_size: int, seed: int
) -> Iterator[Batch]:
    """All positions of an epoch in random order, near enough: shuffled within pools of some hundred random users."""
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
            yield Batch(
                torch.from_numpy(histograms[chosen]),
                torch.from_numpy(item[chosen].astype(np.int64)),
                torch.from_numpy(windows(item, starts, chosen, config.recent_items).astype(np.int64)),
                torch.from_numpy(item[chosen + 1].astype(np.int64)),
            )


class Trainer:
    """Trains one model on one split; every epoch ends with a checkpoint that ``fit`` can go on from.

    All randomness of an epoch comes from (seed, epoch), so a resumed run equals one that was never interrupted.
    """

    def __init__(
        self, interactions: data.Interactions, parts: data.Split, config: Config, directory: Path, device: str
    ) -> None:
        self.config = config
        self.directory = directory
        self.device = torch.device(device)
        self.histories = data.training_histories(interactions, parts.train, config.event_weights)
        if not self.histories.positions:
            raise data.DataError("no user has two training events, so there is nothing to learn; add interactions")
        self.item_codes = codes.item_codes(
            self.histories.item, self.histories.starts, len(interactions.item_ids), config.model, config.training.seed
        )
        torch.manual_seed(config.training.seed)
        followers = strongest(
            self.histories.item, self.histories.starts, len(interactions.item_ids), config.model.followers
        )
        self.model = build(config.model, self.item_codes, followers).to(self.device)
        if config.training.lift_strength is not None:
            self.model.lift.mul_(config.training.lift_strength / STRENGTH)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=config.training.weight_decay, fused=True
        )
        self.validation = (
            ranking.held_out(interactions, parts.validation, config) if config.data.train_on == "train" else None
        )
        self.reports: list[EpochReport] = []
        self.ndcg_at_10_by_strength: dict[float, float] = {}  # of the lift, after training
        wanted = max(self.histories.positions // STEPS_PER_EPOCH, SMALLEST_BATCH)
        self._batch_size = min(config.training.batch_size, wanted)
        self._dtype = matmul_dtype(self.device)

    def fit(self, progress: Progress, resume: bool) -> None:
        """Train to the last epoch, or until validation stops improving; the model ends with its best weights."""
        if resume:
            self._load_checkpoint()
        while len(self.reports) < self.config.training.epochs and not self._out_of_patience():
            report = self._epoch(len(self.reports), progress)
            self.reports.append(report)
            self._save_checkpoint()
            progress.epoch(report)
        if self.validation is not None:
            self.model.load_state_dict(load_file(self.directory / BEST))
        self.model.settle()
        if self.validation is not None and len(self.validation) and self.config.training.lift_strength is None:
            self._choose_strength()
        self.model.to("cpu").eval()

    def _choose_strength(self) -> None:
        """Scale what followers gain to what validation likes best: it depends on how rare the items are."""
        unit = self.model.lift / STRENGTH
        for strength in STRENGTHS:
            self.model.lift.copy_(unit * strength)
            self.ndcg_at_10_by_strength[strength] = self._validate().get("ndcg_at_10", 0.0)
        best = max(STRENGTHS, key=self.ndcg_at_10_by_strength.__getitem__)
        self.model.lift.copy_(unit * best)

    def _epoch(self, epoch: int, progress: Progress) -> EpochReport:
        started = time.monotonic()
        training, seed = self.config.training, self.config.training.seed * 100_003 + epoch
        torch.manual_seed(seed)
        self.model.train()
        done, losses = 0, []
        for batch in batches(self.histories, self.item_codes.history.codes, self.config.model, self._batch_size, seed):
            self._set_learning_rate((epoch + done / self.histories.positions) / training.epochs)
            losses.append(self._step(Batch(*(tensor.to(self.device) for tensor in batch))))
            done += len(batch.targets)
            progress.batch(epoch, done / self.histories.positions, losses[-1])
        found = self._validate()
        elapsed_s = time.monotonic() - started
        return EpochReport(epoch, sum(losses) / len(losses), found.get("ndcg_at_10"), found.get("hr_at_10"), elapsed_s)

    def _step(self, batch: Batch) -> float:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            queries = self.model.read(batch.histogram, batch.last, batch.recent).float()
        items = len(self.model.bias)
        if items <= self.config.training.full_softmax_items:
            loss = full_softmax_loss(queries, self.model.item_vectors(), self.model.bias, batch.targets, self._dtype)
        else:
            negatives = torch.randperm(items)[: self.config.training.sampled_negatives].to(self.device)
            loss = sampled_softmax_loss(
                queries, self.model.item_vectors, self.model.bias, batch.targets, negatives, self._dtype
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())

    def _set_learning_rate(self, share: float) -> None:
        """Linear warm-up, then a cosine down to a hundredth; ``share`` of the whole training is done."""
        training = self.config.training
        warm = min(1.0, (share + 1e-4) / training.warmup_share) if training.warmup_share else 1.0
        cosine = 0.5 + 0.5 * math.cos(math.pi * share)
        for group in self.optimizer.param_groups:
            group["lr"] = training.learning_rate * max(warm * cosine, 0.01)

    @torch.inference_mode()
    def _validate(self) -> dict[str, float]:
        if self.validation is None or not len(self.validation):
            return {}
        self.model.eval()
        tables, vectors = self.model.tables(), self.model.item_vectors()

        def score(*state: NDArray[Any]) -> NDArray[np.float32]:
            histograms, last, recent = (torch.from_numpy(part).to(self.device) for part in state)
            queries = self.model.read(histograms, last, recent, tables)
            scores = queries @ vectors.T + self.model.bias
            return scores.scatter_add_(1, *self.model.lifts(recent)).cpu().numpy()

        scorer = ranking.from_states(score, self.item_codes.history.codes, self.config.model)
        return metrics.metrics(ranking.ranks_full(self.validation, scorer, self.config.data.seen_rule))

    def _best(self) -> int:
        """The epoch of the best validation NDCG@10; the last one where nothing is held out."""
        return max(range(len(self.reports)), key=lambda epoch: (self.reports[epoch].ndcg_at_10 or 0.0, epoch))

    def _out_of_patience(self) -> bool:
        held_out = self.validation is not None and len(self.validation) > 0
        return held_out and bool(self.reports) and len(self.reports) - 1 - self._best() >= self.config.training.patience

    def _save_checkpoint(self) -> None:
        weights = {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}
        names = [name for name, _ in self.model.named_parameters()]
        moments = {
            f"{MOMENTS}{names[index]}.{key}": tensor.cpu()
            for index, state in self.optimizer.state_dict()["state"].items()
            for key, tensor in state.items()
        }
        about = {
            "config": self.config.model_dump_json(),
            "reports": json.dumps([report._asdict() for report in self.reports]),
        }
        (self.directory / CHECKPOINT).mkdir(parents=True, exist_ok=True)
        if self._best() == len(self.reports) - 1:
            _replace(self.directory / BEST, weights, {})
        _replace(self.directory / LAST, weights | moments, about)

    def _load_checkpoint(self) -> None:
        path = self.directory / LAST
        if not path.is_file():
            raise TrainError(f"there is no checkpoint {path} to resume from; train without --resume")
        with safe_open(path, "pt") as checkpoint:
            about = checkpoint.metadata()
            tensors = {name: checkpoint.get_tensor(name) for name in checkpoint.keys()}  # noqa: SIM118 (no mapping)
        if about["config"] != self.config.model_dump_json():
            raise TrainError(f"the checkpoint {path} was trained with other options; give the same ones to resume")
        if not torch.equal(tensors["history_codes"], self.model.history_codes.cpu()):
            raise TrainError(f"the checkpoint {path} was made on another kind of machine; train without --resume")
        self.reports = [EpochReport(**report) for report in json.loads(about["reports"])]
        self.model.load_state_dict({name: t for name, t in tensors.items() if not name.startswith(MOMENTS)})
        names = [name for name, _ in self.model.named_parameters()]
        state = {
            index: {key: tensors[f"{MOMENTS}{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            for index, name in enumerate(names)
        }
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})


def train(
    directory: Path, out: Path, config: Config, *, device: str = "cpu", resume: bool = False, progress: Progress
) -> artifact.Artifact:
    """Train a model on a data directory and save it as a model directory.

    ``config.data`` names the split and what to train on; its hash, counts and seen rule are filled in from the data.
    raises  DataError   when the data cannot be read or split
            TrainError  when ``out`` holds a model or an unfinished training, or a checkpoint of other options
    """
    if artifact.exists(out):
        raise TrainError(f"{str(out)!r} holds a model already; choose another --out or remove it")
    if (out / LAST).exists() and not resume:
        raise TrainError(f"{str(out)!r} holds an unfinished training; go on with --resume, or remove it")
    _require_device(device)
    interactions = data.read_interactions(directory).stepping(config.event_weights)
    texts = data.read_items(directory)
    config = config.model_copy(update={"data": data_card(interactions, config.data)})
    parts = data.split(interactions, config.data.split, config.data.train_on)
    trainer = Trainer(interactions, parts, config, out, device)
    trainer.fit(progress, resume)
    counts = np.bincount(interactions.item[parts.train], minlength=len(interactions.item_ids)).astype(np.int64)
    items = Items(
        interactions.item_ids,
        [texts.titles.get(name, "") for name in interactions.item_ids],
        [texts.categories.get(name, ()) for name in interactions.item_ids],
        counts,
    )
    reports = [report._asdict() for report in trainer.reports]
    found = {"epochs": reports, "ndcg_at_10_by_lift_strength": trainer.ndcg_at_10_by_strength}
    artifact.save(out, trainer.model, config, items, found)
    shutil.rmtree(out / CHECKPOINT)
    return artifact.load(out)


def data_card(interactions: data.Interactions, wanted: DataCard) -> DataCard:
    """What the data is; people buy again in shops, so there seen items stay in the ranking."""
    repeats = data.repeat_share(interactions) > data.REPEAT_SHARE_OF_SHOPS
    return wanted.model_copy(
        update={
            "sha256": interactions.sha256,
            "seen_rule": "none" if repeats else "all",
            "users": len(interactions.user_ids),
            "events": len(interactions),
        }
    )


def _require_device(device: str) -> None:
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise TrainError(f"device {device!r} is not there: torch finds no GPU; use --device cpu")


def _replace(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata)
    os.replace(unfinished, path)
