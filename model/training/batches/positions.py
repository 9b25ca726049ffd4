"""Batches of positions of histories: their precomputed states, and their next items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.config import ModelConfig, TrainConfig
from model.data.interactions import Histories, starts_of
from model.lisa.histogram import running_histograms
from model.lisa.recent_attention import recent_windows

POOL_POSITIONS = 32_768  # positions shuffled together; about 100 MB of histograms


class PositionBatch(NamedTuple):
    """States at positions, and the next items: histogram (Q, R, B, W), last (Q,), recent (Q, K), targets (Q,)."""

    histogram: Tensor
    last: Tensor
    recent: Tensor
    targets: Tensor

    def pinned(self) -> Self:
        """Return a copy in pinned memory, from which a GPU copies without the CPU."""
        return type(self)(*(part.pin_memory() for part in self))

    def on(self, device: torch.device) -> Self:
        """Return the batch on a device; from pinned memory, without waiting for the copy."""
        return type(self)(*(part.to(device, non_blocking=True) for part in self))


class Shard(NamedTuple):
    """One process's part of a batch.

    batch  its positions; there may be none
    rows   (Q,)  their rows in the whole batch
    whole  the number of positions of the whole batch
    """

    batch: PositionBatch
    rows: Tensor
    whole: int


class Bound(NamedTuple):
    """The maximum number of positions of each user in an epoch; None for all. Half of them are the newest.

    The others are a run of earlier positions, which differs in every epoch.
    """

    most: int | None = None

    @classmethod
    def of(cls, histories: Histories, training: TrainConfig) -> Bound:
        """Return the bound that these settings give."""
        counts = np.maximum(histories.lengths - 1, 0)
        if training.epoch_share == 1:
            return cls(training.events_per_user)
        below, above = 1, max(int(counts.max(initial=1)), 2)  # a bound of `below` keeps few enough, or is 1
        while above - below > 1:
            middle = (below + above) // 2
            few = np.minimum(counts, middle).sum() <= training.epoch_share * counts.sum()
            below, above = (middle, above) if few else (below, middle)
        return cls(min(below, training.events_per_user or below))

    def positions(self, histories: Histories) -> int:
        """Return the number of positions of an epoch."""
        if self.most is None:
            return histories.positions
        return int(np.clip(histories.lengths - 1, 0, self.most).sum())

    def keeps(self, starts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.bool_] | None:
        """Draw the events of some users that an epoch learns from; None for all of them.

        starts  (users + 1,)  where each user's events begin, and the end
        """
        if self.most is None:
            return None
        counts, stretch = np.diff(starts) - 1, self.most // 2
        newest_from = np.maximum(counts - (self.most - stretch), 0)
        begins = rng.integers(0, np.maximum(newest_from - stretch, 0) + 1)
        place = np.arange(starts[-1]) - np.repeat(starts[:-1], counts + 1)
        newest_from, begins, counts = (np.repeat(each, np.diff(starts)) for each in (newest_from, begins, counts))
        in_stretch = (place >= begins) & (place < begins + stretch)
        kept: NDArray[np.bool_] = (counts <= self.most) | (place >= newest_from) | in_stretch
        return kept


UNBOUNDED = Bound()


class BatchMaker:
    """Makes the batches of an epoch, where positions of some hundred random users are shuffled together.

    The positions of a batch depend only on the seed, not on the number of processes that share it.
    """

    def __init__(
        self,
        histories: Histories,
        history_codes: NDArray[np.uint8],
        config: ModelConfig,
        batch_size: int,
        bound: Bound = UNBOUNDED,
    ) -> None:
        self._histories, self._codes, self._config = histories, history_codes, config
        self._batch_size, self._bound = batch_size, bound

    def batches(self, seed: int) -> Iterator[PositionBatch]:
        """Iterate over all positions of an epoch."""
        return (shard.batch for shard in self.shards(seed, 0, 1))

    def shards(self, seed: int, rank: int, processes: int) -> Iterator[Shard]:
        """Iterate over the parts of all batches that process ``rank`` has: the positions of its users."""
        rng = np.random.default_rng(seed)
        lengths = self._histories.lengths
        users = rng.permutation(np.flatnonzero(lengths >= 2))
        pool_of = np.cumsum(lengths[users]) // POOL_POSITIONS
        for pool in np.split(users, np.flatnonzero(np.diff(pool_of)) + 1):
            if not len(pool):
                continue
            starts = starts_of(lengths[pool])
            has_next = np.ones(starts[-1], bool)
            has_next[starts[1:] - 1] = False
            kept = self._bound.keeps(starts, rng)
            shuffled = rng.permutation(np.flatnonzero(has_next if kept is None else has_next & kept))
            # the same number of events for each process, except for those of one user
            cuts = np.searchsorted(starts, starts[-1] * np.arange(processes + 1) / processes)
            own = slice(int(cuts[rank]), int(cuts[rank + 1]))
            yield from self._pool(pool[own], starts[own.start : own.stop + 1], shuffled)

    def _pool(
        self, users: NDArray[np.int64], bounds: NDArray[np.int64], shuffled: NDArray[np.int64]
    ) -> Iterator[Shard]:
        """Iterate over the batches of a pool, with the positions of these users.

        bounds    (users + 1,)  where the events of each of these users begin among all of the pool, and the end
        shuffled  the positions of all users of the pool, in the order of the batches
        """
        begin, end, starts = bounds[0], bounds[-1], bounds - bounds[0]
        histories, shape = self._histories, self._config
        spans = [np.arange(histories.starts[user], histories.starts[user + 1]) for user in users]
        rows = np.concatenate([np.empty(0, np.int64), *spans])
        item = histories.item[rows]
        codes, weights = self._codes[item], histories.weights[rows]
        histograms = running_histograms(codes, weights, starts, shape.decay_rates, shape.history_codewords)
        for batch in np.array_split(shuffled, max(1, round(len(shuffled) / self._batch_size))):
            mine = np.flatnonzero((batch >= begin) & (batch < end))
            chosen = batch[mine] - begin
            recent = recent_windows(item, starts, chosen, shape.recent_items)
            of_positions = PositionBatch(
                torch.from_numpy(histograms[chosen]),
                torch.from_numpy(item[chosen].astype(np.int64)),
                torch.from_numpy(recent.astype(np.int64)),
                torch.from_numpy(item[chosen + 1].astype(np.int64)),
            )
            yield Shard(of_positions, torch.from_numpy(mine), len(batch))
