"""Batches of whole histories: segments of similar length, padded at the end to the longest one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.data.interactions import Histories

POSITIONS_PER_BATCH = 4_096  # small data gets smaller batches, down to SMALLEST_BATCH, rather than few steps
SMALLEST_BATCH = 256
STEPS_PER_EPOCH = 256


class PaddedBatch(NamedTuple):
    """Segments of histories, padded at the end to the longest one.

    items    (S, L)  int64
    real     (S, L)  bool, false where padded
    targets  (Q,)    int64, the next item after each of the Q real positions
    users    (S,)    int64, the users of the histories
    """

    items: Tensor
    real: Tensor
    targets: Tensor
    users: NDArray[np.int64]


def padded_batches(
    histories: Histories, window: int, rng: np.random.Generator, segments_per_batch: int | None = None
) -> Iterator[PaddedBatch]:
    """Iterate over all positions of an epoch that have a next item, in shuffled batches of segments of similar length.

    segments_per_batch  number of segments; None for batches of some hundred to some thousand positions
    """
    begins, lengths = segments(histories, window, rng)
    by_length = np.lexsort((rng.random(len(lengths)), lengths))
    if segments_per_batch is None:
        size = min(max(histories.positions // STEPS_PER_EPOCH, SMALLEST_BATCH), POSITIONS_PER_BATCH)
        batch_of = np.cumsum(lengths[by_length]) // size
    else:
        batch_of = np.arange(len(lengths)) // segments_per_batch
    chosen = np.split(by_length, np.flatnonzero(np.diff(batch_of)) + 1)
    for index in rng.permutation(len(chosen)):
        if len(chosen[index]):
            yield _padded(histories, begins[chosen[index]], lengths[chosen[index]])


def segments(
    histories: Histories, window: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut the histories into segments. Return their begins, and their lengths without the last target.

    A history that fits the window stays whole. A longer one is cut every ``window`` events, from a random event on.
    """
    begins, ends = histories.starts[:-1], histories.starts[1:] - 1
    first = np.where(ends - begins > window, rng.integers(1, window + 1, len(begins)), window)
    cuts = [
        np.r_[begin, np.arange(begin + cut, end, window)] for begin, cut, end in zip(begins, first, ends, strict=True)
    ]
    users = np.repeat(np.arange(len(cuts)), [len(cut) for cut in cuts])
    flat = np.concatenate([np.empty(0, np.int64), *cuts])
    following = np.where(np.diff(users, append=-1) == 0, np.roll(flat, -1), ends[users])
    lengths = following - flat
    return flat[lengths > 0], lengths[lengths > 0]


def _padded(histories: Histories, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> PaddedBatch:
    real = np.arange(lengths.max()) < lengths[:, None]
    items, targets = (padded_rows(histories.item, begin, lengths) for begin in (begins, begins + 1))
    users = np.searchsorted(histories.starts, begins, side="right") - 1
    return PaddedBatch(torch.from_numpy(items), torch.from_numpy(real), torch.from_numpy(targets[real]), users)


def padded_rows(item: NDArray[np.int32], begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return segments of events, one per row. The last event of a shorter segment is repeated to fill its row."""
    steps = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
    return item[begins[:, None] + steps].astype(np.int64)
