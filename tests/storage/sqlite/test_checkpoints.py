"""WAL checkpoints: the log stays short and free of erased data, and readers and writers do not block each other."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import storage.sqlite.connections.checkpoints
import storage.sqlite.database
from storage.errors import StorageBusy
from storage.sqlite import corrections
from storage.sqlite.connections.checkpoints import CheckpointThread
from storage.sqlite.connections.open_files import OpenFiles
from storage.sqlite.database import FILE_NAME, Database, connect
from storage.sqlite.store import SQLiteStore
from storage.state.event import Event
from tests.storage.oracles.random_events import click, make_generation
from tests.waiting import PATIENCE_S, until

GENERATION = make_generation()
SECRET = b"SECRET-"


@contextmanager
def reader(directory: Path) -> Iterator[None]:
    """Another program with an open read transaction."""
    with closing(sqlite3.connect(directory / FILE_NAME, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM log").fetchone()
        yield


def secret_events(count: int) -> list[Event]:
    return [click(f"{SECRET.decode()}{n}", "gone", n % 12) for n in range(count)]


def log_bytes(directory: Path) -> int:
    return (directory / f"{FILE_NAME}-wal").stat().st_size


def test_erasing_beside_a_foreign_reader_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.sqlite.database, "BUSY_TIMEOUT_S", PATIENCE_S)

    async def law() -> None:
        store = await SQLiteStore.open(tmp_path, [GENERATION])
        await store.append("main", secret_events(50))
        longest_s = 0.0
        with reader(tmp_path):
            erasing = asyncio.gather(*(store.erase("main", user_id) for user_id in ("gone", "u1", "u2", "u3")))
            number = 0
            while not erasing.done() or number < 20:
                begin_s = time.monotonic()
                await asyncio.gather(
                    store.append("main", [click(f"e{number}", "other")]), store.states("main", ["other"], GENERATION)
                )
                longest_s, number = max(longest_s, time.monotonic() - begin_s), number + 1
            await erasing
            assert await store.events("main", "gone") == []
        assert longest_s < PATIENCE_S / 2

        def is_gone() -> bool:
            return not any(SECRET in path.read_bytes() for path in tmp_path.iterdir())

        await until(is_gone)  # the reader has ended, so its copy goes by itself
        assert [entry.record.entry_id for entry in await store.events("main", "other")][:2] == ["e0", "e1"]
        await store.close()

    asyncio.run(law())


async def test_the_wal_stays_short_under_constant_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short overlapping transactions, so that SQLite's own checkpoints never find a moment without readers."""
    most = 1 << 20
    monkeypatch.setattr(storage.sqlite.connections.checkpoints, "MAX_LOG_BYTES", most)
    monkeypatch.setattr(storage.sqlite.connections.checkpoints, "TURN_S", 0.02)
    ended, turn = threading.Event(), [threading.Event(), threading.Event()]

    def read(number: int) -> None:
        with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as connection:
            while not ended.is_set():
                connection.execute("BEGIN")
                connection.execute("SELECT max(seq) FROM log").fetchone()
                turn[1 - number].set()  # only now may the other one end
                turn[number].wait(0.05)
                turn[number].clear()
                connection.execute("COMMIT")

    store = await SQLiteStore.open(tmp_path, [GENERATION])
    await store.append("main", [click("first")])
    readers = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in readers:
        thread.start()
    try:
        for batch in range(80):  # some 5 kB of log for each of the events
            await store.append("main", [click(f"e{batch}-{n}", f"u{n}") for n in range(100)])
        await until(lambda: log_bytes(tmp_path) <= most)
    finally:
        ended.set()
        for thread in readers:
            thread.join()
    await store.close()


