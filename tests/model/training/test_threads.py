"""Threads and memory of a training: numpy uses as many threads as PyTorch, on all platforms."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.training import memory
from model.training.threads import cores_in_use

PRINT_VECTORS = """
import hashlib
import numpy as np
from scipy import sparse
from model.lisa.item_codes import item_vectors
from model.training.threads import use_threads

use_threads(1)
counts = sparse.random_array((500, 500), density=0.02, rng=np.random.default_rng(0), dtype=np.float32)
vectors = item_vectors(sparse.csr_array(counts + counts.T), 128, seed=0)
print(hashlib.sha256(vectors.tobytes()).hexdigest())
"""


def vectors_where_numpy_began_with(threads: int) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["OPENBLAS_NUM_THREADS"] = str(threads)
    found = subprocess.run(
        [sys.executable, "-c", PRINT_VECTORS], env=environment, capture_output=True, text=True, check=True
    )
    return found.stdout


def test_item_vectors_do_not_depend_on_the_number_of_cores() -> None:
    assert vectors_where_numpy_began_with(1) == vectors_where_numpy_began_with(2)


def test_cores_are_counted_without_cpu_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert cores_in_use() == f"{torch.get_num_threads()} of {os.cpu_count()} cores"


def test_memory_is_reported_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    current = memory.resident_bytes()
    monkeypatch.setattr(memory, "STATM", tmp_path / "statm")  # as on macOS
    assert current / 2 < memory.resident_bytes() * 1024  # what macOS tells in bytes, Linux tells in KiB
