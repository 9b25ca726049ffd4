"""Files of tensors and tables on a full disk."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from model.artifact.tensor_file import replace_tensors
from model.data.table import write_parquet


@contextmanager
def no_room() -> Iterator[None]:
    """Limit files to 100 kB, like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_tensors_on_a_full_disk_raise_os_error_and_keep_the_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    replace_tensors(path, {"weight": torch.ones(3)})
    with no_room(), pytest.raises(OSError, match=r"weights\.safetensors' cannot be written: .*File too large"):
        replace_tensors(path, {"weight": torch.zeros(100_000)})
    assert list(tmp_path.iterdir()) == [path]
    assert load_file(path)["weight"].tolist() == [1.0, 1.0, 1.0]


def test_tensors_are_synced_before_they_replace_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        calls.append(("fsync", os.fstat(descriptor).st_ino))

    def replaced(unfinished: Path, path: Path) -> None:
        calls.append(("replace", unfinished.stat().st_ino))
        replace(unfinished, path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    path = tmp_path / "weights.safetensors"
    replace_tensors(path, {"weight": torch.ones(3)})
    number = path.stat().st_ino
    assert calls == [("fsync", number), ("replace", number)]


def test_a_table_on_a_full_disk_raises_os_error(tmp_path: Path) -> None:
    with no_room(), pytest.raises(OSError, match=r"items\.parquet' cannot be written: .*File too large"):
        write_parquet(pl.DataFrame({"number": pl.Series(range(100_000)).shuffle(0)}), tmp_path / "items.parquet")
