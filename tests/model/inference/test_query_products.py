"""Compiled query products equal ``LisaMini``, for any model and batch size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.artifact.model_directory import Artifact
from model.cold_items import ColdCodes, ColdItems
from model.config import ModelConfig
from model.inference import bitmap, step_kernel
from model.inference.captured_batches import States
from model.inference.engine import Engine
from model.inference.query_products import QueryProducts
from model.inference.scan import Boosts
from model.lisa.lisa_mini import LisaMini

ITEMS = 30
Make = Callable[..., LisaMini]

shapes = st.builds(
    ModelConfig,
    width=st.sampled_from([2, 7, 64, 130]),
    target_codebooks=st.integers(1, 17),
    target_codewords=st.sampled_from([2, 30, 256]),
    followers=st.sampled_from([0, 1, 16]),
    recent_items=st.integers(1, 26),
    lift_decay=st.sampled_from([0.7, 0.05]),
)


def with_followers(model: LisaMini, seed: int) -> LisaMini:
    rng = np.random.default_rng(seed)
    followers = rng.integers(-1, ITEMS, model.followers.shape).astype(np.int32)
    model.followers.copy_(torch.from_numpy(followers))
    model.lift.copy_(torch.from_numpy(rng.random(model.lift.shape) * (followers >= 0)))
    return model


@settings(max_examples=60, deadline=None)
@given(shape=shapes, users=st.sampled_from([0, 1, 2, 3, 5, 64, 67]), known=st.booleans(), seed=st.integers(0, 1000))
def test_query_products_equal_the_model(
    random_model: Make, shape: ModelConfig, users: int, known: bool, seed: int
) -> None:
    model = with_followers(random_model(shape, ITEMS, seed), seed)
    if not known:  # the last items have come later: they have no followers
        cold = ColdCodes(np.zeros(shape.history_codebooks, np.uint8), np.zeros(shape.target_codebooks, np.uint8), 0.0)
        model = model.with_cold_items(*ColdItems.of([cold, cold]))
    rng = np.random.default_rng(seed)
    queries = rng.standard_normal((users, shape.width)).astype(np.float32)
    recent = rng.integers(-1, len(model.target_codes), (users, int(rng.integers(0, shape.recent_items + 1))))
    with torch.inference_mode():
        products = torch.einsum("qd,bpd->qbp", torch.from_numpy(queries), model.target_codebooks).numpy()
        gained = torch.zeros(users, len(model.target_codes)).scatter_add_(
            1, *model.follower_gains(torch.from_numpy(recent))
        )
    found, items, gains = QueryProducts(model)(queries, recent)
    np.testing.assert_allclose(found, products, rtol=1e-5, atol=1e-4)
    again = torch.zeros(users, len(model.target_codes))
    again.scatter_add_(1, torch.from_numpy(items), torch.from_numpy(gains))
    np.testing.assert_allclose(again.numpy(), gained.numpy(), rtol=1e-5, atol=1e-6)


def test_a_batch_equals_single_users(random_model: Make) -> None:
    model = with_followers(random_model(ModelConfig(), ITEMS), 0)
    products, rng = QueryProducts(model), np.random.default_rng(0)
    queries = rng.standard_normal((67, model.config.width)).astype(np.float32)
    recent = rng.integers(-1, ITEMS, (67, 5))
    together = products(queries, recent)
    for user in (0, 1, 65, 66):
        alone = products(queries[user : user + 1], recent[user : user + 1])
        for one_user, all_users in zip(map(np.asarray, alone), map(np.asarray, together), strict=True):
            assert np.array_equal(one_user[0], all_users[user])


@pytest.mark.parametrize("rows", [[[-1, ITEMS - 1]], [[ITEMS - 1, -1]]])
def test_no_other_types_are_compiled(random_model: Make, rows: list[list[int]]) -> None:
    model = random_model(ModelConfig(), ITEMS)
    products = QueryProducts(model)
    queries = np.zeros((1, model.config.width), np.float32)
    queries.setflags(write=False)  # as of a message
    products(queries, np.array(rows))
    assert len(step_kernel.query_products.signatures) == 1


@pytest.mark.parametrize("width", [0, 1, 200])
def test_lists_exclude_global_and_per_user_items(
    random_model: Make, in_memory: Callable[..., Artifact], width: int
) -> None:
    shape = ModelConfig(width=16, target_codebooks=4, target_codewords=16, followers=3, recent_items=2)
    engine, rng = Engine(in_memory(with_followers(random_model(shape, ITEMS), 0))), np.random.default_rng(width)
    rates, books, words = len(shape.decay_rates), shape.history_codebooks, shape.history_codewords
    recent = rng.integers(0, ITEMS, (4, 2))
    states = States(rng.random((4, rates, books, words), np.float32), recent[:, 0], recent)
    unavailable, seen = bitmap.empty(ITEMS), rng.integers(-1, ITEMS, (4, width), np.int32)
    bitmap.add(unavailable, np.array([3, 4]))
    each = bitmap.with_each(unavailable, seen.astype(np.int64))
    boosts = Boosts.of_items(rng.normal(size=ITEMS).astype(np.float32))
    for gains in (None, boosts):
        expected = engine.top_k(engine.step(*states), 20, each, gains)
        together = engine.rank_states(states, 20, [unavailable], gains, seen).ranked
        for found in (together, engine.rank_states(states, 20, each, gains).ranked):
            for own, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(own, other)
    with pytest.raises(ValueError, match="no top 20 of 4 states with other bitmaps"):
        engine.rank_states(states, 20, [unavailable[1:]], left_out=seen)
