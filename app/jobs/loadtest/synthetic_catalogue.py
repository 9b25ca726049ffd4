"""Writes a trained model with a catalogue of another size, to measure speed and memory. Its quality is meaningless."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from model.artifact import model_directory
from model.artifact.item_order import ordered_by_codes
from model.artifact.item_statistics import ItemStatistics
from model.artifact.model_directory import ITEM_DTYPES, ITEMS, WEIGHTS, Artifact
from model.lisa.item_complements import Complements

Codes = Literal["trained", "random"]


def write_enlarged(directory: Path, model: Path, items: int, codes: Codes) -> None:
    """Write a model directory with the weights of a trained one and `items` items, in rounds of the trained items.

    trained  each round copies the trained items; a copy keeps the coarse half of its codes and takes the fine half
             from similar items, so that scores are as close together as in a shop
    random   every code is random, which leaves no structure

    The followers and complements of a copy are those of its original, in the same round; so is its interval. Items are
    in the order of their codes, as training writes them.
    """
    trained = model_directory.load(model)
    rng, count = np.random.default_rng(0), len(trained.items)
    rows = np.arange(items)
    original = rows % count
    tensors = load_file(model / WEIGHTS)
    tensors |= {name: tensors[name][torch.from_numpy(original)] for name in ITEM_DTYPES if name in tensors}
    rounds = (rows - original).astype(np.int32)[:, None]
    tensors["weights.followers"] = torch.from_numpy(_in_round(tensors["weights.followers"].numpy(), rounds))
    complements = trained.complements
    if complements.exist:
        shifted = _in_round(complements.items[original], rounds)
        complements = Complements(shifted, np.where(shifted >= 0, complements.scores[original], 0))
    intervals = trained.intervals.enlarged(original) if trained.intervals.exist else trained.intervals
    if codes == "trained":
        tensors["codes.target"] = torch.from_numpy(_mix_fine_codes(trained.target_codes, original, rng))
    else:
        tensors |= _random_codes(trained, items, rng)
    catalogue = pl.read_parquet(model / ITEMS)[original].with_columns(
        pl.format("item-{}", pl.Series(rows)).alias("item_id")
    )
    statistics = ItemStatistics(complements, intervals, trained.content)
    tensors, catalogue, statistics = ordered_by_codes(tensors, catalogue, statistics)
    model_directory.write(directory, tensors, trained.config, catalogue, {}, statistics)


def item_id(number: int) -> str:
    """Return the id of an item; numbers begin with 0."""
    return f"item-{number}"


def _in_round(others: NDArray[np.int32], rounds: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the copies of other items (N, K) that belong to the same rounds (N, 1); -1 beyond the last item."""
    shifted = others + rounds
    return np.where((others >= 0) & (shifted < len(others)), shifted, -1).astype(np.int32)


def _random_codes(trained: Artifact, items: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    shape = trained.config.model
    history = rng.integers(0, shape.history_codewords, (items, shape.history_codebooks), np.uint8)
    target = rng.integers(0, shape.target_codewords, (items, shape.target_codebooks), np.uint8)
    return {"codes.history": torch.from_numpy(history), "codes.target": torch.from_numpy(target)}


def _mix_fine_codes(
    codes: NDArray[np.uint8], original: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Return codes (items, B'): the originals, then copies with fine codes of items that share their first code."""
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
