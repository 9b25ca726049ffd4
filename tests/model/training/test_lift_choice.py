"""Ranks with a lift, and the choice of its strength and decay, against explicitly lifted scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import Config, SeenRule, TrainConfig
from model.data.interactions import training_histories
from model.data.readers import read_interactions
from model.data.splits import split
from model.evaluation.evaluate import by_variant, evaluate
from model.holdout_ranks import HeldOutEvents, Scorer, excluded_items
from model.lisa.item_followers import (
    LIFT_DECAYS,
    LIFT_STRENGTHS,
    Followers,
    Lift,
    lifting_items,
    strongest_followers,
)
from model.training import lift_choice
from model.training.lift_choice import LiftChooser, LiftedRanks
from model.training.train import train
from storage.state.layout import ITEM_RING
from tests.model.data.histories import packed

ITEMS = 70
USERS = 30
ROUNDING = 1e-4  # scores of the model are float32
LIFTS = [Lift(8, *each) for each in product((0.0, 0.75, 12.0), (0.4,), (0.01, 0.5), LIFT_DECAYS)]


def lifted_scores(plain: list[float], newest: list[int], followers: Followers, lift: Lift) -> list[float]:
    """Scores of a user with the lift, item by item."""
    scores = list(plain)
    for steps_ago, item in enumerate(newest[: lifting_items(lift.decay)]):
        fade = math.exp(-lift.decay * steps_ago)
        for follower, share in zip(followers.items[item], followers.shares[item], strict=True):
            if follower >= 0:
                scores[follower] += fade * lift.strength * math.log1p(float(share) / lift.faint_share)
    return scores


@pytest.mark.parametrize("seen_rule", ["none", "all"])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    levels=st.sampled_from([3, 1000]),
    count=st.sampled_from([0, 3, 8]),
    newest_items=st.sampled_from([1, 5, 24]),
)
def test_ranks_equal_those_of_lifted_scores(
    seen_rule: SeenRule, seed: int, levels: int, count: int, newest_items: int
) -> None:
    rng = np.random.default_rng(seed)
    walks = [rng.integers(0, ITEMS, rng.integers(1, 30)).tolist() for _ in range(USERS)]
    table = strongest_followers(packed(walks).item, packed(walks).starts, ITEMS, count, 0.4)
    scores = rng.integers(0, levels, (USERS, ITEMS)) * np.float32(5 / levels)
    # many targets are followers of the newest item, so that their own scores are lifted
    first = table.items[:, 0] % ITEMS if count else np.arange(ITEMS)
    targets = [rng.choice([int(first[walk[-1]]), int(rng.integers(ITEMS))]) for walk in walks]
    events = HeldOutEvents(np.array(targets, np.int64), packed(walks), np.arange(USERS, dtype=np.int32))
    scorer: Scorer = lambda histories: scores[: len(histories)].astype(np.float32)  # noqa: E731 (one block of all)
    ranked = LiftedRanks(events, scorer, seen_rule, table, newest_items)
    for lift in LIFTS:
        for user, found in enumerate(ranked.ranks(lift).tolist()):
            walk, target = walks[user], targets[user]
            own = lifted_scores(scores[user].tolist(), walk[::-1][:newest_items], table, lift)
            hidden = set(excluded_items(np.array(walk, np.int32), seen_rule).tolist())
            if target in hidden:
                assert found == ITEMS + 1
                continue
            others = [own[item] - own[target] for item in set(range(ITEMS)) - hidden - {target}]
            surely = sum(one == 0 or one > ROUNDING for one in others)  # a tie counts against the model
            perhaps = sum(one >= -ROUNDING for one in others)
            assert min(surely, 10) <= min(found - 1, 10) <= min(perhaps, 10), (lift, user)


class Scripted(LiftedRanks):
    """Scripted ranks: the share of users whose item is a hit for each lift, the same users in both halves."""

    def __init__(self, users: int, shares: dict[Lift, float]) -> None:
        self._users, self._shares = users, shares

    def ranks(self, lift: Lift) -> np.ndarray[Any, Any]:
        found = np.arange(self._users) < self._shares.get(lift, 0.0) * self._users
        return np.where(found, 1, 11)


class TestChoice:
    USERS = 2_000
    USUAL = Lift(16, 3.0, 0.4, 0.01, 0.7)
    SLOWER = USUAL._replace(strength=1.5, decay=0.05)

    def chosen(self, shares: dict[Lift, float], users: int = USERS, **training: Any) -> Lift:
        """The chosen lift if lifts have these hit rates, and others none."""
        histories, config = packed([[0, 1, 2], [1, 2, 3]]), Config(training=TrainConfig(**training))
        return LiftChooser(histories, ITEMS, config).choose(Scripted(users, shares)).lift

    def test_keeps_the_default_decay_unless_another_is_significantly_better(self) -> None:
        assert self.chosen({self.USUAL: 0.3, self.SLOWER: 0.301}) == self.USUAL
        assert self.chosen({self.USUAL: 0.3, self.SLOWER: 0.3}) == self.USUAL

    def test_takes_a_significantly_better_decay(self) -> None:
        assert self.chosen({self.USUAL: 0.3, self.SLOWER: 0.35}) == self.SLOWER
        assert self.chosen({self.USUAL: 0.3, self.SLOWER: 0.35, self.SLOWER._replace(decay=0.2): 0.4}).decay == 0.2

    def test_chooses_only_the_strength_with_few_events(self) -> None:
        assert self.chosen({self.USUAL: 0.3, self.SLOWER: 0.9}, users=400) == self.USUAL

    def test_keeps_a_given_strength_and_decay(self) -> None:
        shares = {self.USUAL: 0.3, self.SLOWER: 0.9}
        assert self.chosen(shares, lift_strength=0.5) == self.USUAL._replace(strength=0.5)

    @pytest.mark.parametrize("strength", LIFT_STRENGTHS)
    @pytest.mark.parametrize("decay", LIFT_DECAYS)
    def test_takes_the_strength_of_the_highest_quality(self, strength: float, decay: float) -> None:
        liked = self.USUAL._replace(strength=strength, decay=decay)
        assert self.chosen({liked: 0.3}) == liked

    @pytest.mark.parametrize("decay", LIFT_DECAYS)
    def test_limits_lifting_items_by_decay_or_ring_size(self, decay: float) -> None:
        count = lifting_items(decay)
        assert math.exp(-decay * count) < 0.035 or count == ITEM_RING


def test_a_model_is_saved_with_the_decay_chosen_on_validation(
    monkeypatch: pytest.MonkeyPatch,
    shop: Path,
    tmp_path: Path,
    tiny_config: Callable[..., Config],
    silent: Callable[[], Any],
) -> None:
    liked = Lift(16, 3.0, 0.4, 0.01, 0.05)
    usual = train(shop, tmp_path / "usual", tiny_config(epochs=1, seed=1), progress=silent())
    assert usual.config.model.lift_decay == 0.7, "150 users are too few to choose another decay"
    monkeypatch.setattr(lift_choice, "FEWEST_EVENTS", 1)
    monkeypatch.setattr(LiftedRanks, "ranks", lambda _, lift: np.full(149, 1 if lift == liked else 2))
    made = train(shop, tmp_path / "model", tiny_config(epochs=1), progress=silent())
    assert (made.config.model.lift_decay, made.config.model.recent_items) == (0.05, 24)
    assert made.metrics["lift"] == liked._asdict()
    interactions = read_interactions(shop).with_items_first(list(made.items.ids))
    histories = training_histories(interactions, split(interactions, "loo").train, made.config.event_weights)
    expected = strongest_followers(histories.item, histories.starts, len(made.items), 16, 0.4)
    np.testing.assert_array_equal(made.model.followers.numpy(), expected.items)
    np.testing.assert_allclose(made.model.lift.numpy(), expected.gains(liked), rtol=1e-6)
    np.testing.assert_allclose(made.model.shares_of_followers(liked).shares, expected.shares, rtol=1e-4, atol=1e-6)
    assert list(by_variant([made, usual])) == ["model"], "seeds may differ in what validation chose for them"
    assert evaluate([made, usual], shop).first.metrics()["hr_at_50"] > 0
