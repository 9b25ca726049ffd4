"""An archive at s3://: each event once, despite kills, concurrent writers and outages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.storage.s3_server import S3Server
from storage.archive.reader import ArchiveReader
from storage.archive.writer import ArchiveWriter
from storage.errors import StorageUnavailable
from storage.folders import object_folder
from storage.folders.object_folder import ObjectFolder
from tests.storage.archive.archived_redis import (
    NOW_MS,
    assert_nothing_is_missing_or_twice,
    move_all,
    opened,
    turn,
    uuid7,
)
from tests.storage.archive.dying import assert_every_death_leaves_both_right, kill_archivers
from tests.storage.archive.entries import place, seqs, some
from tests.storage.oracles.random_events import click
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import GENERATION
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def bucket(s3: Callable[[], str], tmp_path: Path) -> ObjectFolder:
    return ObjectFolder(s3(), tmp_path / "cache")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for the bucket than a request would, for busy machines."""
    for timeout in ("connect_timeout", "timeout"):
        monkeypatch.setitem(object_folder.QUICK, timeout, f"{PATIENCE_S}s")


class TestWriters:
    @pytest.mark.usefixtures("patient")
    def test_an_earlier_writer_is_fenced(self, bucket: ObjectFolder) -> None:
        def overtaken() -> None:
            with ArchiveWriter.open(bucket) as earlier:
                earlier.commit(some(1, 3), place(3))
                with ArchiveWriter.open(bucket) as later:
                    later.commit(some(4, 5), place(5))
                    earlier.commit(some(4, 9), place(9))

        with pytest.raises(StorageUnavailable, match="another process is writing"):
            overtaken()
        archive = ArchiveReader(bucket)
        assert seqs(archive) == [1, 2, 3, 4, 5]
        with ArchiveWriter.open(bucket) as next_one:
            next_one.commit(some(6, 7), place(7))
            names = {name for name in bucket.names() if name.startswith("tenant=")}
            assert names == next_one.manifest.names()  # what the earlier one had written is gone
        assert seqs(archive) == [1, 2, 3, 4, 5, 6, 7]

    @pytest.mark.usefixtures("patient")
    def test_readers_follow_merges_and_delete_stale_copies(self, bucket: ObjectFolder, tmp_path: Path) -> None:
        archive = ArchiveReader(bucket)
        with ArchiveWriter.open(bucket) as writer:
            for seq in range(1, 8):
                writer.commit(some(seq, seq), place(seq))
                assert seqs(archive) == list(range(1, seq + 1))
            writer.compact("9999-12-31")
        assert seqs(archive) == list(range(1, 8))
        copies = [path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()]
        assert sorted(copies) == [".npy", ".parquet"]

    def test_readers_use_their_copies_during_an_outage(
        self, s3_server: S3Server, s3: Callable[[], str], tmp_path: Path
    ) -> None:
        url = s3()
        bucket, elsewhere = ObjectFolder(url, tmp_path / "cache"), ObjectFolder(url, tmp_path / "other")
        archive, other = ArchiveReader(bucket), ArchiveReader(elsewhere)
        with ArchiveWriter.open(bucket) as writer:
            writer.commit(some(1, 3), place(3))
        assert seqs(archive) == [1, 2, 3]
        s3_server.freeze()
        assert seqs(archive) == [1, 2, 3]
        with pytest.raises(StorageUnavailable, match="cannot be read"):
            seqs(other)
        with pytest.raises(StorageUnavailable, match="cannot write to the archive"), ArchiveWriter.open(bucket):
            pass
        s3_server.thaw()
        assert seqs(other) == [1, 2, 3]


class TestArchiver:
    @pytest.mark.usefixtures("patient")
    def test_a_kill_before_any_change_leaves_bucket_and_redis_consistent(
        self, any_server: RedisServer, bucket: ObjectFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert_every_death_leaves_both_right(any_server, bucket, monkeypatch)

    def test_archivers_killed_at_any_time_archive_every_event_once(
        self, any_server: RedisServer, s3: Callable[[], str], tmp_path: Path
    ) -> None:
        """SIGKILL at random times, while events are posted, resent and read by a service."""
        url, rng = s3(), random.Random(7)
        kill_archivers(any_server, ObjectFolder(url, tmp_path / "cache"), url, [rng.uniform(0, 0.4) for _ in range(8)])

    def test_events_are_accepted_during_an_outage_and_archived_later(
        self, any_server: RedisServer, s3_server: S3Server, bucket: ObjectFolder
    ) -> None:
        old = uuid7(NOW_MS)

        async def append(*event_ids: str) -> list[bool]:
            async with opened(any_server, bucket) as store:
                return [answer.duplicate for answer in await store.append("main", [*map(click, event_ids)])]

        asyncio.run(append(old, *(uuid7(NOW_MS, number) for number in range(1, 25))))
        move_all(any_server, bucket)

        async def law() -> None:
            async with opened(any_server, bucket) as store:
                (answer,) = await store.append("main", [click(old)])  # the archive alone can tell
                assert answer.duplicate
                s3_server.freeze()
                answers = await store.append("main", [click(uuid7(NOW_MS + 60_000)), click("e", "new user")])
                assert not any(answer.duplicate for answer in answers)
                assert None not in await store.states("main", ["u", "new user"], GENERATION)
                (answer,) = await store.append("main", [click(old)])  # by the copies
                assert answer.duplicate
                with pytest.raises(StorageUnavailable, match="cannot write to the archive"):
                    await asyncio.to_thread(turn, any_server, bucket)
                s3_server.thaw()
                await until(lambda: asyncio.to_thread(archives, any_server, bucket))

        asyncio.run(law())
        assert_nothing_is_missing_or_twice(any_server, bucket)


def archives(server: RedisServer, bucket: ObjectFolder) -> bool:
    with suppress(StorageUnavailable):
        turn(server, bucket)
        return True
    return False
