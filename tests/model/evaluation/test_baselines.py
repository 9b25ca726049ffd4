"""Every baseline against loops or least squares as in its source."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import FrozenInstanceError
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.evaluation import baselines
from model.evaluation.baselines import (
    GRIDS,
    Baseline,
    CoVisitation,
    Ease,
    ItemKnn,
    LogCoVisitation,
    Markov,
    Popularity,
    Ridge,
)
from model.lisa import item_codes, item_followers
from tests.model.data.histories import packed

ITEMS = 12
Items = list[list[int]]

HISTORIES = st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=9), min_size=1, max_size=8).filter(any)
PREFIXES = st.lists(st.lists(st.integers(0, ITEMS - 1), min_size=1, max_size=9), min_size=1, max_size=4)
EVERY = [baseline for grid in GRIDS.values() for baseline in grid]


def scores_of(baseline: Baseline, histories: Items, prefixes: Items) -> Any:
    return baseline.fit(packed(histories), ITEMS)(packed(prefixes))


def popularity(histories: Items) -> Any:
    counts = Counter(item for history in histories for item in history)
    return np.array([counts[item] for item in range(ITEMS)]) / counts.total()


def random_histories(seed: int, users: int = 60, items: int = ITEMS) -> Items:
    """Walks along the items at different speeds, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 25, users)
    return [((rng.integers(items) + np.cumsum(rng.integers(0, 4, length))) % items).tolist() for length in lengths]


@settings(max_examples=40)
@given(HISTORIES, PREFIXES)
def test_popularity_counts(histories: Items, prefixes: Items) -> None:
    found = scores_of(Popularity(), histories, prefixes)
    np.testing.assert_allclose(found, [popularity(histories)] * len(prefixes), rtol=1e-6)


@settings(max_examples=40)
@given(HISTORIES, PREFIXES)
def test_markov_counts_what_followed_the_last_item(histories: Items, prefixes: Items) -> None:
    followed: dict[int, Counter[int]] = defaultdict(Counter)
    for history in histories:
        for item, following in pairwise(history):
            followed[item][following] += 1
    expected = [
        [followed[prefix[-1]][item] / max(followed[prefix[-1]].total(), 1) for item in range(ITEMS)]
        + 0.1 * popularity(histories)
        for prefix in prefixes
    ]
    np.testing.assert_allclose(scores_of(Markov(0.1), histories, prefixes), expected, rtol=1e-5)


def follower_weights(histories: Items, window: int, count_decay: float) -> Any:
    """How much the column's item followed the row's, counted by pairs of events."""
    counts = np.zeros((ITEMS, ITEMS))
    for history in histories:
        for place, item in enumerate(history):
            for between, following in enumerate(history[place + 1 : place + 1 + window]):
                counts[item, following] += math.exp(-count_decay * between)
    return counts


def summed_over_history(gains: Any, query_decay: float, histories: Items, prefixes: Items) -> Any:
    return [
        sum(math.exp(-query_decay * ago) * gains[item] for ago, item in enumerate(reversed(prefix)))
        + 0.001 * popularity(histories)
        for prefix in prefixes
    ]


@settings(max_examples=40)
@given(HISTORIES, PREFIXES, st.sampled_from([1, 3, 10]), st.sampled_from([0.0, 0.4]), st.sampled_from([0.0, 0.7]))
def test_co_visitation_counts_pairs(
    histories: Items, prefixes: Items, window: int, count_decay: float, query_decay: float
) -> None:
    counts = follower_weights(histories, window, count_decay)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-12)
    expected = summed_over_history(shares, query_decay, histories, prefixes)
    found = scores_of(CoVisitation(window, count_decay, query_decay), histories, prefixes)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@settings(max_examples=40)
@given(HISTORIES, PREFIXES, st.sampled_from([0.0, 0.4]), st.sampled_from([0.0, 0.7]), st.sampled_from([0.001, 0.1]))
def test_log_co_visitation_adds_logarithms_of_shrunk_shares(
    histories: Items, prefixes: Items, count_decay: float, query_decay: float, faint_share: float
) -> None:
    counts = follower_weights(histories, 10, count_decay)
    shares = counts / (counts.sum(axis=1, keepdims=True) + 5)
    gains = np.vectorize(lambda share: math.log(1 + share / faint_share))(shares)
    expected = summed_over_history(gains, query_decay, histories, prefixes)
    found = scores_of(LogCoVisitation(count_decay, query_decay, faint_share), histories, prefixes)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("query_decay", [0.2, 0.7])
