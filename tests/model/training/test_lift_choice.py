"""Ranks with a lift, and its choice, against scores lifted one by one."""

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

from model.config import Config, ModelConfig, SeenRule, TrainConfig
from model.data.interactions import Histories, training_histories
from model.data.readers import read_interactions
from model.data.splits import split
from model.evaluation.evaluate import by_variant, evaluate
from model.holdout_ranks import HeldOutEvents, Scorer, excluded_items
from model.lisa.item_followers import DECAY_PER_ITEM, LIFT_STRENGTHS, Followers, Lift, strongest_followers
from model.training import lift_choice
from model.training.lift_choice import LiftChooser, LiftedRanks
from model.training.train import train

ITEMS = 70
USERS = 30
ROUNDING = 1e-4  # scores of the model are float32
LIFTS = [Lift(*each) for each in product((0, 3, 8), (0.0, 0.75, 12.0), (0.4, 1.0), (0.01, 0.5))]


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
    counts = {0.4: 8, 1.0: 9}
    tables = {
        decay: strongest_followers(packed(walks).item, packed(walks).starts, ITEMS, count, decay)
        for decay, count in counts.items()
    }
    scores = rng.integers(0, levels, (USERS, ITEMS)) * np.float32(5 / levels)
    # many targets are followers of the newest item, so that their own scores are lifted
    targets = [rng.choice([int(tables[1.0].items[walk[-1], 0]) % ITEMS, int(rng.integers(ITEMS))]) for walk in walks]
    events = HeldOutEvents(np.array(targets, np.int64), packed(walks), np.arange(USERS, dtype=np.int32))
    scorer: Scorer = lambda histories: scores[: len(histories)].astype(np.float32)  # noqa: E731 (one block of all)
    ranked = LiftedRanks(events, scorer, seen_rule, tables, lifting_items)
    for lift in LIFTS:
        for user, found in enumerate(ranked.ranks(lift).tolist()):
            walk, target = walks[user], targets[user]
            own = lifted_scores(scores[user].tolist(), walk[::-1][:lifting_items], tables[lift.count_decay], lift)
            hidden = set(excluded_items(np.array(walk, np.int32), seen_rule).tolist())
            if target in hidden:
                assert found == ITEMS + 1
                continue
            others = [own[item] - own[target] for item in set(range(ITEMS)) - hidden - {target}]
            surely = sum(one == 0 or one > ROUNDING for one in others)  # a tie counts against the model
            perhaps = sum(one >= -ROUNDING for one in others)
            assert min(surely, 10) <= min(found - 1, 10) <= min(perhaps, 10), (lift, user)


class Scripted(LiftedRanks):
    """Ranks by a script: which share of the users finds its item with a lift, the same first ones of both halves."""

    def __init__(self, users: int, shares: dict[Lift, float]) -> None:
        self._users, self._shares = users, shares

    def ranks(self, lift: Lift) -> np.ndarray[Any, Any]:
        found = np.arange(self._users) < self._shares.get(lift, 0.0) * self._users
        return np.where(found, 1, 11)


