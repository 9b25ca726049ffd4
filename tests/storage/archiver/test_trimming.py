"""Trimming of archived entries after errors of the Redis clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from storage.archiver.source import PAGE
from storage.redis.layout.keys import LAYOUT_VERSION, Keyspace
from storage.redis.layout.stream_entries import compact_json
from storage.state.record_encoding import to_json
from tests.storage.archive.archived_redis import turn
from tests.storage.oracles.random_events import click
from tests.storage.redis.servers import RedisServer

HOUR_MS = 3_600_000


@pytest.mark.parametrize("ahead", [1, PAGE + 500, 3 * PAGE])
def test_entries_of_a_clock_ahead_are_trimmed_with_later_ones(server: RedisServer, tmp_path: Path, ahead: int) -> None:
    keys = Keyspace("lisarec", 1)
    server.client.hset(keys.meta, mapping={"layout": LAYOUT_VERSION, "partitions": 1})
    now_ms = time.time_ns() // 1_000_000
    ages_h = [2] * 10 + [-10] * ahead + [2] * (PAGE + 10) + [0] * 5 + [-10] * 5 + [0] * 5
    with server.client.pipeline(transaction=False) as pipe:
        for seq, age_h in enumerate(ages_h, 1):
            entry = compact_json(to_json("main", click(f"e{seq}")))
            pipe.xadd(keys.log(0), {"e": entry}, id=f"{seq}-{now_ms - age_h * HOUR_MS}")
        pipe.execute()
    assert turn(server, tmp_path, keep_tail_s=3600).trimmed == len(ages_h) - 15
    assert turn(server, tmp_path, keep_tail_s=3600).trimmed == 0
    left = [int(entry_id.split(b"-")[0]) for entry_id, _ in server.client.xrange(keys.log(0))]
    assert left == list(range(len(ages_h) - 14, len(ages_h) + 1))
