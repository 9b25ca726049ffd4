"""An archiver that is killed anywhere archives every event once."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from storage.state.event import Event
from tests.storage.archive.archived_redis import NOW_MS, assert_nothing_is_missing_or_twice, opened, turn, uuid7
from tests.storage.archive.dying import Died, dying_at, kill_at_work
from tests.storage.oracles.random_events import click
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import assert_state_is_fold_of_log, ids


class TestKilling:
    def test_an_archiver_killed_at_any_time_takes_every_event_once(self, server: RedisServer, tmp_path: Path) -> None:
        """kill -9 at random moments, while events come in, are resent, and are read by a service."""
        directory = tmp_path / "archive"
        command = [sys.executable, "-m", "app", "archive", "--redis-url", server.url, "--archive-dir", str(directory)]
        rng = random.Random(5)
        stopping = threading.Event()
        acknowledged: list[Event] = []
        counted = 0

        async def keep_appending() -> None:
            nonlocal counted
            async with opened(server, directory) as store:
                number = 0
                while not stopping.is_set():
                    batch = [
                        click(f"e{n}" if n % 2 else uuid7(NOW_MS + n, n), f"user{n % 9}", n % 12)
                        for n in range(number, number + 5)
                    ]
                    batch += rng.sample(acknowledged, min(len(acknowledged), 2))
                    answers = await store.append("main", batch)
                    counted += sum(not answer.duplicate for answer in answers)
                    acknowledged.extend(batch[:5])
                    number += 5

        writer = threading.Thread(target=asyncio.run, args=(keep_appending(),))
        writer.start()
        try:
            for _ in range(15):
                kill_at_work([*command, "--every", "0", "--keep-tail", "0"], rng.uniform(0, 0.2))
                assert_nothing_is_missing_or_twice(server, directory)
        finally:
            stopping.set()
            writer.join()
        assert counted == len(acknowledged) == len({event.event_id for event in acknowledged})
        turn(server, directory)
        assert_nothing_is_missing_or_twice(server, directory)

        async def read() -> None:
            async with opened(server, directory) as store:
                for user_id in {event.user_id for event in acknowledged}:
                    mine = [event.event_id for event in acknowledged if event.user_id == user_id]
                    assert await ids(store, user_id) == mine
                    await assert_state_is_fold_of_log(store, user_id)

        asyncio.run(read())

    def test_whoever_dies_before_any_change_of_disk_or_redis_leaves_both_right(
        self, any_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At every call in turn; what the one before has left is taken up by the next."""

        async def append(number: int) -> None:
            async with opened(any_server, tmp_path) as store:
                await store.append("main", [click(f"{number}-{n}", f"user{n}") for n in range(3)])

        deaths = count = 0
        while True:
            asyncio.run(append(count))
            with suppress(Died), dying_at(monkeypatch, count):
                turn(any_server, tmp_path)
                break
            deaths += 1
            count += 1
            assert_nothing_is_missing_or_twice(any_server, tmp_path)
        assert deaths > 20
        turn(any_server, tmp_path)
        assert_nothing_is_missing_or_twice(any_server, tmp_path)

        async def read() -> None:
            async with opened(any_server, tmp_path) as store:
                for n in range(3):
                    assert await ids(store, f"user{n}") == [f"{number}-{n}" for number in range(count + 1)]
                    await assert_state_is_fold_of_log(store, f"user{n}")

        asyncio.run(read())
