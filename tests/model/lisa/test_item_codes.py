"""Item codes: co-occurrence and quantisation against brute force; codes are distinct."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import ModelConfig
from model.lisa import item_codes

SHAPE = ModelConfig(
    width=8, history_codebooks=3, history_codewords=8, target_codebooks=2, target_codewords=16, decay_rates=(0.0,)
)


def packed(histories: list[list[int]]) -> tuple[Any, Any]:
    item = np.array([item for history in histories for item in history], np.int32)
    return item, np.cumsum([0, *map(len, histories)])


def learned_codes(item: Any, starts: Any, items: int, seed: int = 0) -> item_codes.FixedCodes:
    counts = item_codes.cooccurrence(item, starts, items)
    return item_codes.codes_of(item_codes.item_vectors(counts, SHAPE.width, seed), SHAPE, seed)


def counted(histories: list[list[int]], items: int) -> Any:
    """Co-occurrence by two loops over every history."""
    counts = np.zeros((items, items))
    for history in histories:
        for place, item in enumerate(history):
            for distance, other in enumerate(history[place + 1 : place + 1 + item_codes.WINDOW]):
                if item != other:
                    counts[item, other] += math.exp(-item_codes.DECAY_PER_EVENT * distance)
                    counts[other, item] += math.exp(-item_codes.DECAY_PER_EVENT * distance)
    return counts


def random_histories(seed: int, users: int = 40, items: int = 25) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, items, rng.integers(0, 50)).tolist() for _ in range(users)]


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 5), max_size=40), max_size=4))
def test_cooccurrence_equals_brute_force(histories: list[list[int]]) -> None:
    item, starts = packed(histories)
    found = item_codes.cooccurrence(item, starts, 7)
    np.testing.assert_allclose(found.toarray(), counted(histories, 7), rtol=1e-5)


def test_item_vectors_are_principal_components_of_discounted_ppmi() -> None:
    histories = random_histories(0)
    counts = counted(histories, 25)
    degree = counts.sum(axis=0)
    with np.errstate(divide="ignore"):
        information = np.maximum(np.log(counts * degree.sum() / np.outer(degree, degree)), 0)
    rarer = np.minimum.outer(degree, degree)
    information *= counts / (counts + 1) * rarer / (rarer + 1)
    values, vectors = np.linalg.eigh(information)
    found = item_codes.item_vectors(item_codes.cooccurrence(*packed(histories), 25), 25, seed=0)
    # all components together give back the matrix, its negative eigenvalues mirrored
    np.testing.assert_allclose(found @ found.T, vectors * np.abs(values) @ vectors.T, atol=1e-3)
    few = item_codes.item_vectors(item_codes.cooccurrence(*packed(histories), 25), 5, seed=0)
    strongest = np.sort(np.abs(values))[::-1][:5]
    np.testing.assert_allclose((few**2).sum(axis=0), strongest, rtol=1e-3)


def test_unseen_items_get_zero_vectors_and_distinct_codes() -> None:
    item, starts = packed(random_histories(1, items=20))
    vectors = item_codes.item_vectors(item_codes.cooccurrence(item, starts, 26), 8, seed=0)
    np.testing.assert_allclose(vectors[20:], 0, atol=1e-5)
    assert (np.abs(vectors[:20]).sum(axis=1) > 0.01).all()
    found = learned_codes(item, starts, 26)
    assert len(np.unique(found.target.codes, axis=0)) == 26
    assert len(np.unique(found.history.codes[20:], axis=0)) == 1


@pytest.mark.parametrize("histories", [[[0, 0, 0]], [[0], [1], [2]], [[0, 1]], [[]]])
def test_uninformative_histories_still_give_codes(histories: list[list[int]]) -> None:
    found = learned_codes(*packed(histories), 3)
    assert found.history.codes.shape == (3, 3)
    assert len(np.unique(found.target.codes, axis=0)) == 3
    assert np.isfinite(found.history.codewords).all()


def test_codes_are_the_codewords_nearest_to_the_residual() -> None:
    points = np.random.default_rng(0).standard_normal((200, 6)).astype(np.float32)
    found = item_codes.residual_kmeans(points, 4, 8, seed=0)
    residual = points.astype(np.float64)
    for book in range(4):
        distances = ((residual[:, None] - found.codewords[book]) ** 2).sum(axis=-1)
        chosen = distances[np.arange(200), found.codes[:, book]]
        np.testing.assert_allclose(chosen, distances.min(axis=1), rtol=1e-4, atol=1e-5)
        residual -= found.codewords[book][found.codes[:, book]]


@pytest.mark.parametrize("seed", range(3))
def test_more_codebooks_never_increase_the_error(seed: int) -> None:
    points = np.random.default_rng(seed).standard_normal((150, 5)).astype(np.float32)
    errors = [float((points**2).sum())]
    for books in range(1, 6):
        found = item_codes.residual_kmeans(points, books, 6, seed)
        coded = sum(found.codewords[book][found.codes[:, book]] for book in range(books))
        errors.append(float(((points - coded) ** 2).sum()))
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in pairwise(errors))
    assert errors[-1] < 0.4 * errors[0]


def test_separate_clusters_get_separate_codewords() -> None:
    rng = np.random.default_rng(0)
    cluster = np.repeat(np.arange(4), 25)
    points = (100 * np.eye(4)[cluster] + rng.standard_normal((100, 4))).astype(np.float32)
    found = item_codes.residual_kmeans(points, 1, 16, seed=0)
    for word in np.unique(found.codes):
        assert len(np.unique(cluster[found.codes[:, 0] == word])) == 1


def test_fewer_items_than_codewords_are_quantised_exactly() -> None:
    points = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    found = item_codes.residual_kmeans(points, 2, 16, seed=0)
    np.testing.assert_allclose(found.codewords[0][found.codes[:, 0]], points, atol=1e-6)


@given(
    st.integers(2, 4).flatmap(
        lambda words: st.tuples(
            st.just(words), st.lists(st.tuples(*[st.integers(0, words - 1)] * 3), min_size=1, max_size=words**3)
        )
    )
)
def test_separation_makes_codes_distinct_and_keeps_the_first(
    drawn: tuple[int, list[tuple[int, ...]]],
) -> None:
    words, rows = drawn
    before = np.array(rows, np.uint8)
    after = item_codes.make_distinct(before, words)
    assert len({tuple(row) for row in after.tolist()}) == len(rows)
    assert after.max() < words
    for row, code in enumerate(rows):
        if code not in rows[:row]:
            assert tuple(after[row].tolist()) == code
    np.testing.assert_array_equal(before, np.array(rows, np.uint8))


def test_separation_enumerates_all_codewords() -> None:
    after = item_codes.make_distinct(np.full((300, 2), 255, np.uint8), 256)
    assert len(np.unique(after, axis=0)) == 300


def test_separation_of_thousands_of_equal_items_is_fast() -> None:
    after = item_codes.make_distinct(np.zeros((20_000, 3), np.uint8), 32)
    assert len(np.unique(after, axis=0)) == 20_000


def test_more_items_than_codes_are_refused() -> None:
    with pytest.raises(ValueError, match="9 items do not fit into 3 codebooks of 2 codewords"):
        item_codes.make_distinct(np.zeros((9, 3), np.uint8), 2)


def test_the_same_seed_gives_the_same_codes() -> None:
    item, starts = packed(random_histories(2))
    first, again, other = (learned_codes(item, starts, 25, seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first.history.codes, again.history.codes)
    np.testing.assert_array_equal(first.history.codewords, again.history.codewords)
    np.testing.assert_array_equal(first.target.codes, again.target.codes)
    assert (first.target.codes != other.target.codes).any()
