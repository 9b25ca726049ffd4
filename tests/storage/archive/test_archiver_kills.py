"""An archiver that is killed anywhere archives every event once."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path

import pytest

from tests.storage.archive.archived_redis import assert_nothing_is_missing_or_twice, opened, turn
from tests.storage.archive.dying import Died, dying_at, kill_archivers
from tests.storage.oracles.random_events import click
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import assert_state_is_fold_of_log, ids

KILLS = 5  # on each kind of server


class TestKilling:
    def test_an_archiver_killed_at_any_time_takes_every_event_once(self, server: RedisServer, tmp_path: Path) -> None:
        """kill -9 at random moments, while events come in, are resent, and are read by a service."""
        kill_archivers(server, tmp_path, str(tmp_path), [random.uniform(0, 0.2) for _ in range(KILLS)])

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
