"""Followers against counting pairs."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model.lisa.item_followers import (
    DEFAULT_LIFT_STRENGTH,
    SHRINKAGE,
    WINDOW,
    Lift,
    strongest_followers,
)

ITEMS = 12
Histories = list[list[int]]


def shares_of(histories: Histories, decay: float) -> dict[int, dict[int, float]]:
    """Shares of the followers of each item, by plain counting."""
    weights: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for history in histories:
        for place, item in enumerate(history):
            for distance, later in enumerate(history[place + 1 : place + 1 + WINDOW]):
                weights[item][later] += math.exp(-decay * distance)
    return {
        item: {later: weight / (sum(row.values()) + SHRINKAGE) for later, weight in row.items()}
        for item, row in weights.items()
    }


@given(
    histories=st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=25), max_size=8),
    count=st.integers(0, ITEMS + 3),
    strength=st.sampled_from([0.0, DEFAULT_LIFT_STRENGTH, 6.0]),
    decay=st.sampled_from([0.4, 1.0]),
    faint=st.sampled_from([0.01, 0.03]),
)
def test_the_lift_of_followers_equals_plain_counting(
    histories: Histories, count: int, strength: float, decay: float, faint: float
) -> None:
    packed = np.array([item for history in histories for item in history], np.int32)
    starts = np.cumsum([0, *map(len, histories)])
    found = strongest_followers(packed, starts, ITEMS, count, decay)
    lift = Lift(count, strength, decay, faint)
    gains = found.gains(lift)
    assert found.items.shape == found.shares.shape == gains.shape == (ITEMS, count)
    expected = shares_of(histories, decay)
    for item in range(ITEMS):
        shares = expected.get(item, {})
        followers = [follower for follower in found.items[item].tolist() if follower >= 0]
        assert len(set(followers)) == len(followers) == min(count, len(shares))
        assert found.items[item, len(followers) :].tolist() == [-1] * (count - len(followers))
        assert not gains[item, len(followers) :].any()
        lifts = [strength * math.log1p(shares[follower] / faint) for follower in followers]
        np.testing.assert_allclose(gains[item, : len(followers)], lifts, rtol=1e-4)
        strongest_shares = sorted(shares.values(), reverse=True)[:count]
        np.testing.assert_allclose(
            lifts, [strength * math.log1p(share / faint) for share in strongest_shares], rtol=1e-4
        )
