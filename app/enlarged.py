"""A trained model with a catalogue of another size, for measuring what size costs: its numbers mean nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from model import artifact
from model.artifact import Artifact
from model.items import Items

Codes = Literal["trained", "random"]
OF_ITEMS = frozenset({"bias", "followers", "lift", "history_codes", "target_codes", "shares"})


def write(directory: Path, trained: Artifact, items: int, codes: Codes, seed: int = 0) -> None:
    """Write a model directory with the weights of a trained model and so many items.

    trained  the items repeat; each copy keeps the coarse half of its codes and takes the fine half from an item that
             is like it, so that scores lie as close together as a shop's
    random   every code is drawn anew, which leaves no structure
    """
    rng = np.random.default_rng(seed)
    original = np.arange(items) % len(trained.items)
    if codes == "trained":
        history_codes, target_codes = trained.history_codes[original], _mixed(trained.target_codes, original, rng)
    else:
        shape = trained.config.model
        history_codes = rng.integers(0, shape.history_codewords, (items, shape.history_codebooks), np.uint8)
        target_codes = rng.integers(0, shape.target_codewords, (items, shape.target_codebooks), np.uint8)
    made = artifact.class_of(trained.config.model)
    model = made(trained.config.model, torch.from_numpy(history_codes), torch.from_numpy(target_codes))
    weights = {
        name: tensor[original] if name in OF_ITEMS else tensor for name, tensor in trained.model.state_dict().items()
    }
    model.load_state_dict(weights | {"history_codes": model.history_codes, "target_codes": model.target_codes})
    rows = original.tolist()
    catalogue = Items(
        [item_id(number) for number in range(items)],
        [trained.items.titles[row] for row in rows],
        [trained.items.categories[row] for row in rows],
        trained.items.counts[original],
    )
    artifact.save(directory, model, trained.config, catalogue, {})


def item_id(number: int) -> str:
    return f"item-{number}"


def _mixed(codes: NDArray[np.uint8], original: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Codes (items, B') of the originals and, behind the first of each, with fine codes of others of its first code."""
    by_first_code = np.argsort(codes[:, 0], kind="stable")
    members = np.bincount(codes[:, 0], minlength=256)
    begins = np.cumsum(members) - members
    mixed = codes[original]
    copies = mixed[len(codes) :]
    first = copies[:, 0]
    for book in range(codes.shape[1] // 2, codes.shape[1]):
        others = by_first_code[begins[first] + rng.integers(0, members[first])]
        copies[:, book] = codes[others, book]
    return mixed
