"""Ranks of held-out events against rankings in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from model.config import ModelConfig, SeenRule
from model.data.interactions import Histories
from model.holdout_ranks import (
    HeldOutEvents,
    NegativeSampling,
    Scorer,
    ranks_and_recommendations,
    ranks_full,
    ranks_sampled,
    state_scorer,
)
from model.lisa.histogram import history_histogram
from model.metrics import metrics

USERS, ITEMS = 300, 40  # more users than one block holds


def held_out(targets: Any, history: list[Any]) -> HeldOutEvents:
    """Held-out events whose weights encode the row number for the scorer."""
    lengths = [len(items) for items in history]
    weights = np.repeat(np.arange(len(history)), lengths).astype(np.float32)
    histories = Histories(np.concatenate(history), weights, np.cumsum([0, *lengths]))
    return HeldOutEvents(np.asarray(targets, np.int64), histories, np.arange(len(targets), dtype=np.int32))


def scorer(scores: Any) -> Scorer:
    return lambda histories: scores[histories.weights[histories.starts[:-1]].astype(int)].astype(np.float32)


def random_events(seed: int, score_levels: int) -> tuple[HeldOutEvents, Any]:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, score_levels, (USERS, ITEMS))
    history = [rng.integers(0, ITEMS, rng.integers(1, 60)).astype(np.int32) for _ in range(USERS)]
    return held_out(rng.integers(0, ITEMS, USERS), history), scores


@pytest.mark.parametrize("seen_rule", ["none", "recent", "all"])
@pytest.mark.parametrize("score_levels", [1, 4, 1000])
def test_ranks_count_every_shown_item_that_scores_at_least_as_much(seen_rule: SeenRule, score_levels: int) -> None:
    events, scores = random_events(0, score_levels)
    expected = []
    for row, (target, history) in enumerate(zip(events.targets, events.histories, strict=True)):
        newest = [*dict.fromkeys(history[::-1].tolist())][:24]
        hidden = {"none": [], "recent": newest, "all": history.tolist()}[seen_rule]
        shown = set(range(ITEMS)) - set(hidden)
        others = sum(scores[row, item] >= scores[row, target] for item in shown - {int(target)})
        expected.append(1 + others if int(target) in shown else max(ITEMS, 50) + 1)
    assert ranks_full(events, scorer(scores), seen_rule).tolist() == expected
    assert ranks_and_recommendations(events, scorer(scores), seen_rule, 5)[0].tolist() == expected


@pytest.mark.parametrize("seen_rule", ["none", "recent", "all"])
@pytest.mark.parametrize("score_levels", [1, 4, 1000])
@pytest.mark.parametrize("k", [1, 10, ITEMS])
def test_recommendations_are_the_best_allowed_items_with_stable_ties(
    seen_rule: SeenRule, score_levels: int, k: int
) -> None:
    events, scores = random_events(0, score_levels)
    _, recommended = ranks_and_recommendations(events, scorer(scores), seen_rule, k)
    for row, history in enumerate(events.histories):
        newest = [*dict.fromkeys(history[::-1].tolist())][:24]
        hidden = {"none": [], "recent": newest, "all": history.tolist()}[seen_rule]
        shown = sorted(set(range(ITEMS)) - set(hidden), key=lambda item: (-scores[row, item], item))
        assert recommended[row].tolist() == (shown + [-1] * k)[:k]


def test_a_constant_model_never_hits() -> None:
    events = held_out([3] * 5, [np.array([0], np.int32)] * 5)
    constant = scorer(np.zeros((5, 200)))
    assert metrics(ranks_full(events, constant, "none"))["hr_at_50"] == 0
    assert metrics(ranks_sampled(events, constant, seed=0))["hr_at_50"] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_scores_are_refused(bad: float) -> None:
    events, scores = random_events(1, 5)
    broken = scores.astype(np.float32)
    broken[7, 7] = bad
    with pytest.raises(ValueError, match="not finite"):
        ranks_full(events, scorer(broken), "none")
    with pytest.raises(ValueError, match="not finite"):
        ranks_sampled(events, scorer(broken), seed=0)


class TestSampledNegatives:
    HISTORY = np.arange(0, 50, dtype=np.int32)
    TARGET = 50

    def events(self, users: int = 20) -> HeldOutEvents:
        return held_out([self.TARGET] * users, [self.HISTORY] * users)

    def ranks(self, scores: Any, users: int = 20, seed: int = 0) -> Any:
        return ranks_sampled(self.events(users), scorer(np.tile(scores, (users, 1))), seed)

    def test_are_a_hundred_and_ties_count_against_the_model(self) -> None:
        assert self.ranks(np.zeros(400)).tolist() == [101] * 20

    def test_exclude_the_history(self) -> None:
        scores = np.zeros(400)
        scores[self.HISTORY], scores[self.TARGET] = 9, 1
        assert self.ranks(scores).tolist() == [1] * 20

    def test_are_distinct(self) -> None:
        scores = np.zeros(151)  # exactly a hundred are left: each is drawn once, so exactly these thirty win
        scores[51:81], scores[self.TARGET] = 9, 1
        assert self.ranks(scores).tolist() == [31] * 20

    def test_of_the_paper_are_drawn_with_replacement(self) -> None:
        """30 of 100 items win: expectation 30 and variance 21, unlike draws without replacement."""
        scores = np.zeros(151)
        scores[51:81], scores[self.TARGET] = 9, 1
        events, everyone = self.events(400), scorer(np.tile(scores, (400, 1)))
        beaten_by = ranks_sampled(events, everyone, 0, NegativeSampling(with_replacement=True)) - 1
        assert abs(beaten_by.mean() - 30) < 1
        assert 16 < beaten_by.var() < 27

    @pytest.mark.parametrize(("favour", "expected"), [(False, 101), (True, 1)])
    def test_break_ties_as_configured(self, favour: bool, expected: int) -> None:
        for with_replacement in (False, True):
            draw = NegativeSampling(with_replacement, ties_favour_the_target=favour)
            ranks = ranks_sampled(self.events(), scorer(np.zeros((20, 400))), 0, draw)
            assert ranks.tolist() == [expected] * 20

    def test_are_uniform(self) -> None:
        users, winners = 600, [51, 150, 250]
        for winner in winners:
            scores = np.zeros(251)  # two hundred are left, so each is drawn for half of the users
            scores[winner], scores[self.TARGET] = 9, 1
            assert (self.ranks(scores, users) == 2).mean() == pytest.approx(0.5, abs=0.1)

    def test_are_reproducible_by_seed(self) -> None:
        scores = np.random.default_rng(0).random(400)
        assert self.ranks(scores, seed=1).tolist() == self.ranks(scores, seed=1).tolist()
        assert self.ranks(scores, seed=1).tolist() != self.ranks(scores, seed=2).tolist()


def test_a_state_scorer_gets_state_and_newest_items() -> None:
    rng = np.random.default_rng(0)
    shape = ModelConfig(decay_rates=(0.0, 0.5), history_codebooks=2, history_codewords=4, recent_items=3)
    codes = rng.integers(0, 4, (ITEMS, 2)).astype(np.uint8)
    events, _ = random_events(2, 1)
    histories = events.histories[3:7]
    given: list[Any] = []

    def score(states: Any, last: Any, recent: Any) -> Any:
        given.extend(zip(states, last, recent, strict=True))
        return np.zeros((len(states), ITEMS), np.float32)

    assert state_scorer(score, codes, shape)(histories).shape == (4, ITEMS)
    for row, (state, last, recent) in enumerate(given):
        items = events.histories.item[events.histories.starts[3 + row] : events.histories.starts[4 + row]]
        weights = np.full(len(items), 3 + row, np.float32)
        np.testing.assert_allclose(state, history_histogram(codes[items], (0.0, 0.5), 4, weights))
        assert last == items[-1]
        assert recent.tolist() == [*items[::-1], -1, -1, -1][:3]
