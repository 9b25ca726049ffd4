"""Protocols and metrics. A tie counts against the model; an item that may not be shown is a miss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.artifact import Artifact
from model.config import DataCard, Protocol, SeenRule, TrainOn
from model.data import DataError, Interactions, read_interactions, split
from model.engine import Engine
from model.histogram import history_histogram

RECENT_ITEMS = 24  # what a served state remembers as recently seen
CUTOFFS = (1, 5, 10, 50)
USERS_PER_BLOCK = 256
SAMPLED_NEGATIVES = 100

Scorer = Callable[[NDArray[np.float32], NDArray[np.uint8]], NDArray[np.float32]]


@dataclass(frozen=True)
class HeldOut:
    """Held-out events with the state each is predicted from.

    histograms  (Q, R, B, W) float32   of everything before the held-out event
    last_codes  (Q, B)       uint8
    targets     (Q,)         int64     the held-out items
    history     Q arrays     int32     the items before, oldest first
    users       (Q,)         int32
    """

    histograms: NDArray[np.float32]
    last_codes: NDArray[np.uint8]
    targets: NDArray[np.int64]
    history: list[NDArray[np.int32]]
    users: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class Report:
    """What an evaluation came to, with all that is needed to repeat it."""

    generation: str
    protocol: Protocol
    data_sha256: str
    train_on: TrainOn
    seen_rule: SeenRule
    items: int
    users: NDArray[np.int32]
    ranks: NDArray[np.int64]

    def to_json(self) -> dict[str, Any]:
        """Metrics with their protocol in the name, e.g. ``hr_at_10_full``, and 95 % intervals for the cutoff 10."""
        suffix = {"loo_full": "full", "loo_sampled100": "sampled100", "temporal": "temporal"}[self.protocol]
        return {
            "generation": self.generation,
            "protocol": self.protocol,
            "data_sha256": self.data_sha256,
            "train_on": self.train_on,
            "seen_rule": self.seen_rule,
            "tie_rule": "against the model",
            "users": len(self.ranks),
            "items": self.items,
            "metrics": {f"{name}_{suffix}": value for name, value in metrics(self.ranks).items()},
            "interval_95": {
                f"{name}_{suffix}": interval_95(self.ranks, name) for name in ("hr_at_10", "ndcg_at_10", "mrr_at_10")
            },
        }


def held_out(
    interactions: Interactions,
    positions: NDArray[np.int64],
    codes: NDArray[np.uint8],
    decay_rates: tuple[float, ...],
    codewords: int,
    event_weights: Mapping[str, float],
) -> HeldOut:
    """States before each of the given positions, which need at least one event of the same user before them."""
    weights = interactions.weights(event_weights)
    users = interactions.user[positions]
    begins = interactions.starts[users]
    histograms = np.empty((len(positions), len(decay_rates), codes.shape[1], codewords), np.float32)
    history = []
    for row, (begin, end) in enumerate(zip(begins, positions, strict=True)):
        items = interactions.item[begin:end]
        histograms[row] = history_histogram(codes[items], decay_rates, codewords, weights[begin:end])
        history.append(items)
    last = codes[interactions.item[positions - 1]]
    return HeldOut(histograms, last, interactions.item[positions].astype(np.int64), history, users)


def excluded_items(history: NDArray[np.int32], rule: SeenRule) -> NDArray[np.int32]:
    """Items that the seen rule keeps out of a user's recommendations."""
    if rule == "none":
        return history[:0]
    return history[-RECENT_ITEMS:] if rule == "recent" else history


def ranks_full(events: HeldOut, scorer: Scorer, seen_rule: SeenRule) -> NDArray[np.int64]:
    """Rank of each held-out item among the whole catalogue, best 1: (Q,).

    scorer  takes (block, R, B, W) and (block, B), gives scores (block, N)
    raises  ValueError for scores that are not finite
    """
    ranks = np.empty(len(events), np.int64)
    for block, scores in _score_blocks(events, scorer):
        rows = np.arange(len(scores))
        targets = events.targets[block]
        for row, history in zip(rows, events.history[block], strict=True):
            scores[row, excluded_items(history, seen_rule)] = -np.inf
        own = scores[rows, targets][:, None]
        ranks[block] = np.where(np.isneginf(own[:, 0]), scores.shape[1] + 1, (scores >= own).sum(axis=1))
    return ranks


