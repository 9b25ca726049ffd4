"""`model` and `storage` together: stored steps, one event at a time, equal the model's parallel form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model.config import MECHANISMS, SERVED_MECHANISMS, WEIGHT_RANGE, ModelConfig
from model.lisa.histogram import history_histogram
from model.lisa.lisa_mini import LisaMini
from model.lisa.seen_items import RECENT_ITEMS
from model.mechanisms.export import served_model
from model.mechanisms.network import MechanismNetwork
from storage.state.event import Event
from storage.state.fold import fold_event
from storage.state.generation import WEIGHT_RANGE as WEIGHT_RANGE_OF_STATES
from storage.state.generation import Generation
from storage.state.layout import ITEM_RING

ITEMS = 50


def test_model_and_storage_share_their_limits() -> None:
    assert RECENT_ITEMS == ITEM_RING
    assert WEIGHT_RANGE == WEIGHT_RANGE_OF_STATES


@pytest.mark.parametrize("decay_rates", [(0.02, 0.2, 1.2), (3.0, 0.001), (100.0, 0.1), (0.0, 0.0001), (0.0,)], ids=str)
@pytest.mark.parametrize("recent_heads", [0, 2])
@pytest.mark.parametrize("length", [1, 60, 1200])
def test_stored_steps_equal_the_parallel_forward(
    decay_rates: tuple[float, ...], length: int, recent_heads: int
) -> None:
    """1,200 steps rescale a state about 35 times at the default rates, and every few steps at fast ones."""
    torch.manual_seed(0)
    rng = np.random.default_rng(length)
    config = ModelConfig(
        width=16,
        decay_rates=decay_rates,
        history_codebooks=4,
        history_codewords=8,
        recent_items=40,
        recent_heads=recent_heads,
    )
    history, target = torch.randint(0, 8, (ITEMS, 4)), torch.randint(0, 256, (ITEMS, 8))
    model = LisaMini(config, history, target).eval()
    weights = {"view": 0.25, "click": 1.0, "buy": 3.5, "dislike": 0.0}
    index = {f"item-{row}": row for row in range(ITEMS)}
    generation = Generation(
        b"12345678", decay_rates, 8, index, history.numpy().astype(np.uint8), weights, stepped_items=40
    )

    rows = rng.integers(0, ITEMS, length + ITEM_RING)
    types = rng.choice(list(weights), length + ITEM_RING)
    types[0], types[length:] = "click", "dislike"  # more of what does not step than any ring remembers
    state = generation.empty()
    for number, (row, kind) in enumerate(zip(rows, types, strict=True)):
        fold_event(generation, state, Event(f"e{number}", "u", f"item-{row}", kind, number, None))
    stored = generation.decode_many([generation.encode(state)])
    with torch.inference_mode():
        stepped = model.read(
            torch.from_numpy(generation.histograms(stored)),
            torch.from_numpy(stored["last_item"].astype(np.int64)),
            torch.from_numpy(stored["stepped_items"].astype(np.int64)),
        )
        steps = types != "dislike"
        parallel = model(torch.from_numpy(rows[steps]), torch.tensor([weights[kind] for kind in types[steps]]))
    torch.testing.assert_close(stepped[0], parallel[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", sorted(SERVED_MECHANISMS))
@pytest.mark.parametrize("length", [1, 7, 400])
@torch.inference_mode()
def test_stored_steps_of_learned_codes_equal_the_parallel_forward(name: str, length: int) -> None:
    """Of the trained network; 400 steps rescale a state and exceed the training window."""
    torch.manual_seed(length)
    network = MechanismNetwork(MECHANISMS[name].model_copy(update={"width": 12, "codewords": 7}), ITEMS).eval()
    for weights in network.parameters():
        weights.add_(0.3 * torch.randn_like(weights))
    model = served_model(network)
    shares = None if model.shares is None else model.shares.numpy()
    index = {f"item-{row}": row for row in range(ITEMS)}
    rates, codes = model.config.decay_rates, model.history_codes.numpy()
    generation = Generation(b"12345678", rates, 7, index, codes, {"click": 1.0}, stepped_items=1, shares=shares)

    items = torch.randint(ITEMS, (length,))
    state = generation.empty()
    for number, row in enumerate(items.tolist()):
        fold_event(generation, state, Event(f"e{number}", "u", f"item-{row}", "click", number, None))
    stored = generation.decode_many([generation.encode(state)])
    histograms = generation.histograms(stored)
    last, recent = (torch.from_numpy(stored[part].astype(np.int64)) for part in ("last_item", "stepped_items"))
    query = model.read(torch.from_numpy(histograms), last, recent)[0]
    distinct = network.distinct()
    expected = network(items[None], torch.tensor([length]), distinct)[0, -1]
    torch.testing.assert_close(query, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.item_vectors(), distinct.targets, rtol=1e-4, atol=1e-4)
    counted = history_histogram((codes if shares is None else shares)[items.numpy()], rates, 7)
    np.testing.assert_allclose(histograms[0], counted, rtol=1e-4, atol=1e-6)