class TestTable:
    USERS = 2_000
    USUAL = Lift(16, 3.0, 0.4, 0.01)

    def chosen(self, shares: dict[Lift, float], users: int = USERS, **training: Any) -> Lift:
        """What is chosen where a lift has such a share of hits, and others none."""
        config = Config(training=TrainConfig(**{"lift_choice": "table", **training}))
        histories = packed([[0, 1, 2], [1, 2, 3]])
        return LiftChooser(histories, ITEMS, config).choose(Scripted(users, shares)).lift

    def test_the_usual_one_stays_where_another_may_be_better_by_chance(self) -> None:
        other = Lift(32, 3.0, 1.0, 0.01)
        assert self.chosen({self.USUAL: 0.3, other: 0.301}) == self.USUAL
        assert self.chosen({self.USUAL: 0.3, other: 0.3}) == self.USUAL

    @pytest.mark.parametrize(
        "better", [Lift(16, 0.75, 0.4, 0.03), Lift(32, 3.0, 1.0, 0.01), Lift(64, 12.0, 0.4, 0.003)]
    )
    def test_one_that_is_surely_better_is_taken(self, better: Lift) -> None:
        assert self.chosen({self.USUAL: 0.3, better: 0.35}) == better

    def test_a_larger_one_must_be_surely_better_than_the_smaller_one(self) -> None:
        small, large = Lift(32, 3.0, 1.0, 0.01), Lift(64, 3.0, 1.0, 0.01)
        assert self.chosen({self.USUAL: 0.3, small: 0.35, large: 0.351}) == small
        assert self.chosen({self.USUAL: 0.3, small: 0.35, large: 0.4}) == large

    def test_few_events_choose_the_strength_alone(self) -> None:
        better = Lift(64, 3.0, 1.0, 0.01)
        assert self.chosen({self.USUAL: 0.3, better: 0.9}, users=400) == self.USUAL

    def test_only_where_it_is_asked_for(self) -> None:
        better = Lift(64, 3.0, 1.0, 0.01)
        assert self.chosen({self.USUAL: 0.3, better: 0.9}, lift_choice="strength") == self.USUAL
        assert self.chosen({self.USUAL: 0.3, better: 0.9}, lift_strength=0.5) == self.USUAL._replace(strength=0.5)

    @pytest.mark.parametrize("strength", LIFT_STRENGTHS)
    def test_the_strength_is_that_of_the_highest_quality(self, strength: float) -> None:
        liked = self.USUAL._replace(strength=strength)
        assert self.chosen({liked: 0.3}) == liked

    def test_a_table_of_another_size_may_be_the_usual_one(self) -> None:
        histories = packed([[0, 1, 2], [1, 2, 3]])
        config = Config(model=ModelConfig(followers=3), training=TrainConfig(lift_choice="table"))
        usual = Lift(3, 1.5, 0.4, 0.01)
        chooser = LiftChooser(histories, ITEMS, config)
        assert chooser.choose(Scripted(self.USERS, {usual: 0.3})).lift == usual
        assert chooser.followers(usual).items.shape == (ITEMS, 3)
        assert chooser.followers(Lift(64, 3.0, 1.0, 0.01)).items.shape == (ITEMS, 64)


def test_a_model_is_saved_with_the_table_that_validation_chose(
    monkeypatch: pytest.MonkeyPatch,
    shop: Path,
    tmp_path: Path,
    tiny_config: Callable[..., Config],
    silent: Callable[[], Any],
) -> None:
    liked = Lift(32, 3.0, 1.0, 0.01)
    usual = train(shop, tmp_path / "usual", tiny_config(epochs=1, lift_choice="table", seed=1), progress=silent())
    assert usual.config.model.followers == 16, "150 users are too few to choose another table"
    monkeypatch.setattr(lift_choice, "FEWEST_EVENTS", 1)
    monkeypatch.setattr(LiftedRanks, "ranks", lambda _, lift: np.full(149, 1 if lift == liked else 2))
    made = train(shop, tmp_path / "model", tiny_config(epochs=1, lift_choice="table"), progress=silent())
    assert made.config.model.followers == 32
    assert made.metrics["lift"] == liked._asdict()
    interactions = read_interactions(shop)
    histories = training_histories(interactions, split(interactions, "loo").train, made.config.event_weights)
    expected = strongest_followers(histories.item, histories.starts, len(made.items), 32, 1.0)
    np.testing.assert_array_equal(made.model.followers.numpy(), expected.items)
    np.testing.assert_allclose(made.model.lift.numpy(), expected.gains(liked))
    assert list(by_variant([made, usual])) == ["model"], "seeds may differ in what validation chose for them"
    assert evaluate([made, usual], shop).first.metrics()["hr_at_50"] > 0
