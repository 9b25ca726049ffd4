"""The trainer of one of several processes: it learns from its own users, and all processes make the same steps.

Every process draws the same batches and takes the positions of its users. DistributedDataParallel combines the
gradients. Each process draws the dropout of the whole batch, and takes its rows. So the number of processes changes the
result only by the rounding of sums.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from model.config import Config
from model.training.batches.positions import PositionBatch, Shard
from model.training.distributed.processes import Processes
from model.training.loop import EpochReport
from model.training.trainer import Preparation, Trainer


class Turn:
    """The current shard."""

    shard: Shard


class RowDropout(nn.Dropout):
    """Dropout of some rows of a batch, drawn for the whole batch, as in a training with one process."""

    def __init__(self, share: float, turn: Turn) -> None:
        super().__init__(share)
        self._turn = turn

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Drop the entries that a dropout of the whole batch drops in these rows: (Q, ...) -> (Q, ...)."""
        if not self.training or not self.p:
            return input
        shard = self._turn.shard
        kept = F.dropout(torch.ones((shard.whole, *input.shape[1:]), dtype=input.dtype), self.p)
        return input * kept[shard.rows]


class _Loss(nn.Module):
    """The loss as a module, whose forward DistributedDataParallel calls. It has no buffers to broadcast."""

    def __init__(self, network: nn.Module, loss: Callable[[PositionBatch], Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(network.parameters())
        self._loss = loss

    @override
    def forward(self, batch: PositionBatch) -> Tensor:
        return self._loss(batch)


class ShardTrainer(Trainer):
    """One of the processes of a training, on CPUs."""

    def __init__(self, prepared: Preparation, config: Config, directory: Path, processes: Processes) -> None:
        super().__init__(prepared, config, directory, "cpu")
        self.processes = processes
        self._turn = Turn()
        for module in list(self.model.modules()):
            for name, part in module.named_children():
                if isinstance(part, nn.Dropout):
                    setattr(module, name, RowDropout(part.p, self._turn))
        with processes.together():
            self._parallel = DistributedDataParallel(_Loss(self.model, self._share_of_loss))

    @override
    def _batches(self, seed: int) -> Iterator[tuple[PositionBatch, float]]:
        for shard in self.batch_maker.shards(seed, self.processes.rank, self.processes.count):
            self._turn.shard = shard
            yield shard.batch, shard.whole / self.positions
            self.arrays.release()

    @override
    def _forward(self, batch: PositionBatch) -> Tensor:
        loss: Tensor = self._parallel(batch)
        return loss

    @property
    @override
    def _writes(self) -> bool:
        return self.processes.is_first

    @override
    def _shared(self, report: EpochReport) -> EpochReport:
        loss = self.processes.mean(report.loss)
        told = self.processes.shared(json.dumps(report._replace(loss=loss)._asdict()))
        return EpochReport(**json.loads(told))

    def _share_of_loss(self, batch: PositionBatch) -> Tensor:
        """Return the loss of this process's positions, weighted so that the mean of all processes is the batch's."""
        share = len(batch.targets) * self.processes.count / self._turn.shard.whole
        if len(batch.targets):
            return self._loss(batch) * share
        # the same random draws, and a gradient of each weight, are needed all the same
        self.negatives()
        nothing = self.model.read(batch.histogram, batch.last, batch.recent).sum()
        return (nothing + self.model.bias.sum() + self.model.item_vectors().sum()) * 0.0
