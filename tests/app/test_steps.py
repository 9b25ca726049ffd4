"""The law that both rooms keep together: a service's steps, one event at a time, are the model's parallel form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model.config import ModelConfig
from model.lisa import LisaMini
from storage.state import ITEM_RING, Event, Generation

ITEMS = 50


@pytest.mark.parametrize("decay_rates", [(0.02, 0.2, 1.2), (3.0, 0.001), (100.0, 0.1), (0.0, 0.0001), (0.0,)], ids=str)
@pytest.mark.parametrize("recent_heads", [0, 2])
@pytest.mark.parametrize("length", [1, 60, 1200])
def test_stored_steps_equal_the_parallel_forward(
    decay_rates: tuple[float, ...], length: int, recent_heads: int
) -> None:
    """1,200 steps rescale a state some 35 times at the default rates, and every few steps at the fast ones."""
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
        generation.apply(state, Event(f"e{number}", "u", f"item-{row}", kind, number, None))
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