def test_log_co_visitation_is_the_lift_of_every_follower(query_decay: float) -> None:
    histories, prefix = random_histories(5), [3, 9, 11, 0]
    data = packed(histories)
    followers = item_followers.strongest_followers(data.item, data.starts, ITEMS, ITEMS, 0.4)
    gains = followers.gains(item_followers.Lift(ITEMS, 1.0, 0.4, 0.01))
    lifted = 0.001 * popularity(histories)
    for ago, item in enumerate(reversed(prefix)):
        known = followers.items[item] >= 0
        lifted[followers.items[item][known]] += math.exp(-query_decay * ago) * gains[item][known]
    found = scores_of(LogCoVisitation(0.4, query_decay, 0.01), histories, [prefix])
    np.testing.assert_allclose(found, [lifted], rtol=1e-5)


@pytest.mark.parametrize("query_decay", [0.0, 0.5])
def test_ease_equals_least_squares_of_every_item_on_all_others(query_decay: float) -> None:
    histories, prefixes, l2 = random_histories(0), [[0, 1, 1], [5], [3, 9, 11, 0]], 7.0
    used = np.array([[item in history for item in range(ITEMS)] for history in histories], float)
    weights = np.zeros((ITEMS, ITEMS))
    for item in range(ITEMS):
        others = [other for other in range(ITEMS) if other != item]
        # the penalty as further rows of the regression
        rows = np.vstack([used[:, others], math.sqrt(l2) * np.eye(ITEMS - 1)])
        weights[others, item] = np.linalg.lstsq(rows, np.append(used[:, item], np.zeros(ITEMS - 1)), rcond=None)[0]
    expected = [
        sum(math.exp(-query_decay * ago) * weights[item] for ago, item in enumerate(reversed(prefix)))
        for prefix in prefixes
    ]
    np.testing.assert_allclose(scores_of(Ease(l2, query_decay), histories, prefixes), expected, atol=1e-5)


def test_ease_refuses_a_catalogue_that_exceeds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "EASE_MAX_ITEMS", ITEMS - 1)
    with pytest.raises(baselines.TooManyItems, match=r"12 items, but .* limited to 11"):
        Ease(1.0, 0.0).fit(packed([[1, 2]]), ITEMS)


@pytest.mark.parametrize("block", [5, 1024])
@pytest.mark.parametrize("neighbours", [2, 100])
def test_item_knn_sums_the_cosines_of_the_nearest(monkeypatch: pytest.MonkeyPatch, block: int, neighbours: int) -> None:
    monkeypatch.setattr(baselines, "ITEMS_PER_BLOCK", block)
    histories, prefixes, shrinkage = random_histories(1), [[0, 1, 1], [5], [3, 9, 11, 0]], 2.0
    users = [{row for row, history in enumerate(histories) if item in history} for item in range(ITEMS)]
    similarity = np.zeros((ITEMS, ITEMS))
    for item in range(ITEMS):
        cosines = [
            len(users[item] & users[other]) / (math.sqrt(len(users[item]) * len(users[other])) + shrinkage)
            if other != item
            else 0
            for other in range(ITEMS)
        ]
        for other in range(ITEMS):
            if cosines[other] >= sorted(cosines)[-min(neighbours, ITEMS)]:
                similarity[item, other] = cosines[other]
    nothing = np.zeros(len(similarity))
    expected = [
        sum((math.exp(-0.3 * ago) * similarity[:, item] for ago, item in enumerate(reversed(prefix))), nothing)
        for prefix in prefixes
    ]
    found = scores_of(ItemKnn(neighbours, shrinkage, 0.3), histories, prefixes)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


