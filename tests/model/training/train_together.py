"""One of several processes that train a tiny model: DATA OUT [EPOCH [MEMORY [TYPE]]].

After the epoch, the second process is killed. The memory is the limit of each process, and the type that of products.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from typing_extensions import override

from model.training import train, trainer
from model.training.distributed.processes import Processes
from model.training.loop import LAST_CHECKPOINT, EpochReport, TrainError
from model.training.memory import Resources
from tests.model.conftest import Silent, tiny_config

EPOCHS = 2


class KilledAfter(Silent):
    """Progress that kills its process with SIGKILL after an epoch."""

    @override
    def epoch(self, report: EpochReport) -> None:
        if report.epoch == self.stop_after:
            os.kill(os.getpid(), signal.SIGKILL)


def main(data: str, out: str, last_epoch: str = "", memory: str = "", dtype: str = "float32") -> None:
    """Train, or resume; print errors like a command."""
    torch.set_num_threads(1)
    setattr(trainer, "matmul_dtype", lambda _: getattr(torch, dtype))  # noqa: B010 (mypy) -- sums in bfloat16 differ by more
    processes = Processes.joined()
    killed = bool(last_epoch) and not processes.is_first
    progress = KilledAfter(int(last_epoch)) if killed else Silent()
    resume = (Path(out) / LAST_CHECKPOINT).exists()
    how = Resources(memory=int(memory) if memory else None, processes=processes)
    try:
        made = train.train(
            Path(data), Path(out), tiny_config(epochs=EPOCHS), resources=how, resume=resume, progress=progress
        )
    except TrainError as exc:
        sys.exit(f"error: {exc}")
    print(made.tag)


if __name__ == "__main__":
    main(*sys.argv[1:])
