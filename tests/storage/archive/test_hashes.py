"""Hash files of archived entries."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from storage.archive.hashes import hashes_of_users, merge_hashes, read_hashes

THREADS = 4


@pytest.fixture
def other_threads_run_amid_each_read() -> Iterator[None]:
    """Collect garbage often, and switch threads during each collection."""

    def let_others_run(_: str, __: dict[str, int]) -> None:
        time.sleep(0)

    before = gc.get_threshold()
    gc.callbacks.append(let_others_run)
    gc.set_threshold(20)
    yield
    gc.set_threshold(*before)
    gc.callbacks.remove(let_others_run)


@pytest.mark.usefixtures("other_threads_run_amid_each_read")
def test_threads_read_hashes_concurrently(tmp_path: Path) -> None:
    """Python before 3.11.8 cannot parse array headers in two threads at different call depths."""
    hashes = merge_hashes([hashes_of_users(["a", "b"])])
    path = tmp_path / "hashes.npy"
    np.save(path, hashes)

    def equal_reads(depth: int) -> int:
        return equal_reads(depth - 1) if depth else sum(np.array_equal(read_hashes(path), hashes) for _ in range(500))

    with ThreadPoolExecutor(THREADS) as threads:
        assert [*threads.map(equal_reads, range(THREADS))] == [500] * THREADS
