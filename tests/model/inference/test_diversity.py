"""Diversity against its definition, written down once more in plain Python."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from model.inference.diversity import WINDOW, Candidates, Categories, Diversity, select_diverse


def by_definition(
    diversity: Diversity,
    count: int,
    scores: list[float],
    codes: list[list[int]],
    categories: list[list[int]],
    before: list[list[int]],
    taken: dict[int, int],
) -> list[int]:
    """For each place the best of the first WINDOW items that are left and whose categories are not full."""

    def likeness(item: int) -> float:
        others = before + [codes[place] for place in chosen]
        same = [sum(one == two for one, two in zip(codes[item], other, strict=True)) for other in others]
        return max(same, default=0) / max(len(codes[item]), 1)

    chosen: list[int] = []
    most = diversity.max_per_category
    while len(chosen) < count:
        left = [
            item
            for item in range(len(scores))
            if item not in chosen and not (most and any(taken.get(label, 0) >= most for label in categories[item]))
        ]
        window = left[: WINDOW if diversity.strength else 1]
        if not window:
            break
        weight = diversity.strength
        best = max(window, key=lambda item: ((1 - weight) * scores[item] - weight * likeness(item), -item))
        chosen.append(best)
        for label in set(categories[best]):
            taken[label] = taken.get(label, 0) + 1
    return chosen


lists_of_codes = st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), max_size=6)


@given(
    diversity=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    most=st.integers(0, 3),
    count=st.integers(1, 90),
    items=st.integers(0, 120),
    before=lists_of_codes,
    start=st.dictionaries(st.integers(0, 4), st.integers(0, 3)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150)
def test_each_place_is_chosen_as_it_is_defined(
    diversity: float, most: int, count: int, items: int, before: list[list[int]], start: dict[int, int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    wanted = Diversity(diversity, most)
    scores = np.sort(rng.integers(-3, 4, items) * rng.choice([0.25, 1.0])).astype(np.float32)[::-1].copy()
    codes = rng.integers(0, 4, (items, 3), np.uint8)
    labels = [rng.integers(0, 5, rng.integers(0, 4)).tolist() for _ in range(items)]
    ends = np.cumsum([0, *map(len, labels)])
    categories = Categories(np.array([label for own in labels for label in own], np.int64), ends)
    others = np.array(before, np.uint8).reshape(-1, 3)
    taken = np.array([start.get(label, 0) for label in range(5)])
    whole, _ = select_diverse(wanted, count, Candidates(scores, codes, categories, True), others, taken.copy())
    assert whole.tolist() == by_definition(wanted, count, scores.tolist(), codes.tolist(), labels, before, dict(start))
    # of the first items alone, as far as they are enough to know
    part = items // 2
    some = Categories(categories.labels[: ends[part]], ends[: part + 1])
    best = Candidates(scores[:part], codes[:part], some, False)
    first, left = select_diverse(wanted, count, best, others, taken.copy())
    assert first.tolist() == whole[: len(first)].tolist()
    if len(first) < count:
        full = {label for label in range(5) if start.get(label, 0) + used(labels, first.tolist())[label] >= most > 0}
        others_left = [item for item in range(part) if item not in first and not full & set(labels[item])]
        assert left == len(others_left[: wanted.window])


def used(labels: list[list[int]], chosen: list[int]) -> Counter[int]:
    """How many of the chosen items each label has."""
    return Counter(label for item in chosen for label in set(labels[item]))


def test_without_diversity_the_order_stays() -> None:
    scores, codes = np.array([3, 2, 2, 1], np.float32), np.zeros((4, 2), np.uint8)
    nothing = Categories(np.empty(0, np.int64), np.zeros(5, np.int64))
    best = Candidates(scores, codes, nothing, True)
    found, _ = select_diverse(Diversity(0.0, 0), 3, best, codes, np.zeros(0, np.int64))
    assert found.tolist() == [0, 1, 2]


def test_without_codes_nothing_is_like_anything() -> None:
    nothing = Categories(np.empty(0, np.int64), np.zeros(3, np.int64))
    codes = np.zeros((2, 0), np.uint8)
    best = Candidates(np.ones(2, np.float32), codes, nothing, True)
    found, _ = select_diverse(Diversity(1.0, 0), 2, best, codes, np.zeros(0, np.int64))
    assert found.tolist() == [0, 1]
