"""Killed archivers, and a process that dies before a chosen call that changes disk, bucket or Redis."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import polars as pl
import pytest
import redis

from storage.folders.folder import Folder
from storage.state.event import Event
from tests.storage.archive.archived_redis import NOW_MS, assert_nothing_is_missing_or_twice, opened, turn, uuid7
from tests.storage.oracles.random_events import click
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import assert_state_is_fold_of_log, ids

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
    """Simulates a kill: no code runs up to the test, except for the release of locks."""


@contextmanager
def dying_at(monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[None]:
    """Die before call number `count` of `CALLS`."""
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


def assert_every_death_leaves_both_right(
    server: RedisServer, archive: Path | Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Die at every call in turn; each round continues after the previous death."""

    async def append(number: int) -> None:
        async with opened(server, archive) as store:
            await store.append("main", [click(f"{number}-{n}", f"user{n}") for n in range(3)])

    deaths = 0
    while True:
        asyncio.run(append(deaths))
        with suppress(Died), dying_at(monkeypatch, deaths):
            turn(server, archive)
            break
        deaths += 1
        assert_nothing_is_missing_or_twice(server, archive)
    assert deaths > 20
    turn(server, archive)
    assert_nothing_is_missing_or_twice(server, archive)

    async def read() -> None:
        async with opened(server, archive) as store:
            for n in range(3):
                assert await ids(store, f"user{n}") == [f"{number}-{n}" for number in range(deaths + 1)]
                await assert_state_is_fold_of_log(store, f"user{n}")

    asyncio.run(read())


def kill_archivers(server: RedisServer, archive: Path | Folder, place: str, delays_s: Sequence[float]) -> None:
    """Kill one archiver after the other while events come in, are resent and are read by a service.

    archive   where the archive is
    place     the same for the command line
    delays_s  how long after its first turn each archiver is killed
    """
    rng, stopping = random.Random(5), threading.Event()
    acknowledged: list[Event] = []
    counted = 0

    async def keep_appending() -> None:
        nonlocal counted
        async with opened(server, archive) as store:
            while not stopping.is_set():
                numbers = range(len(acknowledged), len(acknowledged) + 5)
                batch = [click(f"e{n}" if n % 2 else uuid7(NOW_MS + n, n), f"user{n % 9}", n % 12) for n in numbers]
                resent = rng.sample(acknowledged, min(len(acknowledged), 2))
                answers = await store.append("main", batch + resent)
                counted += sum(not answer.duplicate for answer in answers)
                acknowledged.extend(batch)

    appending = threading.Thread(target=asyncio.run, args=(keep_appending(),))
    appending.start()
    command = [sys.executable, "-m", "app", "archive", "--redis-url", server.url, "--archive-dir", place]
    try:
        for delay_s in delays_s:
            kill_at_work([*command, "--every", "0", "--keep-tail", "0"], delay_s)
            assert_nothing_is_missing_or_twice(server, archive)
    finally:
        stopping.set()
        appending.join()
    assert counted == len(acknowledged) == len({event.event_id for event in acknowledged})
    turn(server, archive)
    assert_nothing_is_missing_or_twice(server, archive)

    async def read() -> None:
        async with opened(server, archive) as store:
            for user_id in {event.user_id for event in acknowledged}:
                mine = [event.event_id for event in acknowledged if event.user_id == user_id]
                assert await ids(store, user_id) == mine
                await assert_state_is_fold_of_log(store, user_id)

    asyncio.run(read())


def kill_at_work(command: Sequence[str], after_s: float) -> None:
    """Kill an archiver this long after its first round."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()  # the first turn is done
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()
