"""Ranks with a lift, and its choice, against scores lifted one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import SeenRule
from model.data.interactions import Histories
from model.holdout_ranks import HeldOutEvents, Scorer, excluded_items
from model.lisa.item_followers import DECAY_PER_ITEM, Followers, Lift, strongest_followers
from model.training.lift_choice import LiftedRanks

ITEMS = 70
USERS = 30
ROUNDING = 1e-4  # scores of the model are float32
LIFTS = [
    Lift(count, strength, faint_share=faint)
    for count in (0, 3, 8)
    for strength in (0.0, 0.75, 12.0)
    for faint in (0.01, 0.5)
]


def packed(histories: list[list[int]]) -> Histories:
    item = np.array([item for history in histories for item in history], np.int32)
    return Histories(item, np.ones(len(item), np.float32), np.cumsum([0, *map(len, histories)]))


def lifted_scores(plain: list[float], newest: list[int], followers: Followers, lift: Lift) -> list[float]:
    """The scores of a user with the lift, item by item."""
    scores = list(plain)
    for steps_ago, item in enumerate(newest):
        fade = math.exp(-DECAY_PER_ITEM * steps_ago)
        row = zip(followers.items[item, : lift.followers], followers.shares[item, : lift.followers], strict=True)
        for follower, share in row:
            if follower >= 0:
                scores[follower] += fade * lift.strength * math.log1p(float(share) / lift.faint_share)
    return scores


@pytest.mark.parametrize("seen_rule", ["none", "all"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), levels=st.sampled_from([3, 1000]), lifting_items=st.sampled_from([1, 5]))
def test_ranks_are_those_of_scores_lifted_one_by_one(
    seen_rule: SeenRule, seed: int, levels: int, lifting_items: int
) -> None:
    rng = np.random.default_rng(seed)
    walks = [rng.integers(0, ITEMS, rng.integers(1, 12)).tolist() for _ in range(USERS)]
    followers = strongest_followers(packed(walks).item, packed(walks).starts, ITEMS, 8)
    scores = rng.integers(0, levels, (USERS, ITEMS)) * np.float32(5 / levels)
    # many targets are followers of the newest item, so that their own scores are lifted
    targets = [rng.choice([int(followers.items[walk[-1], 0]) % ITEMS, int(rng.integers(ITEMS))]) for walk in walks]
    events = HeldOutEvents(np.array(targets, np.int64), packed(walks), np.arange(USERS, dtype=np.int32))
    scorer: Scorer = lambda histories: scores[: len(histories)].astype(np.float32)  # noqa: E731 (one block of all)
    ranked = LiftedRanks(events, scorer, seen_rule, followers, lifting_items)
    for lift in LIFTS:
        for user, found in enumerate(ranked.ranks(lift).tolist()):
            walk, target = walks[user], targets[user]
            own = lifted_scores(scores[user].tolist(), walk[::-1][:lifting_items], followers, lift)
            hidden = set(excluded_items(np.array(walk, np.int32), seen_rule).tolist())
            if target in hidden:
                assert found == ITEMS + 1
                continue
            others = [own[item] - own[target] for item in set(range(ITEMS)) - hidden - {target}]
            surely = sum(one == 0 or one > ROUNDING for one in others)  # a tie counts against the model
            perhaps = sum(one >= -ROUNDING for one in others)
            assert min(surely, 10) <= min(found - 1, 10) <= min(perhaps, 10), (lift, user)
