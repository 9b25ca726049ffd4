"""The choice of the lift on validation events: how much followers gain, and from how many of a user's newest items.

The catalogue is scored once. A lift changes only a few scores of a user, which are recomputed for each possible lift.
So every epoch can be judged by the model that would be served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.config import Config, SeenRule
from model.data.interactions import Histories
from model.holdout_ranks import HeldOutEvents, Scorer, missed_rank, shown_scores
from model.lisa.item_followers import (
    DEFAULT_LIFT_STRENGTH,
    LIFT_DECAYS,
    LIFT_STRENGTHS,
    MOST_LIFTING_ITEMS,
    Followers,
    Lift,
    lifting_items,
)
from model.lisa.recent_attention import recent_windows
from model.metrics import difference_interval_95, gains
from model.training.counts.pair_counts import PairCounts

EXACT_RANKS = 10  # ranks are exact up to 10
FEWEST_EVENTS = 500  # required to choose a decay, because only half of the events judge it

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class _Scores(NamedTuple):
    """The scores of Q users that a lift needs, without any lift.

    target     (Q,)       of the held-out items
    best       (Q, M)     the M best scores, unsorted
    followers  (Q, n, F)  of the F followers of each of the n newest items, minus infinity for none
    """

    target: Floats
    best: Floats
    followers: Floats


class _Lifted(NamedTuple):
    """G distinct pairs of a user and an item that gains from the lift.

    user   (G,)  ascending
    score  (G,)  without the lift
    gain   (G,)  for a lift of strength 1
    """

    user: Ints
    score: Floats
    gain: Floats


class LiftedRanks:
    """Ranks of held-out items by the scores of a model, for any lift."""

    def __init__(
        self,
        events: HeldOutEvents,
        scorer: Scorer,
        seen_rule: SeenRule,
        table: Followers,
        newest_items: int = MOST_LIFTING_ITEMS,
    ) -> None:
        """Score the catalogue for Q held-out events.

        scorer        scores without a lift
        newest_items  the maximum number of a user's newest items that lift their followers
        """
        histories, ends = events.histories, events.histories.starts[1:] - 1
        self._newest = recent_windows(histories.item, histories.starts, ends, newest_items)
        self._targets = events.targets
        self._table = table
        blocks = [self._needed(scores, block) for block, scores in shown_scores(events, scorer, seen_rule)]
        self._scores = _Scores(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))
        self._lifted = lru_cache(maxsize=1)(self._gather)  # callers try all strengths of one decay before the next

    def ranks(self, lift: Lift) -> Ints:
        """Rank the held-out items with the lift, 1 for the best: (Q,). A rank above 10 only means that it is above 10.

        A tie counts against the model.
        """
        others, own = self._lifted(lift._replace(strength=1.0))
        target = self._scores.target + lift.strength * own
        bound = target[others.user]
        lifted = _count(others.user[others.score + lift.strength * others.gain >= bound], len(target))
        best = np.count_nonzero(self._scores.best >= target[:, None], axis=1)
        # items that gain, and the target itself, are among the best too, or the rank is above 10 anyway
        plain = best - (self._scores.target >= target) - _count(others.user[others.score >= bound], len(target))
        ranks: Ints = 1 + np.maximum(plain, 0) + lifted
        ranks[np.isneginf(self._scores.target)] = missed_rank(len(self._table.items))
        return ranks

    def _needed(self, scores: Floats, block: slice) -> _Scores:
        """Return the needed part of the scores (q, N) of some users."""
        newest = self._newest[block]
        rows = self._table.items[np.maximum(newest, 0)]
        is_none = (rows < 0) | (newest < 0)[:, :, None]
        flat = np.take_along_axis(scores, np.maximum(rows, 0).reshape(len(rows), -1), axis=1)
        # all items that may gain, the target, and ten others
        wanted = min(newest.shape[1] * rows.shape[2] + 1 + EXACT_RANKS, scores.shape[1])
        best = np.stack([np.partition(row, -wanted)[-wanted:] for row in scores])  # a row fits into the cache
        target = scores[np.arange(len(scores)), self._targets[block]]
        return _Scores(target, best, np.where(is_none, -np.inf, flat.reshape(rows.shape)).astype(np.float32))

    def _gather(self, lift: Lift) -> tuple[_Lifted, Floats]:
        """Add up the gains of items from several newest items: those of other items, and that of each target (Q,)."""
        newest = self._newest[:, : lifting_items(lift.decay)]
        users, count = len(newest), newest.shape[1] * self._table.items.shape[1]
        own = np.zeros(users, np.float32)
        if not count:
            return _Lifted(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.float32)), own
        rows = np.maximum(newest, 0)
        found = Followers(self._table.items[rows], self._table.shares[rows])
        items = np.where((newest < 0)[:, :, None], -1, found.items).reshape(users, count)
        fade = np.exp(-lift.decay * np.arange(newest.shape[1])).astype(np.float32)
        gain = (found.gains(lift) * fade[:, None]).reshape(users, count)
        score = self._scores.followers[:, : newest.shape[1]].reshape(users, count)
        by_item = np.argsort(items, axis=1, kind="stable")
        items, gain, score = (np.take_along_axis(part, by_item, axis=1) for part in (items, gain, score))
        is_first = np.ones(items.shape, bool)
        is_first[:, 1:] = items[:, 1:] != items[:, :-1]
        begins = np.flatnonzero(is_first)
        user, item = begins // count, items.ravel()[begins]
        total = np.add.reduceat(gain.ravel(), begins)
        is_target = item == self._targets[user]
        own[user[is_target]] = total[is_target]
        kept = ~is_target & (item >= 0)
        return _Lifted(user[kept], score.ravel()[begins][kept], total[kept]), own


def _count(users: Ints, of: int) -> Ints:
    return np.bincount(users, minlength=of).astype(np.int64)


@dataclass(frozen=True)
class ChosenLift:
    """The lift that is best on the validation events.

    ranks                   (Q,) of the held-out items with this lift, exact up to 10
    ndcg_at_10_by_strength  NDCG@10 of all strengths, with the decay of this lift
    """

    lift: Lift
    ranks: Ints
    ndcg_at_10_by_strength: dict[float, float]

    def mean(self, metric: str) -> float:
        """Return a metric of the ranks. Its cutoff must be at most 10."""
        return float(gains(self.ranks, metric).mean())


class LiftChooser:
    """Counts the followers of all items in training histories, and chooses their lift."""

    def __init__(self, histories: Histories, items: int, config: Config, counts: PairCounts | None = None) -> None:
        counts = PairCounts(histories, items) if counts is None else counts
        model, training, given = config.model, config.training, config.training.lift_strength
        strength = DEFAULT_LIFT_STRENGTH if given is None else given
        # without validation events
        self.usual = Lift(
            model.followers, strength, training.lift_count_decay, training.lift_faint_share, model.lift_decay
        )
        self._strengths: Sequence[float] = LIFT_STRENGTHS if given is None else (given,)
        self._decays: Sequence[float] = LIFT_DECAYS if given is None else (model.lift_decay,)
        self.followers = counts.followers(model.followers, training.lift_count_decay)
        self._newest_items = max(map(lifting_items, self._decays))
        if model.recent_heads:
            self._newest_items = min(self._newest_items, model.recent_items)

    def ranked(self, events: HeldOutEvents, scorer: Scorer, seen_rule: SeenRule) -> LiftedRanks:
        """Score held-out events for ``choose``. The scorer scores without a lift."""
        return LiftedRanks(events, scorer, seen_rule, self.followers, self._newest_items)

    def choose(self, ranked: LiftedRanks, of: slice = slice(None)) -> ChosenLift:
        """Choose the lift for these events, as ``chosen_lift`` does."""
        return chosen_lift(lambda lift: ranked.ranks(lift)[of], self.usual, self._strengths, self._decays)


def chosen_lift(
    ranks: Callable[[Lift], Ints],
    usual: Lift,
    strengths: Sequence[float] = LIFT_STRENGTHS,
    decays: Sequence[float] = LIFT_DECAYS,
) -> ChosenLift:
    """Choose the lift with the highest NDCG@10; the weakest of equally good ones.

    The usual decay stays unless another one is significantly better. One half of the events chooses the best lift with
    the usual decay and the best one with another decay. If the whole interval of their difference on the other half is
    above 0, all events choose among the other decays.

    ranks  returns the ranks of the held-out items with a lift (Q,)
    """

    def lifts(decay: float) -> list[Lift]:
        return [usual._replace(strength=strength, decay=decay) for strength in strengths]

    def best(found: dict[Lift, Ints], of: slice = slice(None)) -> Lift:
        return max(found, key=lambda lift: _ndcg_at_10(found[lift][of]))

    decay, half = usual.decay, slice(0, None, 2)
    by_lift = {lift: ranks(lift) for lift in lifts(decay)}
    if len(decays) > 1 and len(by_lift[lifts(decay)[0]]) >= FEWEST_EVENTS:
        others = {lift: ranks(lift) for other in decays if other != decay for lift in lifts(other)}
        found, before = others[best(others, half)][1::2], by_lift[best(by_lift, half)][1::2]
        if difference_interval_95(found, before, "ndcg_at_10")[0] > 0:
            decay, by_lift = best(others).decay, others
    quality = {lift.strength: _ndcg_at_10(by_lift[lift]) for lift in lifts(decay)}
    chosen = usual._replace(strength=max(strengths, key=quality.__getitem__), decay=decay)
    return ChosenLift(chosen, by_lift[chosen], quality)


def _ndcg_at_10(ranks: Ints) -> float:
    return float(gains(ranks, "ndcg_at_10").mean())
