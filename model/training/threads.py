"""The threads that a process computes with."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from numpy.linalg import _umath_linalg

from model.config import DEFAULT_THREADS

OF_OPENBLAS = ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads")
"""What OpenBLAS calls its functions that get and set its threads, in numpy's packages and in those of distributions."""


def use_threads(threads: int = DEFAULT_THREADS) -> None:
    """Set the number of threads of PyTorch, and of the OpenBLAS of numpy, in this process.

    OpenBLAS takes all cores otherwise, waits for busy ones, and gives sums that depend on their number.
    """
    torch.set_num_threads(threads)
    for set_threads in openblas_functions("set"):
        set_threads(threads)


@contextmanager
def threads_kept() -> Iterator[None]:
    """At the end, go back to the numbers of threads at the beginning, which are those of another program."""
    torch_threads = torch.get_num_threads()
    openblas_threads = [get_threads() for get_threads in openblas_functions("get")]
    try:
        yield
    finally:
        torch.set_num_threads(torch_threads)
        for set_threads, threads in zip(openblas_functions("set"), openblas_threads, strict=True):
            set_threads(threads)


def cores_in_use() -> str:
    """Return the number of PyTorch's threads, and the number of cores that this process may use, as text."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # macOS lacks it
    return f"{torch.get_num_threads()} of {cores} cores"


def openblas_functions(verb: Literal["get", "set"]) -> list[Callable[..., Any]]:
    """Return the function of numpy's OpenBLAS that gets or sets its threads; none with another library."""
    linked = ctypes.CDLL(_umath_linalg.__file__)  # has the functions of the libraries that it is linked with, too
    return [getattr(linked, name) for one in OF_OPENBLAS if hasattr(linked, name := one.format(verb))]
