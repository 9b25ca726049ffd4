"""Histograms of whole histories against a fold in plain Python."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.lisa.histogram import history_histogram, running_histograms


def folded(codes: Any, weights: Any, decay_rates: Any, codewords: int) -> list[Any]:
    """States after every event, by the recurrence of docs/reference/model.md in double precision."""
    state = np.zeros((len(decay_rates), codes.shape[1], codewords))
    states = []
    for event, weight in zip(codes, weights, strict=True):
        for rate, decay_rate in enumerate(decay_rates):
            state[rate] *= math.exp(-decay_rate)
            for book, word in enumerate(event):
                state[rate, book, word] += weight
        states.append(state.copy())
    return states


@st.composite
def packed_histories(draw: st.DrawFn) -> tuple[Any, ...]:
    lengths = draw(st.lists(st.integers(0, 25), min_size=1, max_size=4))
    books, words = draw(st.integers(1, 3)), draw(st.integers(2, 7))
    decay_rates = draw(st.lists(st.sampled_from([0.0, 0.05, 0.5, 1.2]), min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    codes = rng.integers(0, words, (sum(lengths), books)).astype(np.uint8)
    weights = rng.choice(np.array([0.25, 1, 3], np.float32), sum(lengths))
    return codes, weights, np.cumsum([0, *lengths]), decay_rates, words


@given(packed_histories())
def test_running_histograms_equal_the_histogram_of_every_prefix_and_a_plain_fold(packed: tuple[Any, ...]) -> None:
    codes, weights, starts, decay_rates, words = packed
    running = running_histograms(codes, weights, starts, decay_rates, words)
    assert running.dtype == np.float32
    for begin, end in pairwise(starts):
        expected = folded(codes[begin:end], weights[begin:end], decay_rates, words)
        for length, state in enumerate(expected, start=1):
            prefix = slice(begin, begin + length)
            whole = history_histogram(codes[prefix], decay_rates, words, weights[prefix])
            np.testing.assert_allclose(whole, state, rtol=1e-6, atol=1e-30)
            np.testing.assert_allclose(running[begin + length - 1], state, rtol=1e-5, atol=1e-30)


def test_without_weights_every_event_counts_once() -> None:
    codes = np.array([[0], [1], [0]], np.uint8)
    np.testing.assert_array_equal(history_histogram(codes, [0.0], 3), [[[2, 1, 0]]])


def test_an_empty_history_is_an_empty_histogram() -> None:
    assert not history_histogram(np.empty((0, 4), np.uint8), [0.0, 0.3], 8).any()


@pytest.mark.parametrize("decay_rate", [0.0, 1.2, 50.0])
def test_long_histories_stay_finite_at_any_rate(decay_rate: float) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 8, (5_000, 2)).astype(np.uint8)
    weights = np.ones(len(codes), np.float32)
    running = running_histograms(codes, weights, np.array([0, len(codes)]), [decay_rate], 8)
    whole = history_histogram(codes, [decay_rate], 8, weights)
    assert np.isfinite(running).all()
    assert np.isfinite(whole).all()
    np.testing.assert_allclose(running[-1], whole, rtol=1e-4, atol=1e-30)
    limit = 5_000 if decay_rate == 0 else 1 / (1 - math.exp(-decay_rate))
    np.testing.assert_allclose(whole.sum(axis=-1), limit, rtol=1e-5)  # the mass of a row is the geometric series
