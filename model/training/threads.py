"""The threads that a training computes with."""

from __future__ import annotations

import os

import torch

from model.config import DEFAULT_THREADS


def use_threads(threads: int = DEFAULT_THREADS) -> None:
    """Set the number of PyTorch's threads in this process."""
    torch.set_num_threads(threads)


def cores_in_use() -> str:
    """Return the number of PyTorch's threads, and the number of cores that this process may use, as text."""
    return f"{torch.get_num_threads()} of {len(os.sched_getaffinity(0))} cores"
