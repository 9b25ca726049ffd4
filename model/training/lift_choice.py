"""The choice of the lift on validation events: which followers of an item gain, and how much.

The catalogue is scored once. What a lift adds to a few scores of a user is then weighed again for each that may be
chosen, so that every epoch can be judged by the model that would be served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.config import Config, SeenRule
from model.data.interactions import Histories
from model.holdout_ranks import HeldOutEvents, Scorer, missed_rank, shown_scores
from model.lisa.item_followers import (
    DECAY_PER_ITEM,
    DEFAULT_LIFT_STRENGTH,
    LIFT_STRENGTHS,
    LIFTING_ITEMS,
    Followers,
    Lift,
)
from model.lisa.recent_attention import recent_windows
from model.metrics import difference_interval_95, gains
from model.training.counts.pair_counts import PairCounts

EXACT_RANKS = 10  # ranks are exact up to this one
FOLLOWERS = 16, 32, 64  # of each item, 8 bytes each; a smaller table is preferred
COUNT_DECAYS = 0.4, 1.0
FAINT_SHARES = 0.003, 0.01, 0.03
FEWEST_EVENTS = 500  # that choose a table; the half that judges it is small enough then

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class _Scores(NamedTuple):
    """The scores of Q users that a lift needs, without any lift.

    target     (Q,)       of the held-out items
    best       (Q, M)     the M best, in no order
    followers  (Q, n, F)  of the F followers, in all tables, of each of the n newest items, minus infinity for none
    """

    target: Floats
    best: Floats
    followers: Floats


class _Lifted(NamedTuple):
    """G pairs of a user and an item that gains, each once.

    user   (G,)  ascending
    score  (G,)  without the lift
    gain   (G,)  for a lift of strength 1
    """

    user: Ints
    score: Floats
    gain: Floats


class LiftedRanks:
    """Ranks of held-out items by the scores of a model with one lift or another."""

    def __init__(
        self,
        events: HeldOutEvents,
        scorer: Scorer,
        seen_rule: SeenRule,
        tables: Mapping[float, Followers],
        lifting_items: int,
    ) -> None:
        """Score the catalogue for Q held-out events.

        scorer         scores without a lift
        tables         by the decay of their counts, the most followers that a lift may have
        lifting_items  how many of a user's newest items lift theirs
        """
        histories, ends = events.histories, events.histories.starts[1:] - 1
        self._newest = recent_windows(histories.item, histories.starts, ends, lifting_items)
        self._targets = events.targets
        self._tables = tables
        widths = [table.items.shape[1] for table in tables.values()]
        self._widest = max(widths)
        self._begins = dict(zip(tables, accumulate(widths, initial=0), strict=False))
        self._followers = np.concatenate([table.items for table in tables.values()], axis=1)
        blocks = [self._needed(scores, block) for block, scores in shown_scores(events, scorer, seen_rule)]
        self._scores = _Scores(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))
        self._lifted = lru_cache(maxsize=1)(self._gather)  # strengths take turns, and tables do not

    def ranks(self, lift: Lift) -> Ints:
        """Rank the held-out items as the lift raises scores, best 1: (Q,); beyond 10, only that they are is sure.

        A tie counts against the model.
        """
        others, own = self._lifted(lift._replace(strength=1.0))
        target = self._scores.target + lift.strength * own
        bound = target[others.user]
        lifted = _count(others.user[others.score + lift.strength * others.gain >= bound], len(target))
        best = np.count_nonzero(self._scores.best >= target[:, None], axis=1)
        # those that gain, and the target itself, are among the best too, or the rank is beyond 10 anyway
        plain = best - (self._scores.target >= target) - _count(others.user[others.score >= bound], len(target))
        ranks: Ints = 1 + np.maximum(plain, 0) + lifted
        ranks[np.isneginf(self._scores.target)] = missed_rank(len(self._followers))
        return ranks

    def _needed(self, scores: Floats, block: slice) -> _Scores:
        """Return what is needed of the scores (q, N) of some users."""
        newest = self._newest[block]
        rows = self._followers[np.maximum(newest, 0)]
        is_none = (rows < 0) | (newest < 0)[:, :, None]
        flat = np.take_along_axis(scores, np.maximum(rows, 0).reshape(len(rows), -1), axis=1)
        # as many as may gain, the target, and ten others
        wanted = min(newest.shape[1] * self._widest + 1 + EXACT_RANKS, scores.shape[1])
        best = np.stack([np.partition(row, -wanted)[-wanted:] for row in scores])  # a row in the cache at a time
        target = scores[np.arange(len(scores)), self._targets[block]]
        return _Scores(target, best, np.where(is_none, -np.inf, flat.reshape(rows.shape)).astype(np.float32))

    def _gather(self, lift: Lift) -> tuple[_Lifted, Floats]:
        """Add up what items gain by several newest items: those but the targets, and what each target gains (Q,)."""
        newest, table = self._newest, self._tables[lift.count_decay].strongest(lift.followers)
        users, count = len(newest), newest.shape[1] * table.items.shape[1]
        own = np.zeros(users, np.float32)
        if not count:
            return _Lifted(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.float32)), own
        rows, begin = np.maximum(newest, 0), self._begins[lift.count_decay]
        found = Followers(table.items[rows], table.shares[rows])
        items = np.where((newest < 0)[:, :, None], -1, found.items).reshape(users, count)
        fade = np.exp(-DECAY_PER_ITEM * np.arange(newest.shape[1])).astype(np.float32)
        gain = (found.gains(lift) * fade[:, None]).reshape(users, count)
        score = self._scores.followers[:, :, begin : begin + table.items.shape[1]].reshape(users, count)
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
    """The lift that validation likes best.

    ranks                   (Q,) of the held-out items with it, exact up to 10
    ndcg_at_10_by_strength  of the usual table
    """

    lift: Lift
    ranks: Ints
    ndcg_at_10_by_strength: dict[float, float]

    @property
    def usual_strength(self) -> float:
        """The best strength of the usual table; of equally good ones the weakest."""
        return max(sorted(self.ndcg_at_10_by_strength), key=self.ndcg_at_10_by_strength.__getitem__)

    def mean(self, metric: str) -> float:
        """Return a metric of the ranks, whose cutoff is 10 or less."""
        return float(gains(self.ranks, metric).mean())


class LiftChooser:
    """Counts the followers of all items in training histories, and chooses which of them gain how much."""

    def __init__(self, histories: Histories, items: int, config: Config, counts: PairCounts | None = None) -> None:
        counts = PairCounts(histories, items) if counts is None else counts
        training, given = config.training, config.training.lift_strength
        strength = DEFAULT_LIFT_STRENGTH if given is None else given
        # where there is no validation
        self.usual = Lift(config.model.followers, strength, training.lift_count_decay, training.lift_faint_share)
        self._strengths: Sequence[float] = LIFT_STRENGTHS if given is None else (given,)
        self._chooses_table = given is None and training.lift_choice == "table"
        self._lifting_items = min(config.model.recent_items, LIFTING_ITEMS)
        most = {self.usual.count_decay: self.usual.followers}
        if self._chooses_table:
            most |= dict.fromkeys(COUNT_DECAYS, max(self.usual.followers, *FOLLOWERS))
        self._tables = {decay: counts.followers(count, decay) for decay, count in most.items()}

    def followers(self, lift: Lift) -> Followers:
        """Return the followers that this lift raises."""
        return self._tables[lift.count_decay].strongest(lift.followers)

    def ranked(self, events: HeldOutEvents, scorer: Scorer, seen_rule: SeenRule) -> LiftedRanks:
        """Score held-out events, for ``choose``; the scorer scores without a lift."""
        return LiftedRanks(events, scorer, seen_rule, self._tables, self._lifting_items)

    def choose(self, ranked: LiftedRanks, of: slice = slice(None)) -> ChosenLift:
        """Choose the lift of the highest NDCG@10 on these events; of equally good ones the weakest.

        A table other than the usual one must be surely better.
        """

        def ranks(lift: Lift) -> Ints:
            return ranked.ranks(lift)[of]

        by_strength = {strength: ranks(self.usual._replace(strength=strength)) for strength in self._strengths}
        quality = {strength: _ndcg_at_10(each) for strength, each in by_strength.items()}
        best = max(self._strengths, key=quality.__getitem__)
        chosen = ChosenLift(self.usual._replace(strength=best), by_strength[best], quality)
        if not self._chooses_table or len(chosen.ranks) < FEWEST_EVENTS:
            return chosen
        return _with_best_table(chosen, ranks)


def _with_best_table(chosen: ChosenLift, ranks: Callable[[Lift], Ints]) -> ChosenLift:
    """Choose another table where it is surely better.

    One half of the events chooses the best table of each size. The other half compares it with the best of the smaller
    ones, which stays unless the whole interval of the difference lies above 0.
    """
    for followers in FOLLOWERS:
        best = max(_lifts(followers), key=lambda lift: _ndcg_at_10(ranks(lift)[::2]))
        found = ranks(best)
        low, _ = difference_interval_95(found[1::2], chosen.ranks[1::2], "ndcg_at_10")
        if low > 0:
            chosen = replace(chosen, lift=best, ranks=found)
    return chosen


def _lifts(followers: int) -> Iterator[Lift]:
    for decay, faint, strength in product(COUNT_DECAYS, FAINT_SHARES, LIFT_STRENGTHS):
        yield Lift(followers, strength, decay, faint)


def _ndcg_at_10(ranks: Ints) -> float:
    return float(gains(ranks, "ndcg_at_10").mean())
