"""The compiled step equals ``LisaMini.read``, for any model and batch size."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import PRESETS, ModelConfig
from model.inference import step_kernel
from model.inference.step import Step
from model.lisa.lisa_mini import LisaMini

ITEMS = 30
Make = Callable[..., LisaMini]

shapes = st.builds(
    ModelConfig,
    width=st.sampled_from([2, 7, 16, 64, 100, 130]),
    decay_rates=st.sampled_from([(0.0,), (0.1, 0.7), (0.02, 0.2, 1.2)]),
    history_codebooks=st.integers(1, 17),
    history_codewords=st.sampled_from([2, 5, 16, 32, 45]),
    target_codebooks=st.integers(1, 17),
    target_codewords=st.sampled_from([2, 30, 256]),
    ffn_multiple=st.integers(1, 4),
    hops=st.integers(0, 2),
    recent_items=st.integers(1, 9),
    recent_heads=st.integers(0, 3),
)


def random_states(shape: ModelConfig, users: int, seed: int) -> tuple[Any, Any, Any]:
    """States with half of the bins empty, and a different scale for each row."""
    rng = np.random.default_rng(seed)
    cells = users, len(shape.decay_rates), shape.history_codebooks, shape.history_codewords
    histograms = rng.random(cells) * (rng.random(cells) < 0.5)
    histograms[..., 0] += 0.01
    histograms *= 10 ** rng.uniform(-5, 5, (*cells[:3], 1))
    return (
        histograms.astype(np.float32),
        rng.integers(0, ITEMS, users),
        rng.integers(-1, ITEMS, (users, shape.recent_items)),
    )


def read(model: LisaMini, state: tuple[Any, Any, Any]) -> Any:
    with torch.inference_mode():
        histogram, last, recent = map(torch.from_numpy, state)
        return model.read(histogram, last, recent).numpy()


def step_of(model: LisaMini) -> Step:
    with torch.no_grad():
        return Step(model, model.tables())


@settings(max_examples=60, deadline=None)
@given(shape=shapes, users=st.sampled_from([0, 1, 2, 3, 5, 8, 64, 67, 130]), seed=st.integers(0, 1000))
def test_a_step_equals_the_model(random_model: Make, shape: ModelConfig, users: int, seed: int) -> None:
    model = random_model(shape, ITEMS, seed)
    state = random_states(shape, users, seed)
    # a norm of a few numbers multiplies the rounding of their differences
    tolerance = 1e-5 if shape.width >= 64 else 1e-3
    np.testing.assert_allclose(step_of(model)(*state), read(model, state), rtol=tolerance, atol=tolerance)


@lru_cache
def of_preset(make: Make, name: str) -> tuple[LisaMini, Step]:
    model = make(PRESETS[name][0], ITEMS)
    return model, step_of(model)


@pytest.mark.parametrize("name", PRESETS)
class TestEveryPreset:
    @pytest.mark.parametrize("users", [1, 64, 129])
    def test_step_equals_read(self, random_model: Make, name: str, users: int) -> None:
        model, step = of_preset(random_model, name)
        state = random_states(model.config, users, seed=users)
        np.testing.assert_allclose(step(*state), read(model, state), rtol=1e-5, atol=1e-5)

    def test_a_batch_equals_single_users_exactly(self, random_model: Make, name: str) -> None:
        model, step = of_preset(random_model, name)
        state = random_states(model.config, 70, seed=0)
        together = step(*state)
        for user in range(70):
            alone = step(*(part[user : user + 1] for part in state))
            np.testing.assert_array_equal(alone[0], together[user])

    def test_a_user_without_recent_items(self, random_model: Make, name: str) -> None:
        model, step = of_preset(random_model, name)
        histograms, last, recent = random_states(model.config, 3, seed=1)
        recent[1] = -1
        state = histograms, last, recent
        np.testing.assert_allclose(step(*state), read(model, state), rtol=1e-5, atol=1e-5)

    def test_bins_with_extreme_scales(self, random_model: Make, name: str) -> None:
        """A stored row may span 43 powers of ten."""
        model, step = of_preset(random_model, name)
        histograms, *items = random_states(model.config, 4, seed=2)
        histograms[...] = 10.0 ** np.random.default_rng(0).uniform(-20, 23, histograms.shape)
        state = histograms, *items
        np.testing.assert_allclose(step(*state), read(model, state), rtol=1e-5, atol=1e-5)

    def test_threads_step_concurrently(self, random_model: Make, name: str) -> None:
        model, step = of_preset(random_model, name)
        states = [random_states(model.config, users, seed=users) for users in (1, 7, 65, 64)]
        expected = [step(*state) for state in states]
        found: list[list[Any]] = [[] for _ in states]

        def many(thread: int) -> None:
            found[thread] = [step(*states[thread]) for _ in range(20)]

        threads = [threading.Thread(target=many, args=(thread,)) for thread in range(len(states))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for results, one in zip(found, expected, strict=True):
            assert len(results) == 20
            for result in results:
                np.testing.assert_array_equal(result, one)


@pytest.fixture(scope="module")
def small(random_model: Make) -> Step:
    return step_of(random_model(ModelConfig(width=16, recent_heads=1), ITEMS))


@pytest.mark.parametrize("bad", [0.0, np.nan])
@pytest.mark.parametrize("user", [0, 66])
def test_empty_and_nan_rows_are_refused(small: Step, bad: float, user: int) -> None:
    histograms, *items = random_states(ModelConfig(), 67, seed=0)
    histograms[user, 1, 5] = bad
    with pytest.raises(ValueError, match="without a single step"):
        small(histograms, *items)


def test_a_nan_bin_is_refused(small: Step) -> None:
    histograms, *items = random_states(ModelConfig(), 2, seed=0)
    histograms[1, 2, 7, 31] = np.nan
    with pytest.raises(ValueError, match="without a single step"):
        small(histograms, *items)


@pytest.mark.parametrize(("place", "item"), [(1, ITEMS), (1, -1), (2, ITEMS)])
def test_items_out_of_range_are_refused(small: Step, place: int, item: int) -> None:
    state = random_states(ModelConfig(), 3, seed=0)
    state[place][2:] = item
    with pytest.raises(IndexError, match="beyond the catalogue of 30 items"):
        small(*state)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_other_shapes_are_refused(small: Step, place: int) -> None:
    state = list(random_states(ModelConfig(), 3, seed=0))
    state[place] = state[place][:-1] if place == 1 else state[place][..., :-1]
    with pytest.raises(ValueError, match=r"recent items \(Q, 5\), not "):
        small(*state)


def test_states_are_read_without_copies_or_recompilation(small: Step) -> None:
    """Record fields at unaligned addresses in read-only memory."""
    histograms, last, recent = random_states(ModelConfig(), 3, seed=0)
    layout = np.dtype([("odd", "u1"), ("last", "<i4"), ("bins", "<f4", histograms.shape[1:]), ("recent", "<i4", (5,))])
    records = np.zeros(3, layout)
    records["last"], records["bins"], records["recent"] = last, histograms, recent
    compiled = len(step_kernel.step.signatures)
    expected = small(histograms, last, recent)
    for rows in (slice(0, 3), slice(1, 2), slice(None, None, 2)):
        stored = np.frombuffer(records.tobytes(), layout)[rows]
        np.testing.assert_array_equal(small(stored["bins"], stored["last"], stored["recent"]), expected[rows])
    assert len(step_kernel.step.signatures) == compiled == 1


def test_unrounded_weights_are_refused(random_model: Make) -> None:
    model = random_model(PRESETS["lisa-mini"][0], ITEMS)
    with torch.no_grad():
        model.feed_forward.up.weight += 1 / 3
    with pytest.raises(ValueError, match="fold_norms_and_round"):
        step_of(model)
