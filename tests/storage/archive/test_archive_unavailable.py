"""An unreadable archive: only events that need it are refused; and recovery from a full disk."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest

from storage.archive.reader import ArchiveReader
from storage.archive.writer import ArchiveWriter
from storage.errors import StorageUnavailable
from storage.folders.local_folder import LocalFolder
from storage.redis.layout.keys import LAYOUT_VERSION
from storage.redis.session import archived_positions
from storage.state.event import Event
from tests.storage.archive.archived_redis import NOW_MS, in_stream, move_all, opened, turn, uuid7
from tests.storage.contract.stores import FEW_PARTITIONS
from tests.storage.oracles.random_events import click
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import GENERATION, assert_state_is_fold_of_log, ids, poll_until, until_applied
from tests.waiting import PATIENCE_S


class TestUnavailableArchive:
    OLD, NEW = uuid7(NOW_MS), uuid7(NOW_MS + 60_000)
    LOGGED = (OLD, "arbitrary", *(uuid7(NOW_MS, number) for number in range(1, 25)))  # more than the ring of a state

    @pytest.fixture
    def archived(self, any_server: RedisServer, tmp_path: Path) -> RedisServer:
        async def fill() -> None:
            async with opened(any_server, tmp_path) as store:
                await store.append("main", [*map(click, self.LOGGED), click("e", "v")])

        asyncio.run(fill())
        move_all(any_server, tmp_path)
        return any_server

    def events_that_only_the_archive_can_decide(self) -> list[Event]:
        return [click(self.OLD), click("arbitrary"), click("never sent before")]

    @pytest.mark.parametrize("how", ["none given", "gone", "another", "older", "too slow"])
    def test_only_events_that_need_the_archive_are_refused(
        self, archived: RedisServer, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory: Path | None = tmp_path
        match how:
            case "none given":
                directory = None
            case "gone":
                directory = tmp_path / "gone"
            case "another":
                directory = tmp_path / "another"
                with ArchiveWriter.open(directory):
                    pass
            case "older":
                directory = tmp_path / "older"
                with ArchiveWriter.open(directory) as writer, ArchiveWriter.open(tmp_path) as whole:
                    writer.manifest = replace(writer.manifest, archive_id=whole.manifest.archive_id)
                    writer.commit([], dict.fromkeys(range(FEW_PARTITIONS), "0-0"))
            case "too slow":
                monkeypatch.setattr(ArchiveReader, "read", lambda *_: time.sleep(1))

        async def law() -> None:
            async with opened(archived, directory, archive_timeout_s=0.2) as store:
                for event in self.events_that_only_the_archive_can_decide():
                    with pytest.raises(StorageUnavailable, match="archive"):
                        await store.append("main", [event])
                answers = await store.append("main", [click(self.NEW), click("e", "new user")])
                assert not any(answer.duplicate for answer in answers)
                (answer,) = await store.append("main", [click(self.NEW)])
                assert answer.duplicate
                assert None not in await store.states("main", ["u", "v", "new user"], GENERATION)
                with pytest.raises(StorageUnavailable, match="archive"):
                    await ids(store)

        asyncio.run(law())
        monkeypatch.undo()

        async def healed() -> None:
            async with opened(archived, tmp_path) as store:
                answers = await store.append("main", self.events_that_only_the_archive_can_decide())
                assert [answer.duplicate for answer in answers] == [True, True, False]
                assert await ids(store) == [*self.LOGGED, self.NEW, "never sent before"]
                await assert_state_is_fold_of_log(store)

        asyncio.run(healed())

    def test_other_users_do_not_wait_for_the_archive(
        self, archived: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked, may_answer = threading.Event(), threading.Event()

        def slowly(*_: Any) -> None:
            asked.set()
            assert may_answer.wait(PATIENCE_S)
            raise StorageUnavailable("the archive fell asleep")

        monkeypatch.setattr(ArchiveReader, "read", slowly)

        async def law() -> None:
            async with opened(archived, tmp_path, archive_timeout_s=PATIENCE_S) as store:
                undecidable = asyncio.ensure_future(store.append("main", [click("arbitrary")]))
                await asyncio.to_thread(asked.wait)
                await store.append("main", [click(self.NEW)])
                assert not undecidable.done()
                may_answer.set()
                with pytest.raises(StorageUnavailable, match="asleep"):
                    await undecidable

        asyncio.run(law())

    def test_one_undecidable_id_does_not_refuse_the_rest_of_a_request(
        self, archived: RedisServer, tmp_path: Path
    ) -> None:
        async def law() -> None:
            events = [click(f"{n}", f"someone{n % 3}" if n % 4 else "u") for n in range(200)]
            async with opened(archived, tmp_path) as store:
                answers = await asyncio.gather(*(store.append("main", events[n : n + 10]) for n in range(0, 200, 10)))
                assert not any(answer.duplicate for some in answers for answer in some)
                for user_id in ("u", "someone0", "someone1", "someone2"):
                    await assert_state_is_fold_of_log(store, user_id)

        asyncio.run(law())

    def test_earlier_versions_refuse_trimmed_data(self, archived: RedisServer) -> None:
        """Versions with layouts 1 to 3 know no archive."""
        layout = archived.client.hget("lisarec:meta", "layout")
        assert int(str(layout, "ascii")) == LAYOUT_VERSION > 3


def take_archive_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the archive unavailable until the patch is undone."""

    def fail(*_: Any) -> None:
        raise StorageUnavailable("the archive is away", "archive")

    monkeypatch.setattr(archived_positions, "ASK_AGAIN_AFTER_S", 0.05)
    monkeypatch.setattr(ArchiveReader, "read", fail)


