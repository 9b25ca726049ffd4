"""The order of a catalogue's items that makes its scan fast: by their codes, so that blocks of neighbours are alike."""

from __future__ import annotations

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.artifact.item_statistics import ItemStatistics
from model.artifact.model_directory import ITEM_DTYPES
from model.lisa.item_complements import Complements

Catalogue = tuple[dict[str, Tensor], pl.DataFrame, ItemStatistics]


def ordered_by_codes(
    tensors: dict[str, Tensor], items: pl.DataFrame, statistics: ItemStatistics, kept: int = 0
) -> Catalogue:
    """Reorder the items of a model, given in the parts that ``model_directory.write`` takes.

    Items are ordered by their target codes, first by those of the codebook whose codewords are farthest apart. Items of
    equal codes are ordered by descending bias.

    kept  the number of items, the first ones, that keep their rows
    """
    codes, bias = tensors["codes.target"].cpu().numpy(), tensors["weights.bias"].detach().cpu().numpy()
    spread = tensors["weights.target_codebooks"].detach().cpu().var(dim=1).sum(dim=1)
    widest_last = torch.argsort(spread, stable=True).numpy()
    moving = np.lexsort([-bias[kept:], *codes[kept:].T[widest_last]])
    order = np.append(np.arange(kept), kept + moving)
    rows = np.empty(len(order), np.int32)
    rows[order] = np.arange(len(order), dtype=np.int32)
    moved = {name: tensor.cpu()[torch.from_numpy(order)] for name, tensor in tensors.items() if name in ITEM_DTYPES}
    moved["weights.followers"] = torch.from_numpy(_renumbered(moved["weights.followers"].numpy(), rows))
    return tensors | moved, items[order], _reordered(statistics, order, rows)


def _renumbered(others: NDArray[np.int32], rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the new rows of other items (..., K), of which -1 stands for none."""
    return np.where(others >= 0, rows[others], np.int32(-1))


def _reordered(statistics: ItemStatistics, order: NDArray[np.intp], rows: NDArray[np.int32]) -> ItemStatistics:
    complements, intervals = statistics.complements, statistics.intervals
    if complements.exist:
        moved = Complements(_renumbered(complements.items[order], rows), complements.scores[order])
        statistics = statistics._replace(complements=moved)
    if intervals.exist:
        statistics = statistics._replace(intervals=intervals.enlarged(order))
    return statistics
