"""Erasure removes the bytes from the files, not only from responses."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest

import storage.redis.scripts.corrections
from storage.archive.writer import ArchiveWriter
from storage.archiver.archiver import archive_log
from storage.archiver.redis_source import RedisSource
from storage.archiver.sqlite_source import SQLiteSource
from storage.errors import StorageUnavailable
from storage.protocol import UserStore
from storage.redis.scripts.corrections import REWRITTEN_AT_ONCE
from storage.redis.store import RedisStore
from storage.sqlite.store import SQLiteStore
from storage.state.event import Event
from tests.storage.contract.stores import opened
from tests.storage.oracles.random_events import START_US, as_impression, make_generation
from tests.storage.redis.overtaken import BetweenCalls, DyingAfter, OvertakenAt
from tests.storage.redis.servers import RedisServer, expected_servers, new_server
from tests.storage.redis.stores import opened as opened_redis
from tests.waiting import until, wait_until

GENERATION = make_generation()
USERS = [f"person-{number}" for number in range(40)]
GONE = "person-7"
TRACES = (b"person-7:", b"person-7/", b'person-7"', b"SECRET-7-")  # none of them begins the name of anybody else


@pytest.fixture(params=expected_servers())
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = new_server(request.param, "--rdbcompression", "no")
    yield server
    server.stop()


def events_of(user_id: str, count: int = 60) -> list[Event]:
    """Events whose user, ids, recommendation and items can all be searched by their bytes."""
    number = user_id.partition("-")[2]
    events = [
        Event(
            f"SECRET-{number}-{n}:",
            f"{user_id}:",
            f"item{n % 12}",
            "click",
            START_US + n,
            None,
            1.5,
            f"SECRET-{number}-r",
        )
        for n in range(count)
    ]
    return [as_impression(one, ["item1", f"SECRET-{number}-i"]) if n % 10 == 3 else one for n, one in enumerate(events)]


async def fill(store: UserStore) -> None:
    """Interleave users, so that pages split and nodes contain several users."""
    for n in range(60):
        await store.append("main", [events_of(user_id)[n] for user_id in USERS])


def traces(directory: Path) -> dict[str, list[bytes]]:
    """Files with traces of the erased user, and which traces."""
    contents = {str(path): content(path) for path in directory.rglob("*") if path.is_file()}
    assert any(b"person-8" in found for found in contents.values())
    found = {name: [trace for trace in TRACES if trace in found] for name, found in contents.items()}
    return {name: some for name, some in found.items() if some}


def content(path: Path) -> bytes:
    """Content of a file, including its decompressed form."""
    unpacked = repr(pl.read_parquet(path).rows()).encode() if path.suffix == ".parquet" else b""
    return path.read_bytes() + unpacked


def archived_users(directory: Path) -> set[str]:
    with ArchiveWriter.open(directory) as writer:
        tables = [pl.read_parquet(directory / file.path) for file in writer.manifest.files]
    return set(pl.concat(tables)["user_id"])


class TestSQLite:
    def test_database_and_wal_contain_no_byte_of_the_user(self, tmp_path: Path) -> None:
        async def law() -> None:
            store = await SQLiteStore.open(tmp_path, [GENERATION])
            other = await SQLiteStore.open(tmp_path, [GENERATION])
            await fill(store)
            await other.states("main", [f"{GONE}:"], GENERATION)
            assert traces(tmp_path)
            await store.erase("main", f"{GONE}:")
            assert traces(tmp_path) == {}  # also while the file is open
            await fill_rest(store)
            assert traces(tmp_path) == {}
            await store.close()
            await other.close()
            assert traces(tmp_path) == {}

        async def fill_rest(store: UserStore) -> None:
            await store.append("main", [Event("new", f"{user_id}:", "item1", "click", 1, 1) for user_id in USERS[8:]])

        asyncio.run(law())

    def test_an_archived_copy_loses_the_user_in_the_next_round(self, tmp_path: Path) -> None:
        data_dir, directory = tmp_path / "state", tmp_path / "archive"

        def turn() -> int:
            with SQLiteSource.open(data_dir) as log, ArchiveWriter.open(directory) as writer:
                return archive_log(log, writer, datetime.now(UTC), keep_tail_s=0, keep_days=None).archived

        async def law() -> None:
            store = await SQLiteStore.open(data_dir, [GENERATION])
            await fill(store)
            assert turn() == 2400
            await store.erase("main", f"{GONE}:")
            await store.erase("main", f"{USERS[-1]}:")  # whose event is the newest that the archive has
            assert turn() == 0
            assert archived_users(directory) == {f"{user_id}:" for user_id in USERS if user_id != GONE} - {
                f"{USERS[-1]}:"
            }
            assert traces(directory) == {}
            await store.append("main", events_of(GONE, 3))
            assert turn() == 3
            assert turn() == 0
            assert f"{GONE}:" in archived_users(directory)
            await store.close()

        asyncio.run(law())


class TestRedis:
    @pytest.mark.parametrize("keep_tail_s", [0, 3600], ids=["trimmed", "in the tail"])
    def test_dump_append_only_file_and_archive_contain_no_byte_of_the_user(
        self, server: RedisServer, tmp_path: Path, keep_tail_s: int
    ) -> None:
        def turn() -> None:
            with RedisSource.open(server.url) as log, ArchiveWriter.open(tmp_path) as writer:
                now = datetime.now(UTC) + timedelta(seconds=1)
                archive_log(log, writer, now, keep_tail_s=keep_tail_s, keep_days=None)

        async def law() -> None:
            store = await RedisStore.open(server.url, [GENERATION], partitions=2, archive_dir=tmp_path)
            await fill(store)
            turn()
            await store.append(
                "main", [event for user_id in (GONE, "person-8") for event in events_of(user_id, 70)[60:]]
            )
            assert all(traces(directory) for directory in (server.directory, tmp_path))
            assert any(trace in value for value in dumped(server) for trace in TRACES)
            await store.erase("main", f"{GONE}:")
            assert not any(trace in value for value in dumped(server) for trace in TRACES)
            rewrites = server.client.info("stats").get("total_forks", 0)
            turn()
            assert server.client.info("stats").get("total_forks", 1) > rewrites
            assert traces(tmp_path) == {}
            assert archived_users(tmp_path) == {f"{user_id}:" for user_id in USERS if user_id != GONE}
            await rewritten(server)
            assert traces(server.directory) == {}
            server.client.save()
            assert traces(server.directory) == {}
            assert len(await store.events("main", "person-8:", limit=1000)) == 70
            await store.append("main", events_of(GONE, 3))
            turn()
            assert [entry.record for entry in await store.events("main", f"{GONE}:")] == events_of(GONE, 3)
            await store.close()

        asyncio.run(law())


class TestPagesOfRedis:
    """The log of a partition is rewritten in pages, between which other calls run."""

    @pytest.fixture
    def server(self) -> Iterator[RedisServer]:
        server = new_server("redis-server", "--appendfsync", "no")
        yield server
        server.stop()

    def test_commands_copy_at_most_a_page_and_others_interleave(self, server: RedisServer) -> None:
        """Counted by the server, with 4,000 entries of the erased user and of another one."""

        def written() -> int:
            return int(server.client.info("commandstats")["cmdstat_xadd"]["calls"])

        async def law() -> None:
            async with one_partition(server) as store, one_partition(server) as other:
                for user_id in (GONE, "person-8"):
                    for start in range(0, 2000, 500):
                        await store.append("main", events_of(user_id, 2000)[start : start + 500])
                between = [Event(f"new-{n}", "person-9:", "item1", "click", n, n) for n in range(100)]
                counts = [written()]

                async def append_one() -> None:
                    await other.append("main", [between[len(counts) - 1]])
                    counts.append(written())

                with BetweenCalls(store, append_one):
                    await store.erase("main", f"{GONE}:")
                pages = [after - before - 1 for before, after in pairwise(counts)]  # one is what was appended
                assert max(pages) == REWRITTEN_AT_ONCE
                assert sum(pages) >= 4000
                assert len(await store.events("main", "person-8:", limit=10_000)) == 2000
                appended = await store.events("main", "person-9:", limit=10_000)
                assert [entry.record for entry in appended] == between[: len(counts) - 1]
                assert_is_rewritten(server)

        asyncio.run(law())

    @pytest.mark.parametrize("finished_by", ["erasing again", "erasing nobody", "the archiver"])
    def test_an_erasure_interrupted_before_any_step_is_completed_later(
        self, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished_by: str
    ) -> None:
        monkeypatch.setattr(storage.redis.scripts.corrections, "REWRITTEN_AT_ONCE", 7)
        gone, kept = events_of(GONE, 10), events_of("person-8", 10)

        async def finish(store: UserStore, directory: Path) -> None:
            if finished_by == "the archiver":
                await asyncio.to_thread(archive, server, directory, keep_tail_s=3600)
            else:
                await store.erase("main", f"{GONE}:" if finished_by == "erasing again" else "nobody")

        async def law() -> None:
            for step in range(100):
                server.client.flushdb()
                async with one_partition(server) as store:
                    await store.append("main", [one for both in zip(gone, kept, strict=True) for one in both])
                    with DyingAfter(store, step) as died, suppress(StorageUnavailable):
                        await store.erase("main", f"{GONE}:")
                async with one_partition(server) as store:
                    if not await store.events("main", f"{GONE}:"):
                        assert {user_id async for user_id in logged_users(store)} == {"person-8:"}
                        await finish(store, tmp_path / str(step))
                        assert_is_rewritten(server)
                    assert [entry.record for entry in await store.events("main", "person-8:")] == kept
                if not died:
                    assert step > 6
                    return
            raise AssertionError("there is no end to the steps")

        asyncio.run(law())

    def test_appends_trims_and_erasures_between_pages_are_kept(
        self, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(storage.redis.scripts.corrections, "REWRITTEN_AT_ONCE", 7)
        gone, kept, new = events_of(GONE, 10), events_of("person-8", 10), events_of("person-9", 3)
        also_gone = [replace(one, user_id="person-7/") for one in gone]

        async def met(step: int, store: UserStore, other: UserStore, directory: Path) -> bool:
            await store.append("main", [one for some in zip(gone, kept, also_gone, strict=True) for one in some])

            async def meanwhile() -> None:
                await other.append("main", new[:1])
                await asyncio.to_thread(archive, server, directory, keep_tail_s=0)
                await other.append("main", new[1:])
                await other.erase("main", "person-7/")

            with OvertakenAt(store, step, meanwhile) as overtaken:
                await store.erase("main", f"{GONE}:")
            if overtaken:
                await overtaken.end()
                assert_is_rewritten(server)
                assert [entry.record for entry in await other.events("main", "person-9:")] == new
            assert [entry.record for entry in await other.events("main", "person-8:")] == kept
            ids = [int(name.split(b"-")[0]) for name, _ in server.client.xrange("lisarec:{p0}:log")]
            assert ids == list(range(ids[0], int(server.client.get("lisarec:{p0}:seq")) + 1))
            return bool(overtaken)

        async def law() -> None:
            for step in range(100):
                server.client.flushdb()
                directory = tmp_path / str(step)
                async with one_partition(server, directory) as store, one_partition(server, directory) as other:
                    if not await met(step, store, other, directory):
                        assert step > 6
                        return
            raise AssertionError("there is no end to the steps")

        asyncio.run(law())


def one_partition(server: RedisServer, archive_dir: Path | None = None) -> AbstractAsyncContextManager[RedisStore]:
    return opened_redis(server.url, [GENERATION], partitions=1, archive_dir=archive_dir)


async def logged_users(store: UserStore) -> AsyncIterator[str]:
    async for page in store.log():
        for _, entry in page.entries:
            yield entry.record.user_id


def archive(server: RedisServer, directory: Path, *, keep_tail_s: float) -> None:
    with RedisSource.open(server.url) as log, ArchiveWriter.open(directory) as writer:
        now = datetime.now(UTC) + timedelta(seconds=1)
        archive_log(log, writer, now, keep_tail_s=keep_tail_s, keep_days=None)


def assert_is_rewritten(server: RedisServer) -> None:
    """Assert that no trace of the user and no temporary data are left."""
    assert not any(trace in value for value in dumped(server) for trace in TRACES)
    kinds = {key.split(b":")[2] for key in server.client.scan_iter("lisarec:{p0}:*")}
    assert kinds <= {b"seq", b"log", b"head", b"index", b"state"}


@pytest.mark.slow
def test_archived_data_are_erased_after_the_append_only_file_is_rewritten(tmp_path: Path) -> None:
    """Otherwise nothing would trigger the rewrite again."""
    server = new_server("redis-server")

    def turn() -> None:
        with RedisSource.open(server.url) as log, ArchiveWriter.open(tmp_path) as writer:
            archive_log(log, writer, datetime.now(UTC), keep_tail_s=3600, keep_days=None)

    def kill_rewrite() -> None:
        process = Path(f"/proc/{server.process_id}")
        children = process / "task" / process.name / "children"

        def is_server(child: str) -> bool:  # and not the one that passes its log on
            return os.readlink(f"/proc/{child}/exe") == os.readlink(process / "exe")

        (child, *_) = wait_until(lambda: list(filter(is_server, children.read_text().split())))
        os.kill(int(child), signal.SIGKILL)

    async def law() -> None:
        store = await RedisStore.open(server.url, [GENERATION], archive_dir=tmp_path)
        await store.append("main", [*events_of(GONE), *events_of("person-8")])
        await asyncio.to_thread(turn)
        await store.erase("main", f"{GONE}:")
        server.client.config_set("rdb-key-save-delay", 10_000_000)
        killing = asyncio.create_task(asyncio.to_thread(kill_rewrite))
        with pytest.raises(StorageUnavailable, match="failed to rewrite"):
            await asyncio.to_thread(turn)
        await killing
        assert f"{GONE}:" in archived_users(tmp_path)
        server.client.config_set("rdb-key-save-delay", 0)
        await asyncio.to_thread(turn)
        assert archived_users(tmp_path) == {"person-8:"}
        assert traces(server.directory) == {}
        await store.close()

    try:
        asyncio.run(law())
    finally:
        server.stop()


def dumped(server: RedisServer) -> list[bytes]:
    """All keys with their values."""
    return [key + server.client.dump(key) for key in server.client.scan_iter()]


async def rewritten(server: RedisServer) -> None:
    """Wait until the append-only file is rewritten, which only the archiver requests."""

    def is_rewritten() -> bool:
        found = server.client.info("persistence")
        return not found["aof_rewrite_in_progress"] and found["aof_last_rewrite_time_sec"] >= 0

    await until(is_rewritten)


def test_erasing_nobody_keeps_the_log(address: str) -> None:
    async def law() -> None:
        async with opened(address, GENERATION) as store:
            await store.append("main", events_of(GONE, 2))
            await store.erase("main", "nobody")
            await store.append("main", events_of("person-8", 2))
            logged = [entry.record.user_id async for page in store.log() for _, entry in page.entries]
            assert sorted(logged) == [f"{GONE}:"] * 2 + ["person-8:"] * 2

    asyncio.run(law())
