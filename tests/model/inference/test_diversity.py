"""Diversity against its definition, written down once more in plain Python."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from model.inference.diversity import WINDOW, Candidates, ItemLabels, select_diverse, window


def by_definition(
    strength: float,
    count: int,
    scores: list[float],
    codes: list[list[int]],
    labels: list[list[int]],
    before: list[list[int]],
    room: dict[int, int],
) -> list[int]:
    """For each place the best of the first WINDOW items that are left and whose labels all have room."""

    def likeness(item: int) -> float:
        others = before + [codes[place] for place in chosen]
        same = [sum(one == two for one, two in zip(codes[item], other, strict=True)) for other in others]
        return max(same, default=0) / max(len(codes[item]), 1)

    chosen: list[int] = []
    while len(chosen) < count:
        left = [
            item for item in range(len(scores)) if item not in chosen and all(room[label] > 0 for label in labels[item])
        ]
        competing = left[: WINDOW if strength else 1]
        if not competing:
            break
        best = max(competing, key=lambda item: ((1 - strength) * scores[item] - strength * likeness(item), -item))
        chosen.append(best)
        for label in set(labels[best]):
            room[label] -= 1
    return chosen


lists_of_codes = st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), max_size=6)


@given(
    strength=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    count=st.integers(1, 90),
    items=st.integers(0, 120),
    before=lists_of_codes,
    start=st.lists(st.integers(-1, 4), min_size=5, max_size=5),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150)
def test_each_place_is_chosen_as_it_is_defined(
    strength: float, count: int, items: int, before: list[list[int]], start: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    scores = np.sort(rng.integers(-3, 4, items) * rng.choice([0.25, 1.0])).astype(np.float32)[::-1].copy()
    codes = rng.integers(0, 4, (items, 3), np.uint8)
    labels = [rng.permutation(5)[: rng.integers(0, 4)].tolist() for _ in range(items)]
    ends = np.cumsum([0, *map(len, labels)])
    of_items = ItemLabels(np.array([label for own in labels for label in own], np.int64), ends)
    others = np.array(before, np.uint8).reshape(-1, 3)
    room = np.array(start)
    whole, _ = select_diverse(strength, count, Candidates(scores, codes, of_items, True), others, room.copy())
    expected = by_definition(strength, count, scores.tolist(), codes.tolist(), labels, before, dict(enumerate(start)))
    assert whole.tolist() == expected
    # of the first items alone, as far as they are enough to know
    part = items // 2
    some = ItemLabels(of_items.labels[: ends[part]], ends[: part + 1])
    best = Candidates(scores[:part], codes[:part], some, False)
    first, left = select_diverse(strength, count, best, others, room.copy())
    assert first.tolist() == whole[: len(first)].tolist()
    if len(first) < count:
        full = {label for label in range(5) if start[label] <= used(labels, first.tolist())[label]}
        others_left = [item for item in range(part) if item not in first and not full & set(labels[item])]
        assert left == len(others_left[: window(strength)])


@given(labels=st.lists(st.lists(st.integers(-1, 9).map(lambda label: label << 31), max_size=12), max_size=9))
def test_labels_are_numbered_without_gaps_and_repetitions(labels: list[list[int]]) -> None:
    flat = np.array([label for own in labels for label in own], np.int64)
    numbered, different = ItemLabels(flat, np.cumsum([0, *map(len, labels)])).numbered()
    assert sorted(different.tolist()) == sorted({label for own in labels for label in own})
    found = [
        different[numbered.labels[begin:end]].tolist() for begin, end in itertools.pairwise(numbered.ends.tolist())
    ]
    assert found == [list(dict.fromkeys(own)) for own in labels]


def used(labels: list[list[int]], chosen: list[int]) -> Counter[int]:
    """How many of the chosen items each label has."""
    return Counter(label for item in chosen for label in set(labels[item]))


def test_without_diversity_the_order_stays() -> None:
    scores, codes = np.array([3, 2, 2, 1], np.float32), np.zeros((4, 2), np.uint8)
    nothing = ItemLabels(np.empty(0, np.int64), np.zeros(5, np.int64))
    best = Candidates(scores, codes, nothing, True)
    found, _ = select_diverse(0.0, 3, best, codes, np.zeros(0, np.int64))
    assert found.tolist() == [0, 1, 2]


def test_without_codes_nothing_is_like_anything() -> None:
    nothing = ItemLabels(np.empty(0, np.int64), np.zeros(3, np.int64))
    codes = np.zeros((2, 0), np.uint8)
    best = Candidates(np.ones(2, np.float32), codes, nothing, True)
    found, _ = select_diverse(1.0, 2, best, codes, np.zeros(0, np.int64))
    assert found.tolist() == [0, 1]