async def test_the_wal_grows_during_a_long_read_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No checkpoint can restart the WAL while a transaction reads earlier content."""
    most = 1 << 20
    monkeypatch.setattr(storage.sqlite.connections.checkpoints, "MAX_LOG_BYTES", most)
    monkeypatch.setattr(storage.sqlite.connections.checkpoints, "TURN_S", 0.02)
    monkeypatch.setattr(storage.sqlite.connections.checkpoints, "WARN_AFTER_TURNS", 2)
    store = await SQLiteStore.open(tmp_path, [GENERATION])
    await store.append("main", [click("first")])
    with reader(tmp_path):
        batch = 0
        while log_bytes(tmp_path) < 3 * most:
            await store.append("main", [click(f"e{batch}-{n}", f"u{n}") for n in range(100)])
            batch += 1
        await until(lambda: "a long read of another program delays emptying" in caplog.text)
        assert log_bytes(tmp_path) >= 3 * most
    await until(lambda: log_bytes(tmp_path) <= most)
    await store.close()


def test_a_request_during_a_checkpoint_waits_for_the_next_one(tmp_path: Path) -> None:
    """Commits just before the request may still be in the WAL afterwards."""
    connection = connect(tmp_path / FILE_NAME)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE any_table (value)")
    files = OpenFiles(tmp_path / FILE_NAME)
    checkpoints = CheckpointThread(connection, files)
    turns: list[str] = []
    requests: list[Future[None]] = []

    def request(statement: str) -> None:
        if statement.endswith("(TRUNCATE)"):
            turns.append(statement)
            if len(turns) == 1:
                requests.append(checkpoints.empty_log())

    connection.set_trace_callback(request)
    checkpoints.empty_log().result(PATIENCE_S)
    requests[0].result(PATIENCE_S)
    assert len(turns) > 1
    checkpoints.close()
    files.close()


class TestErasingInSteps:
    async def test_events_are_refused_only_of_users_being_erased(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(corrections, "ERASED_AT_ONCE", 3)
        store = await SQLiteStore.open(tmp_path, [GENERATION])
        await store.append("main", secret_events(300))
        await store.merge("main", "gone", "visitor")
        erasing = asyncio.ensure_future(store.erase("main", "gone"))
        refused = 0
        while not erasing.done():
            of_erased, of_other = await asyncio.gather(
                store.append("main", [click("x", "gone")]),
                store.append("main", [click(f"e{refused}", "other")]),
                return_exceptions=True,
            )
            assert not isinstance(of_other, BaseException)
            if not isinstance(of_erased, StorageBusy):
                break  # before the first step, or after the last one
            refused += 1
            assert await store.events("main", "gone") == []
            assert await store.states("main", ["gone", "visitor"], GENERATION) == [None, None]
            assert (await store.seen_items("main", "gone")).item_ids == set()
            pages = [entry.record.user_id async for page in store.log() for _, entry in page.entries]
            assert set(pages) == {"other"}
        await erasing
        assert refused
        (result,) = await store.append("main", [click("SECRET-7", "gone")])
        assert not result.duplicate
        await store.append("main", [click("a", "visitor")])
        assert (await store.events("main", "gone"))[-1].record.entry_id == "SECRET-7"
        assert [entry.record.entry_id for entry in await store.events("main", "visitor")] == ["a"]
        await store.close()

    async def test_users_being_erased_cannot_be_merged_or_get_properties(self, tmp_path: Path) -> None:
        store = await SQLiteStore.open(tmp_path, [GENERATION])
        await store.append("main", [click("a", "gone"), click("b", "other")])
        database = Database(tmp_path / FILE_NAME)
        await database.write(lambda db: corrections.begin_erasure(db, "main", "gone"))
        await database.close()
        for change in (
            store.merge("main", "gone", "other"),
            store.merge("main", "other", "gone"),
            store.properties.put_of_user("main", "gone", {"plan": "free"}),
        ):
            with pytest.raises(StorageBusy):
                await change
        assert [entry.record.entry_id for entry in await store.events("main", "other")] == ["b"]
        await store.erase("main", "gone")
        assert await store.merge("main", "gone", "other")
        assert (await store.events("main", "gone"))[0].record.entry_id.endswith("/b")
        await store.close()

    async def test_an_interrupted_erasure_is_completed_at_opening(self, tmp_path: Path) -> None:
        store = await SQLiteStore.open(tmp_path, [GENERATION])
        await store.append("main", [*secret_events(20), click("kept", "other")])
        await store.merge("main", "gone", "visitor")
        await store.close()
        database = Database(tmp_path / FILE_NAME)
        await database.write(lambda db: corrections.begin_erasure(db, "main", "visitor"))
        await database.close()
        store = await SQLiteStore.open(tmp_path, [GENERATION])
        for user_id in ("gone", "visitor"):
            await store.append("main", [click("back", user_id)])
            assert [entry.record.entry_id for entry in await store.events("main", user_id)] == ["back"]
        assert len(await store.events("main", "other")) == 1
        await store.close()
        assert SECRET not in (tmp_path / FILE_NAME).read_bytes()
