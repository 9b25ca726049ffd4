"""Metrics against their definitions in plain Python; confidence intervals against known properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model import metrics


@given(st.lists(st.integers(1, 80), min_size=1, max_size=30))
def test_metrics_equal_their_definitions(ranks: list[int]) -> None:
    found = metrics.metrics(np.array(ranks))
    for cutoff in (1, 5, 10, 50):
        hits = [rank for rank in ranks if rank <= cutoff]
        assert found[f"hr_at_{cutoff}"] == pytest.approx(len(hits) / len(ranks))
        assert found[f"ndcg_at_{cutoff}"] == pytest.approx(sum(1 / math.log2(rank + 1) for rank in hits) / len(ranks))
        assert found[f"mrr_at_{cutoff}"] == pytest.approx(sum(1 / rank for rank in hits) / len(ranks))


@settings(max_examples=10)
@given(st.integers(0, 1000))
def test_the_interval_contains_the_mean_and_narrows_with_more_users(seed: int) -> None:
    ranks = np.random.default_rng(seed).integers(1, 31, 200)
    many = np.tile(ranks, 25)
    for metric in ("hr_at_10", "ndcg_at_10", "mrr_at_10"):
        mean = metrics.metrics(ranks)[metric]
        low, high = metrics.interval_95(ranks, metric, draws=300)
        low_of_many, high_of_many = metrics.interval_95(many, metric, draws=300)
        assert low < mean < high
        assert low_of_many < mean < high_of_many
        assert (high - low) / (high_of_many - low_of_many) == pytest.approx(5, rel=0.5)  # the root of 25


def test_the_interval_equals_the_normal_approximation() -> None:
    ranks = np.array([1] * 300 + [99] * 700)
    low, high = metrics.interval_95(ranks, "hr_at_10")
    half_width = 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    assert low == pytest.approx(0.3 - half_width, abs=0.005)
    assert high == pytest.approx(0.3 + half_width, abs=0.005)


RANK_LISTS = st.lists(st.tuples(st.integers(1, 15), st.integers(1, 15)), min_size=1, max_size=40)


@given(RANK_LISTS, st.sampled_from(metrics.HEADLINES))
def test_a_paired_difference_equals_that_of_the_metrics(pairs: list[tuple[int, int]], metric: str) -> None:
    ranks, others = np.array(pairs).T
    expected = metrics.metrics(ranks)[metric] - metrics.metrics(others)[metric]
    assert metrics.difference(ranks, others, metric) == pytest.approx(expected, abs=1e-12)
    assert metrics.difference(others, ranks, metric) == pytest.approx(-expected, abs=1e-12)


def test_correlated_pairs_have_narrow_intervals() -> None:
    rng = np.random.default_rng(0)
    ranks = rng.integers(1, 30, 1000)
    others = np.where(rng.random(1000) < 0.02, 40, ranks)  # worse for two users in a hundred, else the same
    low, high = metrics.difference_interval_95(ranks, others, "ndcg_at_10")
    alone_low, alone_high = metrics.interval_95(ranks, "ndcg_at_10")
    assert 0 < low < metrics.difference(ranks, others, "ndcg_at_10") < high
    assert high - low < (alone_high - alone_low) / 3
    assert metrics.difference_interval_95(ranks, ranks, "hr_at_10") == (0, 0)


def test_paired_intervals_cover_the_truth_in_95_percent() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        first = rng.random(400) < 0.5
        second = np.where(rng.random(400) < 0.3, rng.random(400) < 0.4, first)  # hits with 0.3 * 0.4 + 0.7 * 0.5 = 0.47
        low, high = metrics.difference_interval_95(
            np.where(first, 1, 99), np.where(second, 1, 99), "hr_at_10", seed=int(rng.integers(1 << 30))
        )
        covered += low <= 0.03 <= high
    assert covered / 300 == pytest.approx(0.95, abs=0.04)


def test_the_bootstrap_equals_resampling_users() -> None:
    rng = np.random.default_rng(2)
    ranks = rng.integers(1, 16, 50)
    gains = metrics.gains(ranks, "ndcg_at_10")
    means = [rng.choice(gains, len(gains)).mean() for _ in range(20_000)]
    found = metrics.interval_95(ranks, "ndcg_at_10", draws=20_000)
    assert found == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.005)


def test_buckets_partition_users_and_quality() -> None:
    ranks, lengths = np.array([1, 20, 1, 3, 50, 2]), np.array([1, 1, 4, 9, 10, 5000])
    found = metrics.buckets(ranks, lengths, edges=(1, 2, 5, 10, 20))
    assert [(bucket.first, bucket.last, bucket.users) for bucket in found] == [
        (1, 1, 2),
        (2, 4, 1),
        (5, 9, 1),
        (10, 19, 1),
        (20, None, 1),
    ]
    assert [bucket.label for bucket in found] == ["1", "2 to 4", "5 to 9", "10 to 19", "20 or more"]
    assert [bucket.hr_at_10 for bucket in found] == [0.5, 1, 1, 0, 1]
    assert [bucket.ndcg_at_10 for bucket in found] == pytest.approx([0.5, 1, 0.5, 0, 1 / math.log2(3)])
    assert all(bucket.hr_at_10_interval_95[0] <= bucket.hr_at_10 <= bucket.hr_at_10_interval_95[1] for bucket in found)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3000)), min_size=1, max_size=60))
def test_the_weighted_mean_of_buckets_is_the_total(pairs: list[tuple[int, int]]) -> None:
    ranks, counts = np.array(pairs).T
    found = metrics.buckets(ranks, counts, metrics.FREQUENCY_EDGES)
    assert sum(bucket.users for bucket in found) == len(pairs)
    whole = sum(bucket.users * bucket.hr_at_10 for bucket in found) / len(pairs)
    assert whole == pytest.approx(metrics.metrics(ranks)["hr_at_10"])


def test_catalogue_metrics_by_hand() -> None:
    recommended = np.full((2, 12), -1)
    recommended[0, :3] = [0, 1, 2]
    recommended[1, :11] = [0, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4]  # the last one stands beyond the top 10
    found = metrics.beyond_accuracy(recommended, np.array([8, 4, 3, 1, 0, 0]))
    assert found["coverage_at_1"] == pytest.approx(1 / 6)
    assert found["coverage_at_5"] == found["coverage_at_10"] == pytest.approx(4 / 6)
    assert found["coverage_at_50"] == pytest.approx(5 / 6)
    assert found["mean_popularity_at_10"] == pytest.approx((8 + 4 + 3 + 8 + 9 * 1) / 13)
    bits = [1, 2, math.log2(16 / 3), 1, *[4] * 9]
    assert found["novelty_at_10"] == pytest.approx(sum(bits) / 13)


def test_novelty_counts_a_cold_item_as_one_event() -> None:
    counts = np.array([0, 8])
    assert metrics.beyond_accuracy(np.array([[0]]), counts)["novelty_at_10"] == 3
    nothing = metrics.beyond_accuracy(np.array([[-1, -1]]), counts)
    assert set(nothing.values()) == {0.0}


def test_value_weighted_hit_rate_is_the_share_of_the_value() -> None:
    ranks, values = np.array([1, 10, 11, 2, 3]), np.array([5.0, 20.0, 75.0, np.nan, -50.0])
    assert metrics.value_hit_rate(ranks, values) == pytest.approx(0.25)
    assert metrics.value_hit_rate(ranks, values, cutoff=5) == pytest.approx(0.05)
    assert metrics.value_hit_rate(ranks, np.full(5, 3.0)) == metrics.metrics(ranks)["hr_at_10"]
    assert metrics.value_hit_rate(ranks, np.full(5, np.nan)) == 0
    assert metrics.value_difference_interval_95(ranks, ranks, np.full(5, np.nan)) == (0, 0)


def test_intervals_of_value_differences_cover_the_truth() -> None:
    rng, covered = np.random.default_rng(1), 0
    for _ in range(200):
        values = rng.lognormal(size=300)
        first, second = rng.random(300) < 0.5, rng.random(300) < 0.4  # whatever the value, so 0.1 of it
        low, high = metrics.value_difference_interval_95(
            np.where(first, 1, 99), np.where(second, 1, 99), values, draws=200, seed=int(rng.integers(1 << 30))
        )
        covered += low <= 0.1 <= high
    assert covered / 200 == pytest.approx(0.95, abs=0.06)