def ranks_sampled(events: HeldOut, scorer: Scorer, seed: int) -> NDArray[np.int64]:
    """Rank of each held-out item among itself and 100 uniform negatives outside the user's history: (Q,)."""
    rng = np.random.default_rng(seed)
    ranks = np.empty(len(events), np.int64)
    for block, scores in _score_blocks(events, scorer):
        targets, histories = events.targets[block], events.history[block]
        for row, (target, history) in enumerate(zip(targets, histories, strict=True)):
            fresh = np.ones(scores.shape[1], bool)
            fresh[history] = False
            fresh[target] = False
            allowed = np.flatnonzero(fresh)
            negatives = rng.choice(allowed, min(SAMPLED_NEGATIVES, len(allowed)), replace=False)
            ranks[block.start + row] = 1 + int((scores[row, negatives] >= scores[row, target]).sum())
    return ranks


def _score_blocks(events: HeldOut, scorer: Scorer) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    for begin in range(0, len(events), USERS_PER_BLOCK):
        block = slice(begin, min(begin + USERS_PER_BLOCK, len(events)))
        scores = scorer(events.histograms[block], events.last_codes[block])
        if not np.isfinite(scores).all():
            raise ValueError("the model gives scores that are not finite; train it again")
        yield block, scores


def metrics(ranks: NDArray[np.int64]) -> dict[str, float]:
    """Hit rate, NDCG and MRR at the cutoffs, from ranks (Q,) that begin at 1."""
    found: dict[str, float] = {}
    for cutoff in CUTOFFS:
        hit = ranks <= cutoff
        found[f"hr_at_{cutoff}"] = float(hit.mean())
        found[f"ndcg_at_{cutoff}"] = float(np.where(hit, 1 / np.log2(ranks + 1), 0).mean())
        found[f"mrr_at_{cutoff}"] = float(np.where(hit, 1 / ranks, 0).mean())
    return found


def interval_95(ranks: NDArray[np.int64], metric: str, draws: int = 1000, seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval of a metric over users: the 2.5 and 97.5 percentiles."""
    rng = np.random.default_rng(seed)
    cutoff = int(metric.rsplit("_", 1)[1])
    hit = ranks <= cutoff
    value = {"hr": hit, "ndcg": hit / np.log2(ranks + 1), "mrr": hit / ranks}[metric.split("_")[0]]
    means = [value[rng.integers(0, len(value), len(value))].mean() for _ in range(draws)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def evaluate(model: Artifact, directory: Path, protocol: Protocol | None, seen_rule: SeenRule | None) -> Report:
    """Test a model on the held-out events of the data it was trained on.

    protocol   None: the one of the model's own split
    seen_rule  None: the one the model was chosen with
    raises     DataError when the model has seen the test events or another table, or nothing is held out
    """
    card = model.config.data
    protocol = protocol or ("temporal" if card.split == "temporal" else "loo_full")
    seen_rule = seen_rule or card.seen_rule
    interactions = read_interactions(directory).stepping(model.config.event_weights)
    _require_honest(card, interactions, protocol)
    positions = split(interactions, card.split).test
    if not len(positions):
        raise DataError(f"the split {card.split!r} leaves no event to test; evaluate on a larger table")
    events = held_out_of(model, interactions, positions)
    engine = Engine(model)
    if protocol == "loo_sampled100":
        seen_rule = "all"  # the negatives lie outside the history
        ranks = ranks_sampled(events, engine_scorer(engine), seed=0)
    else:
        ranks = ranks_full(events, engine_scorer(engine), seen_rule)
    items = len(interactions.item_ids)
    return Report(model.tag, protocol, card.sha256, card.train_on, seen_rule, items, events.users, ranks)


def _require_honest(card: DataCard, interactions: Interactions, protocol: Protocol) -> None:
    if interactions.sha256 != card.sha256:
        raise DataError(
            f"the model was trained on the table {card.sha256[:16]}, this one is {interactions.sha256[:16]}; "
            "evaluate on the data the model was trained on"
        )
    if card.train_on == "all":
        raise DataError("the model was trained on all events, the test events too; train with --train-on train")
    if (protocol == "temporal") != (card.split == "temporal"):
        raise DataError(f"the model was trained for the split {card.split!r}, which {protocol!r} does not test")


def held_out_of(model: Artifact, interactions: Interactions, positions: NDArray[np.int64]) -> HeldOut:
    """States before the given positions, in the codes of a model; the item order of both must be the same."""
    shape = model.config.model
    return held_out(
        interactions,
        positions,
        model.history_codes,
        shape.decay_rates,
        shape.history_codewords,
        model.config.event_weights,
    )


def engine_scorer(engine: Engine) -> Scorer:
    """Score with the engine that serves."""
    return lambda histograms, last_codes: engine.scores(engine.step(histograms, last_codes)).cpu().numpy()
