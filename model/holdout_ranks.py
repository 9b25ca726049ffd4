"""Ranks of held-out events. A tie counts against the model; an item that may not be shown is a miss.

The model and every baseline go through the same functions with a ``Scorer`` of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.config import ModelConfig, Recipe, SeenRule
from model.data.interactions import Histories, Interactions, histories_before, seen_before
from model.inference.scan_torch import select_top_k
from model.lisa.histogram import history_histogram
from model.lisa.recent_attention import recent_windows
from model.lisa.seen_items import newest_seen
from model.metrics import CUTOFFS

USERS_PER_BLOCK = 256
SAMPLED_NEGATIVES = 100

Scorer = Callable[[Histories], NDArray[np.float32]]
"""Scores every item as the next one of Q histories, none of them empty: a fresh (Q, N) at every call."""

StateScorer = Callable[[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]
"""Scores every item for histograms (Q, R, B, W), last items (Q,) and newest items (Q, K), newest first, -1 for none."""


@dataclass(frozen=True)
class HeldOutEvents:
    """Held-out events and the histories before them.

    targets    (Q,)         int64  the held-out items
    histories  Q histories         the earlier events of each user
    users      (Q,)         int32
    seen       Q times (L,) int32  the items of these histories that count as seen; None: all
    """

    targets: NDArray[np.int64]
    histories: Histories
    users: NDArray[np.int32]
    seen: Sequence[NDArray[np.int32]] | None = None

    def __len__(self) -> int:
        return len(self.targets)


def held_out_events(interactions: Interactions, positions: NDArray[np.int64], config: Recipe) -> HeldOutEvents:
    """Hold out the events at these positions, each with at least one earlier event of the same user."""
    histories = histories_before(interactions, positions, config.event_weights)
    seen = seen_before(interactions, positions, config.unseen_types) if config.unseen_types else None
    return HeldOutEvents(interactions.item[positions].astype(np.int64), histories, interactions.user[positions], seen)


def ranks_full(events: HeldOutEvents, scorer: Scorer, seen_rule: SeenRule) -> NDArray[np.int64]:
    """Rank each held-out item among the whole catalogue, best 1: (Q,).

    raises  ValueError for scores that are not finite
    """
    blocks = [_ranks(scores, events.targets[block]) for block, scores in shown_scores(events, scorer, seen_rule)]
    return np.concatenate([np.empty(0, np.int64), *blocks])


def ranks_and_recommendations(
    events: HeldOutEvents, scorer: Scorer, seen_rule: SeenRule, k: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Rank as ``ranks_full``; also return the k best items for each user: (Q, k), -1 where fewer may be shown."""
    ranks = np.empty(len(events), np.int64)
    recommended = np.full((len(events), k), -1, np.int32)
    for block, scores in shown_scores(events, scorer, seen_rule):
        ranks[block] = _ranks(scores, events.targets[block])
        worst = np.partition(scores, -k, axis=1)[:, -k] if k < scores.shape[1] else np.full(len(scores), -np.inf)
        for row, (values, threshold) in enumerate(zip(scores, worst, strict=True), start=block.start):
            top, _ = select_top_k(values, np.flatnonzero(values >= threshold), k)
            recommended[row, : len(top)] = top
    return ranks, recommended


@dataclass(frozen=True)
class NegativeSampling:
    """The rules of a sampled ranking: how negatives are drawn, and whom a tie favours.

    The defaults are the rules of this project. The paper's rules may draw an item twice, which leaves fewer items to
    beat, and rank the held-out item before all items of the same score.
    """

    with_replacement: bool = False
    ties_favour_the_target: bool = False


PAPER_SAMPLING = NegativeSampling(with_replacement=True, ties_favour_the_target=True)


def ranks_sampled(
    events: HeldOutEvents, scorer: Scorer, seed: int, draw: NegativeSampling = NegativeSampling()
) -> NDArray[np.int64]:
    """Rank each held-out item among 100 uniform negatives outside of the user's history: (Q,).

    The same seed draws the same negatives for every scorer.
    """
    rng = np.random.default_rng(seed)
    ranks = np.empty(len(events), np.int64)
    for block, scores in _score_blocks(events, scorer):
        targets, histories = events.targets[block], events.histories[block]
        for row, (target, history) in enumerate(zip(targets, histories, strict=True)):
            fresh = np.ones(scores.shape[1], bool)
            fresh[history] = False
            fresh[target] = False
            allowed = np.flatnonzero(fresh)
            if draw.with_replacement and len(allowed):
                negatives = rng.choice(allowed, SAMPLED_NEGATIVES)
            else:
                negatives = rng.choice(allowed, min(SAMPLED_NEGATIVES, len(allowed)), replace=False)
            theirs, own = scores[row, negatives], scores[row, target]
            better = theirs > own if draw.ties_favour_the_target else theirs >= own
            ranks[block.start + row] = 1 + int(better.sum())
    return ranks


def excluded_items(seen: NDArray[np.int32], rule: SeenRule) -> NDArray[np.int32]:
    """Return the seen items, oldest first, that the seen rule excludes from a user's recommendations."""
    if rule == "none":
        return seen[:0]
    return newest_seen(seen) if rule == "recent" else seen


def missed_rank(items: int) -> int:
    """Return the rank, a miss at every cutoff, of an item that may not be shown."""
    return max(items, *CUTOFFS) + 1


def _ranks(scores: NDArray[np.float32], targets: NDArray[np.int64]) -> NDArray[np.int64]:
    own = scores[np.arange(len(scores)), targets][:, None]
    ranks: NDArray[np.int64] = np.count_nonzero(scores >= own, axis=1)
    ranks[np.isneginf(own[:, 0])] = missed_rank(scores.shape[1])
    return ranks


def shown_scores(
    events: HeldOutEvents, scorer: Scorer, seen_rule: SeenRule
) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """Score block by block, with minus infinity for items that may not be shown.

    raises  ValueError for scores that are not finite
    """
    for block, scores in _score_blocks(events, scorer):
        seen = events.histories[block] if events.seen is None else events.seen[block]
        for row, items in zip(scores, seen, strict=True):
            row[excluded_items(items, seen_rule)] = -np.inf
        yield block, scores


def _score_blocks(events: HeldOutEvents, scorer: Scorer) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    for begin in range(0, len(events), USERS_PER_BLOCK):
        block = slice(begin, min(begin + USERS_PER_BLOCK, len(events)))
        scores = scorer(events.histories[block])
        if not np.isfinite(scores).all():
            raise ValueError("the model gives scores that are not finite; train it again")
        yield block, scores


def state_scorer(score: StateScorer, codes: NDArray[np.uint8] | NDArray[np.float32], shape: ModelConfig) -> Scorer:
    """Return a scorer of histories by their states, with history codes (N, B), or shares (N, B, W)."""

    return lambda histories: score(*states_of(histories, codes, shape))


def states_of(
    histories: Histories, codes: NDArray[np.uint8] | NDArray[np.float32], shape: ModelConfig
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """Return the states of Q histories, none of them empty, as a ``StateScorer`` takes them."""
    histograms = [
        history_histogram(codes[items], shape.decay_rates, shape.history_codewords, weights)
        for items, weights in zip(histories, histories.weights_of_each, strict=True)
    ]
    recent = recent_windows(histories.item, histories.starts, histories.starts[1:] - 1, shape.recent_items)
    return np.stack(histograms), histories.last_items.astype(np.int64), recent.astype(np.int64)