class TestServiceStart:
    """Redis and the services stopped together; the archive is unavailable to the first service that starts."""

    def test_an_older_redis_is_detected_once_the_archive_responds(
        self, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = tmp_path / "archive"

        async def law() -> None:
            async with opened(server, directory) as store:
                await store.append("main", [click("1")])
                older = server.copy_data(tmp_path / "older")
                await store.append("main", [click("2")])
            turn(server, directory)
            server.restart_with(older)
            take_archive_away(monkeypatch)
            async with opened(server, directory) as store:
                await store.append("main", [click("an outage of the archive stops nobody")])
                monkeypatch.undo()
                await poll_until(store, lambda: store.failure is not None)
                with pytest.raises(StorageUnavailable, match="has lost acknowledged events"):
                    await store.append("main", [click("3")])

        asyncio.run(law())

    @pytest.mark.parametrize("is_new", [True, False], ids=["new", "lost"])
    def test_an_empty_redis_accepts_nothing_until_the_archive_responds(
        self, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
    ) -> None:
        async def law() -> None:
            if not is_new:
                async with opened(server, tmp_path) as store:
                    await store.append("main", [click("1")])
                turn(server, tmp_path)
                server.restart_with(None)
            take_archive_away(monkeypatch)
            async with opened(server, tmp_path) as store:
                with pytest.raises(StorageUnavailable, match="until the archive is reachable"):
                    await store.append("main", [click("2")])
                with pytest.raises(StorageUnavailable, match="until the archive is reachable"):
                    await store.secret()
                assert store.failure is None  # it passes by itself, and popular items flow meanwhile
                monkeypatch.undo()
                if is_new:
                    await until_applied(store, [click("2")])
                    assert await store.secret()
                else:
                    await poll_until(store, lambda: "has lost acknowledged events" in str(store.failure))
                    with pytest.raises(StorageUnavailable, match="has lost acknowledged events"):
                        await store.secret()

        asyncio.run(law())


class TestFullDisk:
    def test_dropping_old_days_makes_room(
        self, any_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        append(any_server, tmp_path, "1", "2", "3")
        turn(any_server, tmp_path)
        old, add = list(tmp_path.rglob("*.parquet")), LocalFolder.add

        def add_if_there_is_room(folder: LocalFolder, name: str, data: bytes) -> None:
            if name.startswith("tenant=") and any(path.exists() for path in old):
                raise OSError(ENOSPC, "the disk is full")
            add(folder, name, data)

        monkeypatch.setattr(LocalFolder, "add", add_if_there_is_room)
        append(any_server, tmp_path, "new")
        done = turn(any_server, tmp_path, now=datetime.now(UTC) + timedelta(days=10), keep_days=9)
        assert (done.archived, done.dropped) == (1, 3)

    def test_the_log_is_trimmed_even_if_files_cannot_be_merged(
        self, any_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        append(any_server, tmp_path, "1", "2", "3")
        turn(any_server, tmp_path)
        append(any_server, tmp_path, "a", "b", "c")

        def fail(*_: object, **__: object) -> None:
            raise OSError(ENOSPC, "the disk is full")

        monkeypatch.setattr(ArchiveWriter, "_merge", fail)
        with pytest.raises(StorageUnavailable, match="the disk is full"):
            turn(any_server, tmp_path)
        assert all(len(in_stream(any_server, partition)[0]) <= 1 for partition in range(FEW_PARTITIONS))


def append(server: RedisServer, directory: Path, *event_ids: str) -> None:
    async def law() -> None:
        async with opened(server, directory) as store:
            await store.append("main", [*map(click, event_ids)])

    asyncio.run(law())
