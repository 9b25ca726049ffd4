"""Moving the log into the archive: archive and tail together contain each acknowledged event once."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.archive.async_reader import AsyncArchiveReader
from storage.archive.writer import ArchiveWriter
from storage.archiver.archiver import TurnCounts
from storage.archiver.redis_source import RedisSource, trim_arguments
from storage.archiver.source import EntryPage
from storage.errors import StorageError, StorageUnavailable, UnknownEvent
from storage.redis.scripts.events import COMMIT
from storage.state.event import Event
from tests.storage.archive.archived_redis import (
    NOW_MS,
    assert_nothing_is_missing_or_twice,
    in_stream,
    move_all,
    opened,
    turn,
    uuid7,
)
from tests.storage.contract.stores import FEW_PARTITIONS
from tests.storage.oracles.naive_fold import NaiveUser, assert_state_is
from tests.storage.oracles.random_events import click, fresh_user
from tests.storage.redis.overtaken import overtake
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import GENERATION, assert_state_is_fold_of_log, ids, refusal, until_applied
from tests.waiting import wait_until


class TestMoving:
    ids_ = st.integers(0, 15).map(lambda number: f"e{number}") | st.tuples(st.integers(0, 3), st.integers(0, 4)).map(
        lambda place: uuid7(NOW_MS + 5_000 * place[0], place[1])
    )

    @given(st.lists(st.lists(st.tuples(ids_, st.integers(0, 5)), min_size=1, max_size=8), max_size=8), st.randoms())
    @settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_a_resend_counts_once_whether_archived_or_not(
        self, any_server: RedisServer, tmp_path: Path, batches: list[list[tuple[str, int]]], rng: random.Random
    ) -> None:
        """UUIDv7 and arbitrary ids, resent with other timestamps, in any order of appends and trims."""

        async def law() -> None:
            user_id, naive = fresh_user(), NaiveUser(GENERATION)
            async with opened(any_server, tmp_path / "archive") as store:
                for batch in batches:
                    events = [click(event_id, user_id, 1, NOW_MS * 1000 + seconds) for event_id, seconds in batch]
                    expected = [naive.receive(event)[0] for event in events]
                    answers = await store.append("main", events)
                    assert [answer.duplicate for answer in answers] == expected
                    if rng.random() < 0.7:
                        await asyncio.to_thread(turn, any_server, tmp_path / "archive")
                        if rng.random() < 0.5:
                            any_server.client.delete(*any_server.client.keys("*:state:*") or ["none"])
                assert_state_is((await store.states("main", [user_id], GENERATION))[0], naive)
                await assert_state_is_fold_of_log(store, user_id)

        asyncio.run(law())

    def test_the_newest_time_of_a_trimmed_id_stays_known(self, any_server: RedisServer, tmp_path: Path) -> None:
        """Later rounds trim older ids, which are still looked up."""

        async def append(*event_ids: str) -> list[bool]:
            async with opened(any_server, tmp_path) as store:
                return [answer.duplicate for answer in await store.append("main", [*map(click, event_ids)])]

        asyncio.run(append(late := uuid7(NOW_MS + 9_000)))
        move_all(any_server, tmp_path)
        asyncio.run(append(*(uuid7(NOW_MS, number) for number in range(30))))
        move_all(any_server, tmp_path)
        assert asyncio.run(append(late, uuid7(NOW_MS + 8_000))) == [True, False]

    def test_archived_entries_leave_redis_except_the_last(self, server: RedisServer, tmp_path: Path) -> None:
        async def fill() -> None:
            async with opened(server, tmp_path) as store:
                for start in range(0, 3000, 500):
                    numbers = range(start, start + 500)
                    await store.append("main", [click(f"e{n}", f"user{n % 50}", n % 12) for n in numbers])

        asyncio.run(fill())
        assert turn(server, tmp_path, keep_tail_s=3600) == TurnCounts(archived=3000)
        assert sum(len(in_stream(server, partition)[0]) for partition in range(FEW_PARTITIONS)) == 3000
        assert turn(server, tmp_path) == TurnCounts(trimmed=3000 - FEW_PARTITIONS)
        assert turn(server, tmp_path) == TurnCounts()
        assert_nothing_is_missing_or_twice(server, tmp_path)
        assert sum(server.client.zcard(key) for key in server.client.scan_iter("*:index:*")) == FEW_PARTITIONS

        async def read() -> None:
            async with opened(server, tmp_path) as store:
                for number in range(0, 50, 7):
                    user_id = f"user{number}"
                    assert await ids(store, user_id) == [f"e{n}" for n in range(number, 3000, 50)]
                    pages, after = [], 0
                    while page := await store.events("main", user_id, after=after, limit=7):
                        pages += [entry.record.entry_id for entry in page]
                        after = page[-1].seq
                    assert pages == await ids(store, user_id)
                    assert (await store.seen_items("main", user_id)).item_ids == {
                        f"item{n % 12}" for n in range(number, 3000, 50)
                    }
                    await assert_state_is_fold_of_log(store, user_id)

        asyncio.run(read())

    async def test_a_missing_state_is_folded_from_archive_and_tail(
        self, any_server: RedisServer, tmp_path: Path
    ) -> None:
        async with opened(any_server, tmp_path) as store:
            await store.append("main", [click(f"e{n}", item=n % 12) for n in range(700)])
        await asyncio.to_thread(move_all, any_server, tmp_path)
        async with opened(any_server, tmp_path) as store:
            for tail in (0, 3):
                await store.append("main", [click(f"tail{n}") for n in range(tail)])
                (key,) = any_server.client.keys("*:state:*/u")
                any_server.client.delete(key)
                await assert_state_is_fold_of_log(store)
                assert any_server.client.exists(key)
                assert len(await ids(store)) == 700 + tail
            any_server.client.delete(key)
            (answer,) = await store.append("main", [click("e5")])  # folds, then asks for the id
            assert answer.duplicate
            await assert_state_is_fold_of_log(store)

    async def test_trimming_between_read_and_commit_is_detected(
        self, any_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The id was in the index at the read, and is in the archive at the commit."""
        async with opened(any_server, tmp_path) as store:
            await store.append("main", [click("contended"), *(click(f"e{n}") for n in range(40))])
            overtake(monkeypatch, COMMIT.sha, lambda: asyncio.to_thread(turn, any_server, tmp_path))
            answers = await store.append("main", [click("contended"), click("new")])
            assert [answer.duplicate for answer in answers] == [True, False]
            await assert_state_is_fold_of_log(store)

    async def test_trimming_between_head_and_index_reads_is_detected(
        self, any_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The head read by an undo is from before the archive, and then the id leaves the index."""
        async with opened(any_server, tmp_path) as store:
            await store.append("main", [click("undone"), *(click(f"e{n}") for n in range(40))])
            overtake(monkeypatch, "ZMSCORE", lambda: asyncio.to_thread(turn, any_server, tmp_path))
            assert await store.undo("main", "u", "undone")
            assert not await store.undo("main", "u", "undone")
            with pytest.raises(UnknownEvent):
                await store.undo("main", "u", "unknown")

    def test_trimming_between_archive_lookup_and_commit_is_detected(
        self, any_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The id was in the tail at the lookup, and is in the archive when the store reads the tail."""

        async def append(*event_ids: str) -> None:
            async with opened(any_server, tmp_path) as store:
                await store.append("main", [*map(click, event_ids)])

        asyncio.run(append("first"))
        move_all(any_server, tmp_path)
        asyncio.run(append("contended", *(f"e{n}" for n in range(30))))

        async def law() -> None:
            async with opened(any_server, tmp_path) as store:
                ask = AsyncArchiveReader.read

                async def ask_and_be_overtaken(reader: AsyncArchiveReader, question: Any, *timeout_s: Any) -> Any:
                    answer = await ask(reader, question, *timeout_s)
                    if timeout_s:  # the server is examined
                        return answer
                    monkeypatch.undo()
                    await asyncio.to_thread(turn, any_server, tmp_path)
                    return answer

                monkeypatch.setattr(AsyncArchiveReader, "read", ask_and_be_overtaken)
                (answer,) = await store.append("main", [click("contended")])
                assert answer.duplicate
                await assert_state_is_fold_of_log(store)

        asyncio.run(law())

    def test_a_user_erased_during_trimming_returns_as_a_new_one(
        self, any_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The archive keeps erased data until the next round."""

        async def fill() -> None:
            async with opened(any_server, tmp_path) as store:
                await store.append("main", [click(f"old{n}") for n in range(5)])

        async def erase_and_come_back() -> None:
            async with opened(any_server, tmp_path) as store:
                await store.erase("main", "u")
                await store.append("main", [click("old1"), click("new")])

        def overtaken(*args: Any) -> Any:
            monkeypatch.undo()
            back = threading.Thread(target=asyncio.run, args=(erase_and_come_back(),))
            back.start()
            back.join()
            return trim_arguments(*args)

        async def read() -> None:
            async with opened(any_server, tmp_path) as store:
                assert await ids(store) == ["old1", "new"]
                await assert_state_is_fold_of_log(store)

        asyncio.run(fill())
        monkeypatch.setattr("storage.archiver.redis_source.trim_arguments", overtaken)
        turn(any_server, tmp_path)
        asyncio.run(read())
        turn(any_server, tmp_path)
        asyncio.run(read())


class TestMatchingArchive:
    def append(self, server: RedisServer, directory: Path | None, *event_ids: str) -> None:
        async def fill() -> None:
            async with opened(server, directory) as store:
                for event_id in event_ids:
                    await store.append("main", [click(event_id)])

        asyncio.run(fill())

    def test_a_different_archive_is_refused(self, any_server: RedisServer, tmp_path: Path) -> None:
        self.append(any_server, None, "e1", "e2")
        turn(any_server, tmp_path / "one")
        with pytest.raises(StorageError, match="pass the archive directory"):
            turn(any_server, tmp_path / "two")
        assert turn(any_server, tmp_path / "one") == TurnCounts()

    def test_an_emptied_redis_is_refused(self, any_server: RedisServer, tmp_path: Path) -> None:
        self.append(any_server, None, "e1", "e2")
        turn(any_server, tmp_path / "one")
        any_server.client.flushall()
        with pytest.raises(StorageUnavailable, match="key prefix"):
            turn(any_server, tmp_path / "one")
        self.append(any_server, None, "e3", "e4", "e5")
        with pytest.raises(StorageError, match="a new one"):
            turn(any_server, tmp_path / "one")
        assert turn(any_server, tmp_path / "two").archived == 3

    def test_a_redis_with_lost_events_is_not_trimmed(self, any_server: RedisServer, tmp_path: Path) -> None:
        """As after a power cut with appendfsync everysec, or from an old backup: numbers would be reused."""
        self.append(any_server, None, "e1", "e2")
        before = {key: any_server.client.dump(key) for key in any_server.client.keys("*{p*")}
        self.append(any_server, None, "e3", "e4")
        turn(any_server, tmp_path, keep_tail_s=3600)
        any_server.client.delete(*any_server.client.keys("*{p*"))
        for key, value in before.items():
            any_server.client.restore(key, 0, value)
        with pytest.raises(StorageError, match="Redis has lost events"):
            turn(any_server, tmp_path)
        with pytest.raises(StorageUnavailable, match="has lost acknowledged events"):
            self.append(any_server, None, "f3", "f4", "f5")
        noted = [field for field in any_server.client.hkeys("lisarec:meta") if field.startswith((b"newest:", b"lost"))]
        any_server.client.hdel("lisarec:meta", *noted)  # as in an older copy of all of Redis
        time.sleep(0.01)
        self.append(any_server, None, "f3", "f4", "f5")
        with pytest.raises(StorageError, match="Redis has lost events"):
            turn(any_server, tmp_path)
        (log,) = any_server.client.keys("*:log")
        assert any_server.client.xlen(log) == 5

    async def test_entries_logged_on_older_files_are_not_archived(self, server: RedisServer, tmp_path: Path) -> None:
        """They have the numbers of entries that return with the data."""
        directory = tmp_path / "archive"
        async with opened(server, directory) as store:
            await store.append("main", [click("1")])
            await asyncio.to_thread(turn, server, directory)
            older = server.copy_data(tmp_path / "older")
            await store.append("main", [click("2")])
            newer = server.copy_data(tmp_path / "newer")
            server.restart_with(older)
            async with opened(server, directory) as forgetful:
                await forgetful.append("main", [click("3")])
            assert "has lost acknowledged events" in await refusal(store, "u")
            with pytest.raises(StorageUnavailable, match="accept-loss"):
                await asyncio.to_thread(turn, server, directory)
            server.restart_with(newer)
            assert (await asyncio.to_thread(turn, server, directory)).archived == 1
            await until_applied(store, [click("3")])
            assert await ids(store) == ["1", "2", "3"]

    def test_entries_lost_during_reading_are_not_archived(
        self, any_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As after a failover to a lagging replica, which reuses these numbers."""
        self.append(any_server, None, "e1", "e2")
        turn(any_server, tmp_path, keep_tail_s=3600)
        before = {key: any_server.client.dump(key) for key in any_server.client.keys("*{p*")}
        self.append(any_server, None, "e3", "e4")
        read = RedisSource.entries

        def read_and_lose(source: RedisSource, position_of: Callable[[int], str | None]) -> Iterator[EntryPage]:
            yield from read(source, position_of)
            for key, value in before.items():
                any_server.client.restore(key, 0, value, replace=True)

        with monkeypatch.context() as patched:
            patched.setattr(RedisSource, "entries", read_and_lose)
            with pytest.raises(StorageError, match="since it was read"):
                turn(any_server, tmp_path)
        noted = [field for field in any_server.client.hkeys("lisarec:meta") if field.startswith((b"newest:", b"lost"))]
        any_server.client.hdel("lisarec:meta", *noted)  # services that do not know of them
        self.append(any_server, None, "f3", "f4", "f5")
        assert turn(any_server, tmp_path).archived == 3

    def test_an_unused_prefix_is_reported(self, any_server: RedisServer, tmp_path: Path) -> None:
        with pytest.raises(StorageUnavailable, match="key prefix 'lisarec'"):
            turn(any_server, tmp_path)


class TestRetention:
    def test_dropped_events_are_forgotten(self, any_server: RedisServer, tmp_path: Path) -> None:
        old = click(uuid7(NOW_MS), item=3)

        async def fill(*events: Event) -> None:
            async with opened(any_server, tmp_path) as store:
                await store.append("main", events)

        asyncio.run(fill(old, click("arbitrary", item=4)))
        move_all(any_server, tmp_path)
        in_ten_days = datetime.now(UTC) + timedelta(days=10)
        assert turn(any_server, tmp_path, now=in_ten_days, keep_days=11).dropped == 0
        assert turn(any_server, tmp_path, now=in_ten_days, keep_days=9).dropped >= 2

        async def law() -> None:
            async with opened(any_server, tmp_path) as store:
                assert await ids(store) == []
                (value,) = await store.states("main", ["u"], GENERATION)
                assert value is not None
                assert GENERATION.decode(value)["event_count"] == 2  # a state outlives what it was folded from
                any_server.client.delete(*any_server.client.keys("*:state:*"))
                await store.append("main", [click("after", item=5)])
                assert await ids(store) == ["after"]
                await assert_state_is_fold_of_log(store)

        asyncio.run(law())

    @pytest.mark.parametrize("is_killed", [False, True])
    def test_dropped_events_leave_the_append_only_file(
        self, server: RedisServer, tmp_path: Path, is_killed: bool
    ) -> None:
        """Even if the archiver was killed after dropping them, or the server did not rewrite its file."""

        async def fill() -> None:
            async with opened(server, tmp_path) as store:
                await store.append("main", [click("dropped"), *(click(f"e{number}") for number in range(300))])

        def is_there() -> bool:
            with suppress(FileNotFoundError):  # the previous file, which Redis removes after a rewrite
                return any(b"dropped" in path.read_bytes() for path in server.directory.rglob("*.*") if path.is_file())
            return True

        asyncio.run(fill())
        move_all(server, tmp_path)
        assert is_there()
        in_ten_days = datetime.now(UTC) + timedelta(days=10)
        if is_killed:
            with ArchiveWriter.open(tmp_path) as writer:
                assert writer.drop_before(f"{in_ten_days:%Y-%m-%d}")
        assert bool(turn(server, tmp_path, now=in_ten_days, keep_days=9).dropped) != is_killed
        with ArchiveWriter.open(tmp_path) as writer:
            assert not writer.manifest.must_scrub
        wait_until(lambda: not is_there())

    def test_events_of_a_clock_behind_have_the_full_retention(self, any_server: RedisServer, tmp_path: Path) -> None:
        """The clock of Redis is 20 days behind the archiver's."""

        async def fill() -> None:
            async with opened(any_server, tmp_path) as store:
                await store.append("main", [click("e", f"user-{number}") for number in range(20)])

        def dropped(days: int) -> int:
            return turn(any_server, tmp_path, now=now + timedelta(days=days), keep_days=9).dropped

        asyncio.run(fill())
        now = datetime.now(UTC) + timedelta(days=20)
        assert [dropped(days) for days in (0, 1, 9, 10)] == [0, 0, 0, 20]
