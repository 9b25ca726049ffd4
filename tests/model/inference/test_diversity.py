"""Diversity reranking against its definition in plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from model.inference.diversity import NO_LABELS, WINDOW, Candidates, ItemLabels, Reserved, select_diverse, window


def by_definition(
    strength: float,
    count: int,
    scores: list[float],
    codes: list[list[int]],
    labels: list[list[int]],
    before: list[list[int]],
    room: dict[int, int],
) -> list[int]:
    """For each position, the best of the first WINDOW remaining items whose labels have room."""

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


NOTHING = Reserved(np.zeros((0, 2), np.uint8), NO_LABELS)


@given(
    strength=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    count=st.integers(1, 90),
    items=st.integers(0, 120),
    listed=st.integers(0, 6),
    books=st.sampled_from([3, 8, 9]),
    start=st.lists(st.integers(-1, 4), min_size=5, max_size=5),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150)
def test_each_position_equals_the_definition(
    strength: float, count: int, items: int, listed: int, books: int, start: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    scores = np.sort(rng.integers(-3, 4, items) * rng.choice([0.25, 1.0])).astype(np.float32)[::-1].copy()
    codes, of_listed = (rng.choice([0, 1, 127, 255], (n, books)).astype(np.uint8) for n in (items, listed))
    before = of_listed.tolist()
    every = [(limit << 32) + label for limit in range(len(start)) for label in (0, 7, 1 << 31)]
    labels, of_before = (
        [rng.choice(every, rng.integers(0, 4)).tolist() for _ in range(n)] for n in (items, len(before))
    )
    reserved = Reserved(of_listed, as_labels(of_before))
    room = {label: start[label >> 32] - used(of_before, range(len(before)))[label] for label in every}
    best, most = Candidates(scores, codes, as_labels(labels), True), np.array(start)
    whole = select_diverse(strength, count, best, reserved, most)
    expected = by_definition(strength, count, scores.tolist(), codes.tolist(), labels, before, dict(room))
    assert whole.places.tolist() == expected
    full = {label for label in every if room[label] <= used(labels, expected)[label]}
    assert sorted(whole.full.tolist()) == sorted(full & {label for own in labels + of_before for label in own})
    # of the first items alone, as far as they are enough to know
    part = items // 2
    best = Candidates(scores[:part], codes[:part], as_labels(labels[:part]), False)
    first = select_diverse(strength, count, best, reserved, most)
    assert first.places.tolist() == expected[: len(first.places)]
    if len(first.places) < count:
        full = {label for label in every if room[label] <= used(labels, first.places.tolist())[label]}
        others_left = [item for item in range(part) if item not in first.places and not full & set(labels[item])]
        assert first.left == len(others_left[: window(strength)])


def as_labels(labels: list[list[int]]) -> ItemLabels:
    return ItemLabels(np.array([label for own in labels for label in own], np.int64), np.cumsum([0, *map(len, labels)]))


def used(labels: list[list[int]], chosen: Iterable[int]) -> Counter[int]:
    """Number of chosen items by label."""
    return Counter(label for item in chosen for label in set(labels[item]))


def test_without_diversity_the_order_stays() -> None:
    scores, codes = np.array([3, 2, 2, 1], np.float32), np.zeros((4, 2), np.uint8)
    best = Candidates(scores, codes, as_labels([[]] * 4), True)
    assert select_diverse(0.0, 3, best, NOTHING, np.zeros(0, np.int64)).places.tolist() == [0, 1, 2]


def test_without_codes_diversity_has_no_effect() -> None:
    best = Candidates(np.ones(2, np.float32), np.zeros((2, 0), np.uint8), as_labels([[]] * 2), True)
    assert select_diverse(1.0, 2, best, NOTHING, np.zeros(0, np.int64)).places.tolist() == [0, 1]
