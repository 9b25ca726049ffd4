"""Text features: words, character n-grams and categories, weighted by rarity."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.content.text_features import BUCKETS, PART_WEIGHT, WORD, Description, features, rarities, term_counts

TEXTS = st.text(max_size=40)
DESCRIPTIONS = st.lists(st.builds(Description, TEXTS, st.lists(TEXTS, max_size=3)), min_size=1, max_size=6)


def bucket(term: str) -> int:
    return zlib.crc32(term.encode()) % BUCKETS


def test_words_n_grams_and_categories_are_terms() -> None:
    counts = term_counts([Description("Green TEA, green", ("drinks",)), Description("")]).toarray()
    expected: defaultdict[int, float] = defaultdict(float)
    for word, times in (("green", 2), ("tea", 1)):
        expected[bucket(f"word {word}")] += times
        for begin in range(len(word) - 1):
            expected[bucket(f"part {f' {word} '[begin : begin + 4]}")] += times * PART_WEIGHT
    expected[bucket("category drinks")] += 1
    assert counts.shape == (2, BUCKETS)
    assert {place: float(counts[0, place]) for place in np.flatnonzero(counts[0]).tolist()} == {
        place: np.float32(count) for place, count in expected.items()
    }
    assert not counts[1].any()


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("\u0939\u093f\u0928\u094d\u0926\u0940 \u0915\u093f\u0924\u093e\u092c\u0964", 2),
        ("\u0ba4\u0bae\u0bbf\u0bb4\u0bcd, \u0baa\u0bc1\u0ba4\u0bcd\u0ba4\u0b95\u0bae\u0bcd", 2),
        ("\u0e40\u0e2a\u0e37\u0e49\u0e2d", 1),
        ("\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd", 1),
        ("\u05d0\u05b7\u05d1\u05be\u05d2", 2),
        ("cre\u0300me bru\u0302le\u0301e", 2),
        ("a\u200d_b \u0301", 2),
    ],
)
def test_combining_marks_do_not_end_a_word(title: str, words: int) -> None:
    assert len(WORD.findall(title)) == words


@given(DESCRIPTIONS)
def test_features_are_weighted_by_rarity_and_normalised(descriptions: list[Description]) -> None:
    counts = term_counts(descriptions)
    rarity = rarities(counts)
    dense = counts.toarray().astype(np.float64)
    for place in np.flatnonzero(dense.any(axis=0))[:50].tolist():
        having = int((dense[:, place] > 0).sum())
        assert math.isclose(rarity[place], math.log((1 + len(descriptions)) / having), rel_tol=1e-5)
    weighed = dense * rarity
    lengths = np.linalg.norm(weighed, axis=1, keepdims=True)
    expected = np.divide(weighed, lengths, out=np.zeros_like(weighed), where=lengths > 0)
    np.testing.assert_allclose(features(counts, rarity).toarray(), expected, atol=1e-5)
    assert not rarity[~dense.any(axis=0)].any()


def test_unknown_words_have_no_features() -> None:
    rarity = rarities(term_counts([Description("green tea")]))
    assert features(term_counts([Description("1234567 zzzzz")]), rarity).nnz == 0
    assert features(term_counts([Description("green zzzzz")]), rarity).nnz > 0