class TestRidge:
    RIDGE = Ridge(width=4, l2=0.3, discount=0.2, decay_rates=(0.1, 1.0))

    def expected(self, histories: Items, weights: list[list[float]], prefixes: Items) -> Any:
        """The ridge regression with its penalty as additional rows, position by position."""
        data = packed(histories)
        vectors = item_codes.item_vectors(
            item_codes.cooccurrence(data.item, data.starts, ITEMS), self.RIDGE.width, seed=0
        )
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

        def faded(items: list[int], weight: list[float], rate: float) -> Any:
            fades = [w * math.exp(-rate * ago) for ago, w in enumerate(reversed(weight))]
            return sum(fade * vectors[item] for fade, item in zip(fades, reversed(items), strict=True))

        def features(items: list[int], weight: list[float]) -> Any:
            rates = self.RIDGE.decay_rates
            sums = [math.sqrt(1 - math.exp(-2 * rate)) * faded(items, weight, rate) for rate in rates]
            return np.append(np.concatenate(sums), 1)

        rows = [
            features(history[:end], weight[:end])
            for history, weight in zip(histories, weights, strict=True)
            for end in range(1, len(history))
        ]
        one_hot = np.eye(ITEMS)[[item for history in histories for item in history[1:]]]
        size = len(rows[0])
        penalty = self.RIDGE.l2 * (np.array(rows)[:, :-1] ** 2).sum() / (size - 1)
        more = math.sqrt(penalty) * np.eye(size)[:-1]
        solution = np.linalg.lstsq(np.vstack([rows, more]), np.vstack([one_hot, np.zeros((size - 1, ITEMS))]))[0]
        counts = np.bincount(data.item, minlength=ITEMS)
        scores = np.array([features(prefix, [1.0] * len(prefix)) for prefix in prefixes]) @ solution
        return scores / np.maximum(counts, 1) ** self.RIDGE.discount

    @pytest.mark.parametrize("block", [1, 40, 100_000])
    def test_equals_least_squares_over_all_positions(self, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
        monkeypatch.setattr(baselines, "POSITIONS_PER_BLOCK", block)
        rng = np.random.default_rng(0)
        histories, prefixes = random_histories(2), [[0, 1, 1], [5], [3, 9, 11, 0]]
        weights = [rng.uniform(0.5, 2, len(history)).round(2).tolist() for history in histories]
        flat = np.array([weight for each in weights for weight in each], np.float32)
        found = self.RIDGE.fit(packed(histories, flat), ITEMS)(packed(prefixes))
        np.testing.assert_allclose(found, self.expected(histories, weights, prefixes), atol=2e-5)


@pytest.mark.parametrize("baseline", EVERY, ids=str)
class TestEvery:
    def test_scores_are_finite_and_rank_related_items_higher(self, baseline: Baseline) -> None:
        histories = [[0, 1, 2, 3], [1, 2, 3], [], [0, 1, 2], [4]]
        found = scores_of(baseline, histories, [[11], [0, 1], [7, 8, 9]])
        assert found.shape == (3, ITEMS)
        assert np.isfinite(found).all()
        assert found.dtype == np.float32
        if not isinstance(baseline, Popularity):
            assert found[1, 2] > found[1, 4:].max()

    def test_scores_a_batch_like_single_histories(self, baseline: Baseline) -> None:
        scorer = baseline.fit(packed(random_histories(3)), ITEMS)
        prefixes = [history for history in random_histories(4, users=9) if history]
        together = scorer(packed(prefixes))
        for prefix, expected in zip(prefixes, together, strict=True):
            np.testing.assert_allclose(scorer(packed([prefix]))[0], expected, rtol=1e-4, atol=1e-6)

    def test_returns_scores_that_the_caller_may_modify(self, baseline: Baseline) -> None:
        scorer = baseline.fit(packed(random_histories(3)), ITEMS)
        first = scorer(packed([[1], [2]]))
        untouched = first.copy()
        first[:] = -np.inf
        assert np.array_equal(scorer(packed([[1], [2]])), untouched)

    def test_is_a_frozen_record_of_its_settings(self, baseline: Baseline) -> None:
        with pytest.raises(FrozenInstanceError):
            baseline.l2 = 3.0  # type: ignore[attr-defined]


class TestHistories:
    HISTORIES = packed([[1, 2, 3], [], [4], [5, 6]], np.arange(6, dtype=np.float32))

    def test_a_slice_equals_packing_only_its_histories(self) -> None:
        part = self.HISTORIES[1:4]
        assert [items.tolist() for items in part] == [[], [4], [5, 6]]
        assert [weights.tolist() for weights in part.weights_of_each] == [[], [3], [4, 5]]
        assert part.starts.tolist() == [0, 0, 1, 3]
        assert part.rows.tolist() == [1, 2, 2]

    def test_last_items_and_positions(self) -> None:
        assert self.HISTORIES[2:].last_items.tolist() == [4, 6]
        assert self.HISTORIES.positions == 3
        assert self.HISTORIES.lengths.tolist() == [3, 0, 1, 2]
