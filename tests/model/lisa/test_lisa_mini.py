"""LISA-Mini: stepping equals the parallel forward, and both equal the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from model.config import PRESETS, ModelConfig
from model.lisa.histogram import running_histograms
from model.lisa.lisa_mini import AttentionTables, LisaMini, attend

SHAPE = ModelConfig(
    width=16,
    decay_rates=(0.0, 0.3, 1.2),
    history_codebooks=3,
    history_codewords=6,
    target_codebooks=2,
    target_codewords=16,
    dropout=0.3,
)
ITEMS = 30
Make = Callable[..., LisaMini]


@pytest.fixture(scope="module")
def model(random_model: Make) -> LisaMini:
    return random_model(SHAPE, ITEMS)


def history(length: int, seed: int) -> tuple[Any, Any]:
    """Random items and event weights."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, ITEMS, length), rng.choice(np.array([0.25, 1, 3], np.float32), length)


def states(model: LisaMini, items: Any, weights: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States after every event: histograms, last item and newest items."""
    codes = model.history_codes.numpy()[items]
    shape = model.config
    newest = [
        [items[place - age] if place >= age else -1 for age in range(shape.recent_items)] for place in range(len(items))
    ]
    histograms = running_histograms(
        codes.astype(np.uint8), weights, np.array([0, len(items)]), shape.decay_rates, shape.history_codewords
    )
    recent = torch.tensor(newest, dtype=torch.int64).view(len(items), shape.recent_items)
    return torch.from_numpy(histograms), torch.from_numpy(items), recent


@settings(max_examples=25)
@given(
    length=st.integers(1, 200),
    decay_rates=st.lists(st.sampled_from([0.0, 0.05, 0.8, 1.2]), min_size=1, max_size=3),
    hops=st.integers(0, 2),
    recent_items=st.sampled_from([1, 5, 300]),
    recent_heads=st.sampled_from([0, 2]),
    seed=st.integers(0, 2**31),
)
def test_recurrent_steps_equal_the_parallel_forward(
    random_model: Make,
    length: int,
    decay_rates: list[float],
    hops: int,
    recent_items: int,
    recent_heads: int,
    seed: int,
) -> None:
    shape = {
        "decay_rates": tuple(decay_rates),
        "hops": hops,
        "recent_items": recent_items,
        "recent_heads": recent_heads,
    }
    model = random_model(SHAPE.model_copy(update=shape), ITEMS, seed)
    items, weights = history(length, seed)
    with torch.inference_mode():
        stepped = model.read(*states(model, items, weights))
        parallel = model(torch.from_numpy(items), torch.from_numpy(weights))
    torch.testing.assert_close(stepped, parallel, rtol=0, atol=1e-5)


def test_events_without_weights_have_weight_one(model: LisaMini) -> None:
    items, _ = history(50, 1)
    with torch.inference_mode():
        stepped = model.read(*states(model, items, np.ones(50, np.float32)))
        torch.testing.assert_close(stepped, model(torch.from_numpy(items)), rtol=0, atol=1e-5)


def test_attention_equals_the_softmax_of_the_paper(model: LisaMini) -> None:
    items, weights = history(40, 2)
    codebooks, query, key, value = (
        tensor.detach().double().numpy() for tensor in (model.codebooks, model.query, model.key, model.value)
    )
    codes = model.history_codes.numpy()[items]
    expected = np.zeros(SHAPE.width)
    for rate, decay_rate in enumerate(SHAPE.decay_rates):
        for book in range(SHAPE.history_codebooks):
            words = codebooks[book, codes[:, book]]
            own = words[-1] @ query[rate, book]
            logits = [own @ (word @ key[rate, book]) / math.sqrt(SHAPE.width) for word in words]
            steps_ago = range(len(items) - 1, -1, -1)
            masses = [
                weight * math.exp(logit - decay_rate * age)
                for weight, logit, age in zip(weights, logits, steps_ago, strict=True)
            ]
            for mass, word in zip(masses, words, strict=True):
                expected += mass / sum(masses) * (word @ value[rate, book])
    histograms, last, _ = states(model, items, weights)
    with torch.inference_mode():
        found = attend(histograms[-1:], model.history_codes[last[-1:]], model.tables())
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-5)


def test_attend_equals_a_double_loop() -> None:
    rng = np.random.default_rng(0)
    queries, rates, books, words, width = 4, 2, 3, 5, 6
    histogram = rng.random((queries, rates, books, words)) * (rng.random((queries, rates, books, words)) < 0.5)
    histogram[..., 0] += 0.1
    last_codes = rng.integers(0, words, (queries, books))
    match, values = rng.random((rates, books, words, words)), rng.standard_normal((rates, books, words, width))
    expected = np.zeros((queries, width))
    for query in range(queries):
        for rate in range(rates):
            for book in range(books):
                mass = histogram[query, rate, book] * match[rate, book, last_codes[query, book]]
                for word in range(words):
                    expected[query] += mass[word] / mass.sum() * values[rate, book, word]
    tables = AttentionTables(torch.from_numpy(match), torch.from_numpy(values))
    found = attend(torch.from_numpy(histogram), torch.from_numpy(last_codes), tables)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_the_scale_of_a_row_cancels(model: LisaMini) -> None:
    histograms, last, recent = states(model, *history(60, 4))
    scale = 10 ** torch.empty(*histograms.shape[:3], 1).uniform_(-6, 6)
    with torch.inference_mode():
        scaled, plain = model.read(histograms * scale, last, recent), model.read(histograms, last, recent)
    torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-5)


def test_cached_tables_equal_fresh_ones(model: LisaMini) -> None:
    state = states(model, *history(20, 5))
    with torch.inference_mode():
        assert torch.equal(model.read(*state, model.tables()), model.read(*state))


def test_the_match_table_peaks_at_one_in_every_row(model: LisaMini) -> None:
    peaks = model.tables().match.amax(dim=-1)
    assert torch.equal(peaks, torch.ones_like(peaks))


def test_gradients_reach_every_weight(random_model: Make) -> None:
    model = random_model(SHAPE.model_copy(update={"recent_items": 6, "recent_heads": 2}), ITEMS, seed=1)
    logits = model.read(*states(model, *history(40, 6))) @ model.item_vectors().T + model.bias
    F.cross_entropy(logits, torch.randint(ITEMS, (len(logits),))).backward()
    for name, weights in model.named_parameters():
        assert weights.grad is not None, name
        assert weights.grad.isfinite().all(), name
        assert weights.grad.any(), name


@pytest.mark.parametrize("recent_heads", [0, 2])
def test_gradients_through_steps_equal_those_through_the_parallel_forward(
    random_model: Make, recent_heads: int
) -> None:
    model = random_model(SHAPE.model_copy(update={"recent_items": 7, "recent_heads": recent_heads}), ITEMS, seed=2)
    items, weights = history(150, 8)
    direction = torch.randn(150, SHAPE.width)
    gradients = []
    for queries in (
        model.read(*states(model, items, weights)),
        model(torch.from_numpy(items), torch.from_numpy(weights)),
    ):
        model.zero_grad()
        (queries * direction).sum().backward()
        gradients.append([(name, tensor.grad) for name, tensor in model.named_parameters() if tensor.grad is not None])
    for (name, stepped), (other, parallel) in zip(*gradients, strict=True):
        assert name == other
        torch.testing.assert_close(stepped, parallel, rtol=1e-3, atol=1e-3, msg=name)


def test_item_vectors_are_the_sums_of_the_target_codewords(model: LisaMini) -> None:
    vectors = model.item_vectors().detach()
    for item, codes in enumerate(model.target_codes.tolist()):
        expected = sum(model.target_codebooks[book, word].detach() for book, word in enumerate(codes))
        torch.testing.assert_close(vectors[item], expected)
    some = torch.tensor([7, 0, 7, ITEMS - 1])
    assert torch.equal(model.item_vectors(some).detach(), vectors[some])


def test_dropout_is_active_only_in_training(random_model: Make) -> None:
    model = random_model(SHAPE, ITEMS)
    state = states(model, *history(10, 7))
    assert torch.equal(model.read(*state), model.read(*state))
    model.train()
    assert not torch.equal(model.read(*state), model.read(*state))


@pytest.mark.parametrize("name", ["lisa-mini", "lisa-recent"])
def test_folding_keeps_outputs_and_rounds_weights_to_bfloat16(name: str) -> None:
    torch.manual_seed(0)
    shape = PRESETS[name][0]
    history, target = torch.randint(32, (50, shape.history_codebooks)), torch.randint(256, (50, shape.target_codebooks))
    model = LisaMini(shape, history, target).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.05 * torch.randn_like(weights))
        items = torch.randint(50, (12,))
        before = model(items)
        model.fold_norms_and_round()
        settled = {name: weights.clone() for name, weights in model.named_parameters()}
        torch.testing.assert_close(model(items), before, rtol=0.02, atol=0.03)
        model.fold_norms_and_round()
    assert all(torch.equal(settled[name], weights) for name, weights in model.named_parameters())
    matrices = [name for name in settled if name.endswith(("up.weight", "down.weight", "keys", "hops.0.values"))]
    assert matrices
    assert all(torch.equal(settled[name], settled[name].bfloat16().float()) for name in matrices)
