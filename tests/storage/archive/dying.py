"""A process that dies before a call of choice, of those that change the disk or a bucket, or that Redis is sent."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import polars as pl
import pytest
import redis

ROOT = Path(__file__).parents[3]
CALLS = [
    (os, "fsync"),
    *((Path, name) for name in ("rename", "unlink", "rmdir", "mkdir")),
    (np, "save"),
    (pl.DataFrame, "write_parquet"),
    (redis.Redis, "execute_command"),
    *((obstore, name) for name in ("put", "delete")),
]


class Died(BaseException):
    """Stands for a kill: nothing between here and the test runs any more, save what lets go of locks."""


@contextmanager
def dying_at(monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[None]:
    """Die before the call number `count` of `CALLS`."""
    left = count

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Died
            left -= 1
            return call(*args, **options)

        return wrapped

    with monkeypatch.context() as patch:
        for owner, name in CALLS:
            patch.setattr(owner, name, deadly(getattr(owner, name)))
        yield


def kill_at_work(command: Sequence[str], after_s: float) -> None:
    """Kill an archiver that long after its first turn."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()  # the first turn is done
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()
