"""Followers against counting pair by pair."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model.lisa.item_followers import (
    DECAY_PER_EVENT,
    DEFAULT_LIFT_STRENGTH,
    FAINT_SHARE,
    SHRINKAGE,
    WINDOW,
    strongest_followers,
)

ITEMS = 12
Histories = list[list[int]]


def shares_of(histories: Histories) -> dict[int, dict[int, float]]:
    """Of each item, the shares of what followed it, written as plainly as possible."""
    weights: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for history in histories:
        for place, item in enumerate(history):
            for distance, later in enumerate(history[place + 1 : place + 1 + WINDOW]):
                weights[item][later] += math.exp(-DECAY_PER_EVENT * distance)
    return {
        item: {later: weight / (sum(row.values()) + SHRINKAGE) for later, weight in row.items()}
        for item, row in weights.items()
    }


@given(
    histories=st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=25), max_size=8),
    count=st.integers(0, ITEMS + 3),
)
def test_the_strongest_followers_lift_as_their_shares_tell(histories: Histories, count: int) -> None:
    packed = np.array([item for history in histories for item in history], np.int32)
    starts = np.cumsum([0, *map(len, histories)])
    found = strongest_followers(packed, starts, ITEMS, count)
    assert found.items.shape == found.lift.shape == (ITEMS, count)
    expected = shares_of(histories)
    for item in range(ITEMS):
        shares = expected.get(item, {})
        followers = [follower for follower in found.items[item].tolist() if follower >= 0]
        assert len(set(followers)) == len(followers) == min(count, len(shares))
        assert found.items[item, len(followers) :].tolist() == [-1] * (count - len(followers))
        assert not found.lift[item, len(followers) :].any()
        lifts = [DEFAULT_LIFT_STRENGTH * math.log1p(shares[follower] / FAINT_SHARE) for follower in followers]
        np.testing.assert_allclose(found.lift[item, : len(followers)], lifts, rtol=1e-4)
        strongest_shares = sorted(shares.values(), reverse=True)[:count]
        np.testing.assert_allclose(
            lifts, [DEFAULT_LIFT_STRENGTH * math.log1p(share / FAINT_SHARE) for share in strongest_shares], rtol=1e-4
        )
