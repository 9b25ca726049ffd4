"""Repurchase intervals against plain lists."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model.artifact import model_directory
from model.data.readers import read_interactions, read_items
from model.data.splits import split
from model.lisa.item_intervals import (
    NO_INTERVALS,
    Intervals,
    Purchases,
    due_items,
    learned_intervals,
    rarest_categories,
)
from tests.model.lisa import naive_intervals

ITEMS = 5
STEP_DAYS = 40 / 1_440  # two of these are more than the hour of an order, and one is less
days_of = st.integers(0, 60_000).map(lambda steps: steps * STEP_DAYS) | st.integers(0, 9).map(lambda n: n * STEP_DAYS)
rows_of = st.lists(st.tuples(st.integers(0, 3), st.integers(0, ITEMS - 1), days_of), max_size=40)
categories_of = st.lists(st.integers(0, 2), min_size=ITEMS, max_size=ITEMS)


def table(seed: int = 0) -> Intervals:
    draw = np.random.default_rng(seed)
    log_days, spread, share = (draw.uniform(low, high, ITEMS + 1) for low, high in ((0, 4), (0.3, 1.5), (0, 1)))
    return Intervals(log_days.astype(np.float32), spread.astype(np.float32), share.astype(np.float32), True)


@given(rows=rows_of, category=categories_of)
def test_learned_intervals_equal_plain_lists(rows: list[tuple[int, int, float]], category: list[int]) -> None:
    user, item, days = np.array(rows, np.float64).reshape(-1, 3).T
    found = learned_intervals(
        user.astype(np.int32), item.astype(np.int32), days, np.array(category, np.int64), of_purchases=False
    )
    expected = naive_intervals.learned(rows, category)
    assert found.exist == (expected is not None)
    if expected is None:
        assert found is NO_INTERVALS
        return
    assert not found.of_purchases
    for own, plain in zip(found[:3], expected, strict=True):
        np.testing.assert_allclose(own, plain, rtol=1e-5, atol=1e-6)


@given(rows=rows_of, baskets=st.lists(st.lists(st.integers(0, ITEMS - 1), min_size=1), max_size=9))
def test_baskets_of_anonymous_customers_are_ignored(
    rows: list[tuple[int, int, float]], baskets: list[list[int]]
) -> None:
    """As from a till, each basket sent as a new user."""
    tills = [(9 + number, item, 3.0) for number, basket in enumerate(baskets) for item in basket]

    def learned(rows: list[tuple[int, int, float]]) -> list[list[float]]:
        user, item, days = np.array(rows, np.float64).reshape(-1, 3).T
        category = np.zeros(ITEMS, np.int64)
        found = learned_intervals(user.astype(np.int32), item.astype(np.int32), days, category, of_purchases=True)
        return [part.tolist() for part in found[:3]]

    assert learned(rows + tills) == learned(rows)


@given(rows=rows_of)
def test_due_scores_equal_plain_lists(rows: list[tuple[int, int, float]]) -> None:
    intervals, ages = table(), defaultdict[int, list[float]](list)
    for _, item, age_days in rows:
        ages[item].append(age_days)
    bought = Purchases(np.array([row[1] for row in rows], np.int64), np.array([row[2] for row in rows], np.float64))
    found = due_items(bought, intervals)
    assert found.items.tolist() == sorted(ages)
    expected = [naive_intervals.due(ages[item], intervals, item) for item in sorted(ages)]
    for own, plain in zip(found[1:], zip(*expected, strict=True) if expected else [()] * 4, strict=True):
        np.testing.assert_allclose(own, plain, rtol=1e-6)


@given(days=st.floats(0, 1e6), seed=st.integers(0, 20))
def test_an_item_outside_the_table_uses_the_average_interval(days: float, seed: int) -> None:
    intervals = table(seed)
    bought = Purchases(np.array([ITEMS + 7], np.int64), np.array([days]))
    (score,) = due_items(bought, intervals).scores.tolist()
    assert np.isclose(score, naive_intervals.due([days], intervals, ITEMS).score)
    assert score > 0


def scores_at(*days_of_each: list[float]) -> list[float]:
    """Scores of items with an interval of 10 days and a repeat rate of 3 in 10."""
    rows = [(item, age) for item, ages in enumerate(days_of_each) for age in ages]
    intervals = Intervals(
        np.full(ITEMS + 1, np.log(10), np.float32),
        np.full(ITEMS + 1, 0.5, np.float32),
        np.full(ITEMS + 1, 0.3, np.float32),
        of_purchases=True,
    )
    items, ages = zip(*rows, strict=True)
    bought = Purchases(np.array(items, np.int64), np.array(ages, np.float64))
    found: list[float] = due_items(bought, intervals).scores.tolist()
    return found


def test_due_items_rank_before_recent_and_abandoned_ones() -> None:
    just_bought, is_due, given_up = scores_at([1, 11, 21], [10, 20, 30], [200, 210, 220])
    assert is_due > 3 * just_bought
    assert is_due > 3 * given_up


def test_more_purchases_make_a_repurchase_likelier() -> None:
    once, twice, often = scores_at([10], [10, 20], [10, 20, 30, 40])
    assert once < twice < often


def test_the_own_interval_of_a_user_takes_precedence() -> None:
    slow, quick = scores_at([10, 70, 130, 190, 250], [10, 20, 30, 40, 50])
    assert quick > 3 * slow


def test_the_rarest_category_has_the_fewest_items() -> None:
    names = [("food", "tea"), ("food",), (), ("food", "milk", "tea"), ("food", "cake", "bread")]
    found = rarest_categories(names).tolist()
    # in the order of names: bread, cake, food, milk, tea
    assert found == [5, 3, 0, 4, 1]
    assert rarest_categories([]).tolist() == []


def test_copies_have_the_intervals_of_their_originals() -> None:
    original = table()
    found = original.enlarged(np.array([0, 1, 2, 3, 4, 0, 1]))
    for own, before in zip(found[:3], original[:3], strict=True):
        assert own.tolist() == [*before[:5].tolist(), *before[:2].tolist(), before[5]]


def test_intervals_are_learned_from_training_events(trained: Path, shop: Path) -> None:
    loaded = model_directory.load(trained)
    interactions = read_interactions(shop).with_items_first(list(loaded.items.ids))
    train, texts = split(interactions, "loo").train, read_items(shop)
    user, item = interactions.user[train].tolist(), interactions.item[train].tolist()
    days = (interactions.timestamp_us[train] / 86_400e6).tolist()
    labels = [texts.categories[name] for name in interactions.item_ids]
    counts = Counter(name for names in labels for name in names)
    rarest = [min(names, key=lambda name: (counts[name], name)) for names in labels]
    numbers = sorted(set(rarest))
    expected = naive_intervals.learned(zip(user, item, days, strict=True), [numbers.index(name) for name in rarest])
    assert expected is not None
    assert not loaded.intervals.of_purchases  # all events count where there are no purchases
    for own, plain in zip(loaded.intervals[:3], expected, strict=True):
        np.testing.assert_allclose(own, plain, rtol=1e-5, atol=1e-6)
