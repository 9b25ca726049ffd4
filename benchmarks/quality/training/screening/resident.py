"""Trainings of ideas with all states in the device's memory, so that many of them share one GPU.

Positions are shuffled over the whole epoch, and products are float32 (TF32 in training), unlike in ``lisarec train``.
So compare ideas with presets that were trained here. No test event is read.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.quality.training.screening.ideas import Extras, Idea, IdeaModel, States
from benchmarks.quality.training.screening.tables import Table, states
from model.config import ModelConfig, TrainConfig
from model.data.interactions import Histories
from model.evaluation.baselines import CoVisitation
from model.holdout_ranks import ranks_full
from model.lisa import item_followers
from model.lisa.item_followers import LIFT_STRENGTHS, strongest_of
from model.metrics import gains
from model.training.batches.padding import STEPS_PER_EPOCH
from model.training.lift_choice import LiftChooser, LiftedRanks, chosen_lift
from model.training.loss import Negatives, uniform_negatives
from model.training.trainer import SMALLEST_BATCH

USERS_AT_ONCE = 256
BUCKETS = {"0": (0, 0), "1-4": (1, 4), "5-19": (5, 19), "20-99": (20, 99), "100+": (100, 1 << 40)}
MASKED = -1e9
AVERAGE_DECAYS = (0.99, 0.999)
AVERAGED_EPOCHS = 2  # the last ones, in which averaged weights are judged
STEPS_BETWEEN_CHECKS = 16

Emit = Callable[[str, dict[str, Any], NDArray[np.int64] | None], None]
"""Writes a result: the suffix of its name, its numbers, and the ranks of validation users."""


class Teachers:
    """The mean of several models' scores: a product of their joined queries with their joined item vectors."""

    def __init__(self, paths: Sequence[Path], device: torch.device) -> None:
        stored = [torch.load(path) for path in paths]
        self.count = len(stored)
        self.queries, self.validation = (
            torch.cat([one[name] for one in stored], dim=1).to(device) for name in ("queries", "validation")
        )
        self.vectors = torch.cat([one["vectors"] for one in stored], dim=1).to(device) / len(stored)
        self.bias = torch.stack([one["bias"] for one in stored]).mean(dim=0).to(device)

    def scores(self, queries: Tensor) -> Tensor:
        """Score the catalogue."""
        return queries.float() @ self.vectors.T + self.bias


class Average:
    """An exponential moving average of weights, whose decay warms up."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.steps = decay, 0
        self.weights = [weight.detach().clone() for weight in model.parameters()]

    @torch.no_grad()
    def update(self, weights: list[Tensor]) -> None:
        """Add the weights after a step."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.weights, weights, 1 - decay)

    @torch.no_grad()
    def model(self, of: IdeaModel) -> IdeaModel:
        """Return a model with the averaged weights."""
        averaged = copy.deepcopy(of)
        for weight, mean in zip(averaged.parameters(), self.weights, strict=True):
            weight.copy_(mean)
        return averaged


class Judged(NamedTuple):
    """Weights on the validation events, with the lift that was chosen."""

    ndcg_at_10: float
    ranks: NDArray[np.int64]
    plain: NDArray[np.int64]
    lift: dict[str, float]
    served: IdeaModel | None

    def numbers(self, targets: NDArray[np.int64]) -> dict[str, Any]:
        """Return what is written of it; targets are the training events of each held-out item."""
        hits = gains(self.ranks, "hr_at_10")
        by_bucket = {
            name: [round(float(hits[chosen].mean()), 5), int(chosen.sum())]
            for name, (low, high) in BUCKETS.items()
            if (chosen := (targets >= low) & (targets <= high)).any()
        }
        return {
            "ndcg_at_10": self.ndcg_at_10,
            "hr_at_10": float(hits.mean()),
            "ndcg_without_lift": float(gains(self.plain, "ndcg_at_10").mean()),
            "hr_without_lift": float(gains(self.plain, "hr_at_10").mean()),
            "lift": self.lift,
            "hr_by_training_count": by_bucket,
        }


