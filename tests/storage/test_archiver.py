"""Moving the log into the archive: archive and tail together are what was acknowledged, each event once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.archive import ArchiveWriter
from storage.archive_reader import ArchiveReader
from storage.archiver import TurnCounts, archive_log
from storage.archiver_redis_source import RedisSource
from storage.archiver_sqlite_source import SQLiteSource
from storage.errors import StorageError, StorageUnavailable
from storage.redis import RedisStore
from storage.redis_layout import Keyspace, trim_arguments
from storage.sqlite import SQLiteStore
from storage.sqlite_database import FILE_NAME
from storage.state_event import Event
from tests.storage.catalogue import click, fresh_user, make_generation
from tests.storage.naive_fold import NaiveUser, assert_state_is, fold
from tests.storage.redis_servers import RedisServer, expected_servers, new_server
from tests.storage.stores import FEW_PARTITIONS

GENERATION = make_generation()
ROOT = Path(__file__).parents[2]
NOW_MS = 1_700_000_000_000


@pytest.fixture(params=expected_servers())
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = new_server(request.param)
    yield server
    server.stop()


@pytest.fixture
def any_server() -> Iterator[RedisServer]:
    server = new_server("redis-server")
    yield server
    server.stop()


@asynccontextmanager
async def opened(server: RedisServer, archive_dir: Path | None, **options: Any) -> AsyncIterator[RedisStore]:
    store = await RedisStore.open(
        server.url, [GENERATION], partitions=FEW_PARTITIONS, archive_dir=archive_dir, **options
    )
    try:
        yield store
    finally:
        await store.close()


def turn(server: RedisServer, directory: Path, *, keep_tail_s: float = 0, **options: Any) -> TurnCounts:
    now = options.pop("now", datetime.now(UTC) + timedelta(seconds=1))
    with RedisSource.open(server.url) as log, ArchiveWriter.open(directory) as writer:
        return archive_log(log, writer, now, keep_tail_s=keep_tail_s, **{"keep_days": None} | options)


def move_all(server: RedisServer, directory: Path, tail: str = "the last entry stays") -> None:
    """Archive and trim everything; further events of other users take the place of what has to stay."""

    async def fill() -> None:
        async with opened(server, directory) as store:
            users = (f"filler{number}" for number in range(1000))
            apart = {Keyspace("lisarec", FEW_PARTITIONS).user("main", user_id).partition: user_id for user_id in users}
            await store.append("main", [click(f"{tail} {time.time_ns()}", user_id) for user_id in apart.values()])

    asyncio.run(fill())
    turn(server, directory)


def uuid7(ms: int, number: int = 0) -> str:
    digits = f"{ms:012x}"
    return f"{digits[:8]}-{digits[8:]}-7{number % 4096:03x}-8000-{number:012x}"


async def ids(store: RedisStore, user_id: str = "u") -> list[str]:
    return [entry.event.event_id for entry in await store.events("main", user_id, limit=10**6)]


async def assert_state_is_fold_of_log(store: RedisStore, user_id: str = "u") -> None:
    log = [entry.event for entry in await store.events("main", user_id, limit=10**6)]
    assert len({event.event_id for event in log}) == len(log)
    assert_state_is((await store.states("main", [user_id], GENERATION))[0], fold(GENERATION, log))


def in_stream(server: RedisServer, partition: int) -> tuple[list[int], int]:
    """The numbers of the entries in the stream, and the newest number there ever was."""
    with server.client.pipeline(transaction=True) as pipe:
        pipe.xrange(Keyspace("lisarec", FEW_PARTITIONS).log(partition))
        pipe.get(f"lisarec:{{p{partition}}}:seq")
        entries, last = pipe.execute()
    return [int(entry_id.split(b"-")[0]) for entry_id, _ in entries], int(last or 0)


def assert_nothing_is_missing_or_twice(server: RedisServer, directory: Path) -> None:
    """Of each partition, the archive and the stream have every entry; the stream all that the archive has not."""
    with ArchiveWriter.open(directory) as writer:
        tables = [pl.read_parquet(directory / file.path) for file in writer.manifest.files]
        taken = pl.concat(tables) if tables else pl.DataFrame({"partition": [], "seq": []})
        for partition in range(FEW_PARTITIONS):
            archived = sorted(taken.filter(partition=partition)["seq"].to_list())
            position = writer.manifest.seq(partition)
            assert archived == list(range(1, position + 1))
            tail, last = in_stream(server, partition)
            assert tail == list(range(last - len(tail) + 1, last + 1))
            assert not tail or tail[0] <= max(position, 1)  # strictly: the newest archived entry is still there


class TestMoving:
    ids_ = st.integers(0, 15).map(lambda number: f"e{number}") | st.tuples(st.integers(0, 3), st.integers(0, 4)).map(
        lambda place: uuid7(NOW_MS + 5_000 * place[0], place[1])
    )

    @given(st.lists(st.lists(st.tuples(ids_, st.integers(0, 5)), min_size=1, max_size=8), max_size=8), st.randoms())
    @settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_a_resend_counts_once_wherever_the_original_is(
        self, any_server: RedisServer, tmp_path: Path, batches: list[list[tuple[str, int]]], rng: random.Random
    ) -> None:
        """UUIDv7 and arbitrary ids, resent with other timestamps, in any order of appending and trimming."""

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
        """Later turns trim older ids; the ones before are looked up all the same."""

        async def append(*event_ids: str) -> list[bool]:
            async with opened(any_server, tmp_path) as store:
                return [answer.duplicate for answer in await store.append("main", [*map(click, event_ids)])]

        asyncio.run(append(late := uuid7(NOW_MS + 9_000)))
        move_all(any_server, tmp_path)
        asyncio.run(append(*(uuid7(NOW_MS, number) for number in range(30))))
        move_all(any_server, tmp_path)
        assert asyncio.run(append(late, uuid7(NOW_MS + 8_000))) == [True, False]

    def test_what_is_archived_leaves_redis_save_the_last_entry(self, server: RedisServer, tmp_path: Path) -> None:
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
                        pages += [entry.event.event_id for entry in page]
                        after = page[-1].seq
                    assert pages == await ids(store, user_id)
                    assert await store.seen_items("main", user_id) == {f"item{n % 12}" for n in range(number, 3000, 50)}
                    await assert_state_is_fold_of_log(store, user_id)

        asyncio.run(read())

    def test_a_state_that_is_gone_is_folded_from_archive_and_tail_and_kept(
        self, any_server: RedisServer, tmp_path: Path
    ) -> None:
        async def law() -> None:
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

        asyncio.run(law())

    def test_trimming_between_reading_and_committing_is_noticed(
        self, any_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The id was in the index when the store looked, and is in the archive when it commits."""

        async def law() -> None:
            async with opened(any_server, tmp_path) as store:
                await store.append("main", [click("contended"), *(click(f"e{n}") for n in range(40))])
                read_folds = store._read_folds

                async def read_and_be_overtaken(parts: Any, serving: Any) -> Any:
                    folds = await read_folds(parts, serving)
                    monkeypatch.undo()
                    await asyncio.to_thread(turn, any_server, tmp_path)
                    return folds

                monkeypatch.setattr(store, "_read_folds", read_and_be_overtaken)
                answers = await store.append("main", [click("contended"), click("new")])
                assert [answer.duplicate for answer in answers] == [True, False]
                await assert_state_is_fold_of_log(store)

        asyncio.run(law())

    def test_trimming_between_asking_the_archive_and_committing_is_noticed(
        self, any_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The id was in the tail when the archive was asked, and is in the archive when the store looks at the tail."""

        async def append(*event_ids: str) -> None:
            async with opened(any_server, tmp_path) as store:
                await store.append("main", [*map(click, event_ids)])

        asyncio.run(append("first"))
        move_all(any_server, tmp_path)
        asyncio.run(append("contended", *(f"e{n}" for n in range(30))))

        async def law() -> None:
            async with opened(any_server, tmp_path) as store:
                ask = store._archive.read

                async def ask_and_be_overtaken(question: Any) -> Any:
                    answer = await ask(question)
                    monkeypatch.undo()
                    await asyncio.to_thread(turn, any_server, tmp_path)
                    return answer

                monkeypatch.setattr(store._archive, "read", ask_and_be_overtaken)
                (answer,) = await store.append("main", [click("contended")])
                assert answer.duplicate
                await assert_state_is_fold_of_log(store)

        asyncio.run(law())

    def test_who_is_erased_and_comes_back_while_the_log_is_trimmed_is_a_new_user(
        self, any_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The archive still has what was erased, until the archiver's next turn."""

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
        monkeypatch.setattr("storage.archiver_redis_source.trim_arguments", overtaken)
        turn(any_server, tmp_path)
        asyncio.run(read())
        turn(any_server, tmp_path)
        asyncio.run(read())


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


def kill_at_work(command: Sequence[str], after_s: float) -> None:
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()  # the first turn is done
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()


class Died(BaseException):
    """Stands for a kill."""


@contextmanager
def dying_at(monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[None]:
    """Die before the call number `count` that changes the disk, or that Redis is sent."""
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
        patch.setattr(os, "fsync", deadly(os.fsync))
        for name in ("rename", "unlink", "mkdir"):
            patch.setattr(Path, name, deadly(getattr(Path, name)))
        patch.setattr(np, "save", deadly(np.save))
        patch.setattr(pl.DataFrame, "write_parquet", deadly(pl.DataFrame.write_parquet))
        patch.setattr(redis.Redis, "execute_command", deadly(redis.Redis.execute_command))
        yield


class TestTheArchiveIsAway:
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
    def test_undecidable_events_are_refused_and_the_others_counted(
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
                    writer.commit([], dict.fromkeys(range(FEW_PARTITIONS), "1-1"))
            case "too slow":
                monkeypatch.setattr("storage.archive_lookups.TIMEOUT_S", 0.2)
                monkeypatch.setattr(ArchiveReader, "read", lambda *_: time.sleep(1))

        async def law() -> None:
            async with opened(archived, directory) as store:
                store._archive._timeout_s = 0.2
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

    def test_others_do_not_wait_for_the_archive(
        self, archived: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = threading.Event()

        def slowly(*_: Any) -> None:
            asked.set()
            time.sleep(1)
            raise StorageUnavailable("the archive fell asleep")

        monkeypatch.setattr(ArchiveReader, "read", slowly)

        async def law() -> None:
            async with opened(archived, tmp_path) as store:
                undecidable = asyncio.ensure_future(store.append("main", [click("arbitrary")]))
                await asyncio.to_thread(asked.wait)
                await store.append("main", [click(self.NEW)])
                assert not undecidable.done()
                with pytest.raises(StorageUnavailable, match="asleep"):
                    await undecidable

        asyncio.run(law())

    def test_one_arbitrary_id_in_a_request_does_not_lose_the_rest(self, archived: RedisServer, tmp_path: Path) -> None:
        async def law() -> None:
            events = [click(f"{n}", f"someone{n % 3}" if n % 4 else "u") for n in range(200)]
            async with opened(archived, tmp_path) as store:
                answers = await asyncio.gather(*(store.append("main", events[n : n + 10]) for n in range(0, 200, 10)))
                assert not any(answer.duplicate for some in answers for answer in some)
                for user_id in ("u", "someone0", "someone1", "someone2"):
                    await assert_state_is_fold_of_log(store, user_id)

        asyncio.run(law())

    def test_an_older_lisarec_cannot_be_started_over_trimmed_data(self, archived: RedisServer) -> None:
        assert archived.client.hget("lisarec:meta", "layout") == b"2"


class TestBelonging:
    def append(self, server: RedisServer, directory: Path | None, *event_ids: str) -> None:
        async def fill() -> None:
            async with opened(server, directory) as store:
                for event_id in event_ids:
                    await store.append("main", [click(event_id)])

        asyncio.run(fill())

    def test_another_archive_is_refused(self, any_server: RedisServer, tmp_path: Path) -> None:
        self.append(any_server, None, "e1", "e2")
        turn(any_server, tmp_path / "one")
        with pytest.raises(StorageError, match="give the archive directory"):
            turn(any_server, tmp_path / "two")
        assert turn(any_server, tmp_path / "one") == TurnCounts()

    def test_a_redis_that_lost_everything_is_not_taken_for_the_old_one(
        self, any_server: RedisServer, tmp_path: Path
    ) -> None:
        self.append(any_server, None, "e1", "e2")
        turn(any_server, tmp_path / "one")
        any_server.client.flushall()
        with pytest.raises(StorageUnavailable, match="key prefix"):
            turn(any_server, tmp_path / "one")
        self.append(any_server, None, "e3", "e4", "e5")
        with pytest.raises(StorageError, match="a new one"):
            turn(any_server, tmp_path / "one")
        assert turn(any_server, tmp_path / "two").archived == 3

    def test_a_redis_that_lost_its_newest_events_is_not_trimmed(self, any_server: RedisServer, tmp_path: Path) -> None:
        """As after a power cut with appendfsync everysec, or from an old back-up: numbers would be used twice."""
        self.append(any_server, None, "e1", "e2")
        before = {key: any_server.client.dump(key) for key in any_server.client.keys("*{p*")}
        self.append(any_server, None, "e3", "e4")
        turn(any_server, tmp_path, keep_tail_s=3600)
        any_server.client.delete(*any_server.client.keys("*{p*"))
        for key, value in before.items():
            any_server.client.restore(key, 0, value)
        with pytest.raises(StorageError, match="Redis has lost events"):
            turn(any_server, tmp_path)
        time.sleep(0.01)
        self.append(any_server, None, "f3", "f4", "f5")
        with pytest.raises(StorageError, match="Redis has lost events"):
            turn(any_server, tmp_path)
        (log,) = any_server.client.keys("*:log")
        assert any_server.client.xlen(log) == 5

    def test_a_prefix_without_events_is_named(self, any_server: RedisServer, tmp_path: Path) -> None:
        with pytest.raises(StorageUnavailable, match="key prefix 'lisarec'"):
            turn(any_server, tmp_path)


class TestRetention:
    def test_dropped_events_are_forgotten_and_nothing_breaks(self, any_server: RedisServer, tmp_path: Path) -> None:
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


class TestSQLite:
    def fill(self, data_dir: Path, events: Sequence[Event], tenant: str = "main") -> None:
        async def law() -> None:
            store = await SQLiteStore.open(data_dir, [GENERATION])
            await store.append(tenant, events)
            await store.close()

        asyncio.run(law())

    def turn(self, data_dir: Path, directory: Path) -> TurnCounts:
        with SQLiteSource.open(data_dir) as log, ArchiveWriter.open(directory) as writer:
            return archive_log(log, writer, datetime.now(UTC), keep_tail_s=0, keep_days=None)

    def read(self, directory: Path, tenant: str = "main") -> list[Event]:
        found = ArchiveReader(directory).read(lambda snapshot: snapshot.entries(tenant, "u"))
        return [entry.event for entry in found]

    def test_the_table_is_copied_each_event_once(self, tmp_path: Path) -> None:
        data_dir, directory = tmp_path / "state", tmp_path / "archive"
        events = [click(f"e{n}", item=n % 12) for n in range(2500)]
        self.fill(data_dir, events[:2400])
        assert self.turn(data_dir, directory) == TurnCounts(archived=2400)
        assert self.turn(data_dir, directory) == TurnCounts()
        self.fill(data_dir, events[2300:])
        self.fill(data_dir, [click("e1", item=2)], tenant="shop")
        assert self.turn(data_dir, directory) == TurnCounts(archived=101)
        assert self.read(directory) == events
        assert self.read(directory, "shop") == [click("e1", item=2)]

    def test_another_file_is_refused(self, tmp_path: Path) -> None:
        for number in (1, 2):
            self.fill(tmp_path / f"state{number}", [click(f"e{n}-{number}") for n in range(5)])
        self.turn(tmp_path / "state1", tmp_path / "archive")
        with pytest.raises(StorageError, match="another SQLite file"):
            self.turn(tmp_path / "state2", tmp_path / "archive")

    def test_a_directory_without_a_store_is_named_and_not_made(self, tmp_path: Path) -> None:
        with pytest.raises(StorageUnavailable, match="--data-dir"):
            self.turn(tmp_path, tmp_path / "archive")
        assert not (tmp_path / FILE_NAME).exists()
