"""A trained model with a catalogue of any size, to measure what size costs; what it recommends means nothing.

The trained items come first; the others are copies of them, each with finer codes of other items: the later a
codebook, the more copies differ in it, so that scores stay bunched as they are in a shop. Followers are those of the
original, among the same round of copies.

    python -m benchmarks.catalogue --model models/ml-1m --items 10000000 --out models/large
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import polars as pl
import torch
import typer
from numpy.typing import NDArray
from safetensors.torch import load_file

from model import artifact
from model.artifact import ITEMS, WEIGHTS

DIFFERENT = 0.1  # share of the copies that differ in the second codebook; in each that follows as many more


def enlarge(model: Path, items: int, directory: Path, seed: int = 0) -> None:
    """Write a model directory with so many items, at least those of the trained one."""
    trained = artifact.load(model)
    frame, tensors = pl.read_parquet(model / ITEMS), load_file(model / WEIGHTS)
    count = len(frame)
    if items < count:
        raise ValueError(f"{model} has {count:,} items; ask for more")
    rng = np.random.default_rng(seed)
    original, copy = np.arange(items) % count, np.arange(items) // count
    followers = tensors["weights.followers"].numpy()[original]
    shifted = np.where(followers < 0, -1, followers + (copy * count).astype(np.int32)[:, None])
    tensors |= {
        "codes.history": torch.from_numpy(differing(trained.history_codes, original, copy, rng)),
        "codes.target": torch.from_numpy(differing(trained.target_codes, original, copy, rng)),
        "weights.bias": tensors["weights.bias"][torch.from_numpy(original)],
        "weights.followers": torch.from_numpy(np.where(shifted < items, shifted, -1)),
        "weights.lift": tensors["weights.lift"][torch.from_numpy(original)],
    }
    copies = frame[original].with_columns(pl.Series("copy", copy))
    copies = copies.with_columns(
        pl.when(pl.col("copy") == 0).then("item_id").otherwise(pl.format("{}.{}", "item_id", "copy")).alias("item_id"),
        pl.col("count") // (1 + pl.col("copy")),
    )
    copies = copies.drop("copy")
    artifact.write(directory, tensors, trained.config, copies, {})


def differing(
    codes: NDArray[np.uint8], original: NDArray[np.int64], copy: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Codes of the copies: (items, books)."""
    copied = codes[original]
    for book in range(1, codes.shape[1]):
        other = np.flatnonzero((rng.random(len(original)) < DIFFERENT * book) & (copy > 0))
        copied[other, book] = codes[rng.integers(0, len(codes), len(other)), book]
    return copied


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory.")],
    out: Annotated[Path, typer.Option(help="Directory of the large one.")],
    items: Annotated[int, typer.Option(help="Items it shall have.")] = 10_000_000,
) -> None:
    enlarge(model, items, out)


if __name__ == "__main__":
    typer.run(main)
