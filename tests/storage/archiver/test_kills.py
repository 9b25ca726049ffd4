"""Kills of the archiver at any point."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.storage.archive.dying import assert_every_death_leaves_both_right, kill_archivers
from tests.storage.redis.servers import RedisServer

KILLS = 5  # on each kind of server


class TestKilling:
    def test_an_archiver_killed_at_any_time_archives_every_event_once(
        self, server: RedisServer, tmp_path: Path
    ) -> None:
        """SIGKILL at random times, while events are posted, resent and read by a service."""
        kill_archivers(server, tmp_path, str(tmp_path), [random.uniform(0, 0.2) for _ in range(KILLS)])

    def test_a_kill_before_any_change_leaves_disk_and_redis_consistent(
        self, any_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert_every_death_leaves_both_right(any_server, tmp_path, monkeypatch)
