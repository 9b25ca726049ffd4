"""Temporary copies of tables are deleted when the command ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.jobs.datasets.bucket import own_directory


def test_a_mapped_copy_is_deleted_after_an_error(tmp_path: Path) -> None:
    table, cache = tmp_path / "events.csv", tmp_path / "cache"
    table.write_text("customer,item_id,timestamp\nann,tea,1\n")
    options = ["--data", str(table), "--columns", "customer=user_id", "--out", str(tmp_path / "model")]
    command = [sys.executable, "-m", "lisarec", "train", *options]
    ended = subprocess.run(command, env={**os.environ, "LISAREC_CACHE_DIR": str(cache)}, capture_output=True, text=True)
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False), ended.stderr
    assert list((cache / "data" / "mapped").iterdir()) == []


@pytest.mark.parametrize("function", ["open", "rmtree"])
def test_a_directory_removed_by_another_process_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    module, left = {"open": os, "rmtree": shutil}[function], tmp_path / "left"
    do: Callable[..., object] = getattr(module, function)

    def remove_first(path: Path, *rest: object, **options: object) -> object:
        if path == left:
            left.rmdir()
        return do(path, *rest, **options)

    left.mkdir()
    monkeypatch.setattr(module, function, remove_first)
    own = own_directory(tmp_path)
    assert list(tmp_path.iterdir()) == [own]
