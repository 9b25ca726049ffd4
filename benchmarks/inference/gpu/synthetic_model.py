"""Untrained models and random states with any number of items: as fast as trained ones, with meaningless lists.

They are created on the device, because the CPU would take minutes to draw the numbers of a hundred million items.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from model.config import ModelConfig
from model.inference.captured_batches import States
from model.lisa.lisa_mini import AttentionTables, LisaMini


def untrained(items: int, device: str, shape: ModelConfig) -> LisaMini:
    """Return a model of this shape with random codes, weights and biases; its items have no followers yet."""
    torch.manual_seed(0)
    with torch.device(device):
        history = torch.randint(shape.history_codewords, (items, shape.history_codebooks), dtype=torch.uint8)
        target = torch.randint(shape.target_codewords, (items, shape.target_codebooks), dtype=torch.uint8)
        model = LisaMini(shape, history, target)
        with torch.no_grad():
            model.bias.normal_()
    model.fold_norms_and_round()
    return model.eval()


def add_followers(model: LisaMini) -> None:
    """Give every item random followers."""
    with torch.no_grad():
        model.followers.random_(0, len(model.target_codes))
        model.lift.uniform_()


def tables_of(model: LisaMini) -> AttentionTables:
    """Return the tables of the model's attention, on its device."""
    with torch.no_grad():
        return model.tables()


def random_states(shape: ModelConfig, items: int, users: int, seed: int = 0) -> States:
    """Return random states of users with several events each."""
    rng = np.random.default_rng(seed)
    cells = users, len(shape.decay_rates), shape.history_codebooks, shape.history_codewords
    histograms = rng.random(cells, np.float32) * (rng.random(cells, np.float32) < 0.3)
    histograms[..., 0] += np.float32(0.01)
    recent = rng.integers(0, items, (users, shape.recent_items))
    return States(histograms.astype(np.float32), recent[:, 0].copy(), recent)


def random_bitmaps(users: int, words: int, share: float, seed: int = 0) -> NDArray[np.uint64]:
    """Return bitmaps (Q, words) with about this share of the items, in runs of 64, because drawing bits takes long."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random((users, words)) < share, ~np.uint64(0), np.uint64(0))