class Training:
    """One training of an idea."""

    def __init__(self, table: Table, idea: Idea, seed: int, epochs: int, device: str, teachers: Sequence[Path]) -> None:
        shape, training = idea.settings(epochs)
        self.table, self.seed, self.device = table, seed, torch.device(device)
        self.extras: Extras = idea.extras
        self.shape: ModelConfig = shape
        self.training: TrainConfig = training.model_copy(update={"seed": seed})
        config = table.config.model_copy(update={"model": shape, "training": self.training})
        torch.manual_seed(seed)
        self.chooser = LiftChooser(table.histories, table.items, config, table)  # type: ignore[arg-type]
        self.teachers = Teachers(teachers, self.device) if teachers else None
        self.targets = table.popularity[table.events.targets]
        if idea.is_average:
            return
        codes = table.codes(shape, seed)
        torch.manual_seed(seed)
        self.model = idea.model(shape, codes).to(self.device)
        history, held_out = table.histories, table.events.histories
        at = np.delete(np.arange(len(history.item)), history.starts[1:][history.lengths > 0] - 1)
        made = codes.history.codes, shape, self.device
        self.states = states(history, table.times_s, at, *made)
        self.next = torch.from_numpy(history.item[at + 1].astype(np.int64)).to(self.device)
        self.asked = states(held_out, table.validation_s, held_out.starts[1:] - 1, *made)
        self.every_item = table.items <= self.training.full_softmax_items

    def average(self) -> Judged:
        """Judge the teachers."""
        teachers = self.teachers
        assert teachers is not None
        return self._judged(lambda rows: teachers.scores(teachers.validation[rows]), None)

    def fit(self, stop_at: float, averages: Sequence[Average], emit: Emit) -> Judged | None:
        """Train to the last epoch, or until this time; emit the best epoch, which is returned."""
        training = self.training
        weights: list[Tensor] = list(self.model.parameters())
        optimizer = torch.optim.AdamW(
            weights, lr=0.0, betas=(0.9, 0.98), weight_decay=training.weight_decay, fused=True
        )
        size = min(training.batch_size, max(len(self.next) // STEPS_PER_EPOCH, SMALLEST_BATCH))
        steps = max(1, round(len(self.next) / size))
        begin, best = time.monotonic(), None
        averaged: dict[float, Judged] = {}
        about: dict[str, Any] = {"by_epoch": [], "plain_by_epoch": [], "losses": []}
        for epoch in range(training.epochs):
            torch.manual_seed(training.seed * 100_003 + epoch)
            self.model.train()
            total = torch.zeros((), device=self.device)
            batches = torch.randperm(len(self.next), device=self.device).tensor_split(steps)
            for step, rows in enumerate(batches):
                if step % STEPS_BETWEEN_CHECKS == 0 and time.time() > stop_at:
                    break
                optimizer.param_groups[0]["lr"] = self._rate((epoch + step / steps) / training.epochs)
                loss = self._loss(rows)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                for one in averages:
                    one.update(weights)
                total += loss.detach()
            about["stopped"] = time.time() > stop_at
            if about["stopped"]:
                break
            about["losses"].append(round(float(total) / steps, 4))
            judged = self.judge(self.model)
            about["by_epoch"].append(round(judged.ndcg_at_10, 5))
            about["plain_by_epoch"].append(round(float(gains(judged.plain, "ndcg_at_10").mean()), 5))
            best = judged if best is None or judged.ndcg_at_10 >= best.ndcg_at_10 else best
            if epoch >= training.epochs - AVERAGED_EPOCHS:
                for one in averages:
                    judged = self.judge(one.model(self.model))
                    if one.decay not in averaged or judged.ndcg_at_10 >= averaged[one.decay].ndcg_at_10:
                        averaged[one.decay] = judged
            about["epochs"] = epoch + 1
        about["seconds"] = round(time.monotonic() - begin, 1)
        about["teachers"] = 0 if self.teachers is None else self.teachers.count
        if best is None:
            emit("", about, None)
            return None
        emit("", about | best.numbers(self.targets), best.ranks)
        emit(",without-lift", {"ndcg_at_10": float(gains(best.plain, "ndcg_at_10").mean())}, best.plain)
        for decay, judged in averaged.items():
            emit(f",average={decay:g}", judged.numbers(self.targets), judged.ranks)
        return best

    def _rate(self, share: float) -> float:
        """Return the learning rate as the project's trainings do."""
        training = self.training
        warm = min(1.0, (share + 1e-4) / training.warmup_share) if training.warmup_share else 1.0
        return training.learning_rate * max(warm * (0.5 + 0.5 * math.cos(math.pi * share)), self.extras.floor)

    def _loss(self, rows: Tensor) -> Tensor:
        model, extras, targets = self.model, self.extras, self.next[rows]
        queries = model.queries(self.states.at(rows), self.every_item)
        offset: Tensor | float = 0.0
        if self.every_item:
            logits = model.logits(queries, model.item_vectors(), model.bias)
            own = F.cross_entropy(logits, targets, label_smoothing=extras.smoothing)
        else:
            drawn = torch.randperm(self.table.items, device=self.device)[: self.training.sampled_negatives]
            negatives = uniform_negatives(drawn, self.table.items)
            positive = model.own_logits(queries, model.item_vectors(targets), model.bias[targets])
            others = model.logits(queries, model.item_vectors(drawn), model.bias[drawn])
            logits, offset = self._candidates(positive, others, targets, negatives)
            own = F.cross_entropy(logits + offset, torch.zeros_like(targets))
        if self.teachers is None:
            return own
        with torch.no_grad():
            taught = self._taught(rows, targets, None if self.every_item else negatives)
            shares = (taught / extras.temperature + offset).softmax(dim=1)
        found = (logits / extras.temperature + offset).log_softmax(dim=1)
        soft = -(shares * found).sum(dim=1).mean() * extras.temperature**2
        return (1 - extras.weight) * own + extras.weight * soft

    def _taught(self, rows: Tensor, targets: Tensor, negatives: Negatives | None) -> Tensor:
        """Return the teachers' scores of the same candidates."""
        teachers = self.teachers
        assert teachers is not None
        queries = teachers.queries[rows].float()
        if negatives is None:
            return teachers.scores(queries)
        drawn = negatives.items
        positive = (queries * teachers.vectors[targets]).sum(dim=1) + teachers.bias[targets]
        others = queries @ teachers.vectors[drawn].T + teachers.bias[drawn]
        return self._candidates(positive, others, targets, negatives)[0]

    def _candidates(
        self, positive: Tensor, others: Tensor, targets: Tensor, negatives: Negatives
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of the target and the negatives, and what is added to them: (Q, 1 + S) and (1 + S,)."""
        others = others.masked_fill(targets[:, None] == negatives.items, MASKED)
        offset = torch.full((1 + others.shape[1],), float(negatives.log_counts), device=self.device)
        offset[0] = 0
        return torch.cat([positive[:, None], others], dim=1), offset

    @torch.no_grad()
    def judge(self, model: IdeaModel) -> Judged:
        """Judge weights as they would be served."""
        served = copy.deepcopy(model).eval()
        served.fold_norms_and_round()
        return self._judged(self.scores_of(served), served)

    @torch.no_grad()
    def scores_of(self, served: IdeaModel) -> Callable[[slice], Tensor]:
        """Return a function that scores the catalogue for some validation users."""
        vectors = served.item_vectors()

        def scores(rows: slice) -> Tensor:
            queries = served.queries(self.asked.at(rows), self.every_item)
            return served.logits(queries, vectors, served.bias)

        return scores

    @torch.no_grad()
    def _judged(self, scores: Callable[[slice], Tensor], served: IdeaModel | None) -> Judged:
        ranked = self.ranked(scores, self.chooser)
        chosen = self.chooser.choose(ranked)
        plain = ranked.ranks(chosen.lift._replace(strength=0.0))
        return Judged(chosen.mean("ndcg_at_10"), chosen.ranks, plain, chosen.lift._asdict(), served)

    @torch.no_grad()
    def ranked(self, scores: Callable[[slice], Tensor], chooser: LiftChooser) -> LiftedRanks:
        """Score the validation events."""
        done = 0

        def scorer(block: Histories) -> NDArray[np.float32]:
            nonlocal done
            rows, done = slice(done, done + len(block)), done + len(block)
            found: NDArray[np.float32] = scores(rows).float().cpu().numpy()
            return found

        torch.set_float32_matmul_precision("highest")
        ranked = chooser.ranked(self.table.events, scorer, self.table.config.data.seen_rule)
        torch.set_float32_matmul_precision("high")
        return ranked

    @torch.no_grad()
    def save(self, served: IdeaModel, path: Path) -> None:
        """Write what ``Teachers`` reads."""

        def queries(of: States) -> Tensor:
            parts = (of.at(slice(begin, begin + 4096)) for begin in range(0, len(of.last), 4096))
            return torch.cat([served.queries(part, self.every_item).half().cpu() for part in parts])

        made = {"queries": queries(self.states), "validation": queries(self.asked)}
        about = {"vectors": served.item_vectors().cpu(), "bias": served.bias.detach().cpu()}
        torch.save(made | about, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def rare(self, served: IdeaModel, lift: dict[str, float]) -> Iterator[tuple[str, Judged]]:
        """Yield how lifts and biases for rare items would rank, and co-visitation beside them."""
        table, scores = self.table, self.scores_of(served)
        for query_decay in (0.2, 0.8):
            scorer = CoVisitation(10, 0.4, query_decay).fit(table.histories, table.items)
            ranks = ranks_full(table.events, scorer, table.config.data.seen_rule)
            ndcg = float(gains(ranks, "ndcg_at_10").mean())
            yield f",co-visitation={query_decay:g}", Judged(ndcg, ranks, ranks, {}, None)
        backwards = sparse.csr_array(table.counts + 0.5 * table.counts.T)
        logs = torch.from_numpy(np.log1p(table.popularity)).float().to(self.device)
        trials = (
            ("shrinkage 1", 1.0, 16, False, 0.0),
            ("bias -0.3", 5.0, 16, False, -0.3),
            ("backwards", 5.0, 16, True, 0.0),
            ("shrinkage 0.3", 0.3, 16, False, 0.0),
            ("bias 0.3", 5.0, 16, False, 0.3),
            ("backwards, shrinkage 1, 32 followers", 1.0, 32, True, 0.0),
            ("shrinkage 1, bias -0.3", 1.0, 16, False, -0.3),
            ("bias -0.6", 5.0, 16, False, -0.6),
        )
        for name, shrinkage, count, both, slope in trials:
            chooser = copy.copy(self.chooser)
            with mock.patch.object(item_followers, "SHRINKAGE", shrinkage):
                chooser.followers = strongest_of(backwards if both else table.counts, count)
            ranked = self.ranked(lambda rows, slope=slope: scores(rows) + slope * logs, chooser)  # type: ignore[misc]
            usual = chooser.usual._replace(followers=count, decay=lift["decay"])
            chosen = chosen_lift(ranked.ranks, usual, (*LIFT_STRENGTHS, 24.0), (usual.decay,))
            plain = ranked.ranks(chosen.lift._replace(strength=0.0))
            yield f",{name}", Judged(chosen.mean("ndcg_at_10"), chosen.ranks, plain, chosen.lift._asdict(), None)
