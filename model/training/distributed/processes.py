"""The processes that train one model together, started by torchrun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
from torch import distributed

from model.training.distributed.ending import ENDED, end_with_others, ignore_the_end
from model.training.loop import TrainError

PATIENCE = timedelta(days=2)  # for the first process's preparation; a process that ends is noticed at once


@dataclass(frozen=True)
class Processes:
    """One of the processes that train a model. The first one reads the data, validates epochs and writes.

    raises  TrainError  from every method, when another process has ended
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def joined(cls) -> Processes:
        """Return this process, as one of those that torchrun has started, or alone without torchrun."""
        if not distributed.is_available() or not distributed.is_torchelastic_launched():
            return ALONE
        end_with_others()
        distributed.init_process_group("gloo", timeout=PATIENCE)
        return cls(distributed.get_rank(), distributed.get_world_size())

    @property
    def is_first(self) -> bool:
        """Whether this is the process that reads, validates and writes."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until every process has reached this call."""
        if self.count > 1:
            with self.together():
                distributed.barrier()

    def shared(self, text: str) -> str:
        """Return the text of the first process."""
        if self.count == 1:
            return text
        own = text.encode() if self.is_first else b""
        with self.together():
            size = torch.tensor([len(own)])
            distributed.broadcast(size, 0)
            content = torch.zeros(int(size), dtype=torch.uint8)
            content[: len(own)] = torch.from_numpy(np.frombuffer(own, np.uint8).copy())
            distributed.broadcast(content, 0)
        return content.numpy().tobytes().decode()

    def mean(self, number: float) -> float:
        """Return the mean of the processes' numbers."""
        if self.count == 1:
            return number
        with self.together():
            total = torch.tensor([number], dtype=torch.float64)
            distributed.all_reduce(total)
        return float(total) / self.count

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise TrainError if the block fails because another process has ended."""
        try:
            yield
        except RuntimeError as exc:
            if self.count == 1 or not (isinstance(exc, distributed.DistError) or "gloo" in str(exc)):
                raise
            raise _ended() from exc


ALONE = Processes()


def _ended() -> TrainError:
    ignore_the_end()
    return TrainError(ENDED)
