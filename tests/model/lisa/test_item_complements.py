"""Complements against counting in plain Python."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model.lisa.item_complements import (
    NEAR,
    POPULARITY,
    SHARPNESS,
    SHRINKAGE,
    Complements,
    basket_gains,
    strongest_complements,
)

ITEMS = 9
orders_of = st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=8), max_size=10)


def counted(orders: list[list[int]], count: int = ITEMS, items: int = ITEMS) -> Complements:
    """Complements learned from the orders, whose events are interleaved."""
    events = [(place, order, item) for order, bought in enumerate(orders) for place, item in enumerate(bought)]
    by_turns = np.array(sorted(events), np.int64).reshape(-1, 3)
    return strongest_complements(by_turns[:, 1], by_turns[:, 2], items, count)


def scores_of(orders: list[list[int]]) -> dict[int, dict[int, float]]:
    """The oracle: scores of the items that share an order with each item."""
    baskets = [list(dict.fromkeys(one)) for one in orders if len(set(one)) > 1]
    of_item = Counter(item for basket in baskets for item in basket)
    pairs: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for basket in baskets:
        for (place, item), (other_place, other) in permutations(enumerate(basket), 2):
            if (distance := abs(place - other_place)) <= NEAR:
                pairs[item][other] += 1 / math.sqrt(distance * (len(basket) - 1))
    return {
        item: {
            other: (weight / (of_item[item] + SHRINKAGE) / (of_item[other] / len(baskets)) ** POPULARITY) ** SHARPNESS
            for other, weight in row.items()
        }
        for item, row in pairs.items()
    }


@given(orders=orders_of, count=st.integers(1, ITEMS))
def test_the_strongest_complements_equal_plain_counting(orders: list[list[int]], count: int) -> None:
    found, expected = counted(orders, count), scores_of(orders)
    assert found.exist == bool(expected)
    for item in range(ITEMS if found.exist else 0):
        own = expected.get(item, {})
        others = [other for other in found.items[item].tolist() if other >= 0]
        assert len(set(others)) == len(others) == min(count, len(own))
        assert not found.scores[item, len(others) :].any()
        strongest = sorted(own.values(), reverse=True)[:count]
        np.testing.assert_allclose(found.scores[item, : len(others)], strongest, rtol=2e-3)
        np.testing.assert_allclose([own[other] for other in others], strongest, rtol=2e-3)


@given(orders=orders_of, basket=st.lists(st.integers(0, ITEMS + 3), unique=True, max_size=6))
def test_complements_of_a_basket_are_the_sum_over_its_items(orders: list[list[int]], basket: list[int]) -> None:
    expected: dict[int, float] = defaultdict(float)
    for item in basket:
        for other, score in scores_of(orders).get(item, {}).items():
            if other not in basket:
                expected[other] += score
    items, scores = counted(orders).of(np.array(basket, np.int64))
    assert set(items.tolist()) == expected.keys()
    np.testing.assert_allclose(scores, [expected[item] for item in items.tolist()], rtol=2e-3)
    assert np.all(np.diff(scores) <= 0)
    assert np.all(basket_gains(scores) > 0)
    for most in (1, 3, ITEMS + 9):
        for some, every in zip(counted(orders).of(np.array(basket, np.int64), most), (items, scores), strict=True):
            np.testing.assert_array_equal(some, every[:most])


def test_popular_items_are_not_specific_complements() -> None:
    orders = [[1, 2, 0], [2, 1, 0]] * 20 + [[0, 3]] * 20 + [[0, 4], [0, 5]] * 20
    assert counted(orders).items[1, 0] == 2
    assert counted(orders).items[2, 0] == 1


def test_distant_items_of_a_large_order_are_not_paired() -> None:
    found = counted([list(range(3 * NEAR))], count=3 * NEAR, items=3 * NEAR)
    assert {*found.items[0].tolist()} == {-1, *range(1, NEAR + 1)}
