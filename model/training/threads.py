"""The threads that a process computes with."""

from __future__ import annotations

import ctypes
import os

import torch
from numpy.linalg import _umath_linalg

from model.config import DEFAULT_THREADS

OPENBLAS_SETTERS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")
"""What OpenBLAS calls the function that sets its threads, in numpy's own packages and in those of distributions."""


def use_threads(threads: int = DEFAULT_THREADS) -> None:
    """Set the number of threads of PyTorch, and of the OpenBLAS of numpy, in this process.

    OpenBLAS takes all cores otherwise, waits for busy ones, and gives sums that depend on their number.
    """
    torch.set_num_threads(threads)
    blas = ctypes.CDLL(_umath_linalg.__file__)  # has the functions of the libraries that it is linked with, too
    for name in OPENBLAS_SETTERS:
        if hasattr(blas, name):
            getattr(blas, name)(threads)


def cores_in_use() -> str:
    """Return the number of PyTorch's threads, and the number of cores that this process may use, as text."""
    return f"{torch.get_num_threads()} of {len(os.sched_getaffinity(0))} cores"
