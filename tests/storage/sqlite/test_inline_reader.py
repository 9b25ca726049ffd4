"""Reads on the event loop: equal to those of reader threads, or left to them."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from storage.sqlite import database as sqlite_database
from storage.sqlite.connections.open_files import OpenFiles
from storage.sqlite.database import FILE_NAME, REFUSED_AFTER_SLOW, SLOW_READ_S, Database, InlineReader, connect
from storage.sqlite.states import SHORT_LOG
from storage.sqlite.store import SQLiteStore
from storage.state.corrections import EventFilter
from tests.storage.oracles.random_events import click, make_generation, make_newer

GENERATION = make_generation()
USERS = [f"u{number}" for number in range(80)]


def one(db: sqlite3.Connection) -> int:
    (number,) = db.execute("SELECT 1").fetchone()
    return int(number)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / FILE_NAME)
    yield database
    asyncio.run(database.close())


@pytest.fixture
def reader(database: Database, tmp_path: Path) -> Iterator[InlineReader]:
    files = OpenFiles(tmp_path / FILE_NAME)
    reader = InlineReader(connect(tmp_path / FILE_NAME), files)
    yield reader
    reader.close()
    files.close()


async def test_states_read_on_the_loop_equal_those_of_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users with and without a log, merged ones, and ones with entries missing in the generation."""

    monkeypatch.setattr(sqlite_database, "SLOW_READ_S", inf)  # on a busy machine any read may take long

    here, read_by_thread = threading.get_ident(), Database.read

    def read(database: Database, query: Callable[[sqlite3.Connection], Any]) -> asyncio.Future[Any]:
        assert threading.get_ident() != here  # services of other tests, which have loops of their own, may call it
        return read_by_thread(database, query)

    store = await SQLiteStore.open(tmp_path, [GENERATION])
    for number, user in enumerate(USERS[:60]):
        await store.append("main", [click(f"{user}-{place}", user) for place in range(1 + number % 3)])
    await store.merge("main", USERS[0], USERS[1])
    newer = make_newer()
    for generation in (GENERATION, newer):
        with patch.object(Database, "read_now", return_value=None):
            by_threads = await store.states("main", [*USERS, USERS[3]], generation)
        with patch.object(Database, "read", read):  # states are complete now
            assert await store.states("main", [*USERS, USERS[3]], generation) == by_threads
    store.serve_generations([newer])
    await store.append("main", [click("behind", USERS[5])])
    (value,) = await store.states("main", [USERS[5]], GENERATION)
    with patch.object(Database, "read_now", return_value=None):
        assert await store.states("main", [USERS[5]], GENERATION) == [value]
    await store.close()


@pytest.mark.parametrize("length", [0, 1, SHORT_LOG, SHORT_LOG + 1])
async def test_logs_read_on_the_loop_equal_those_of_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(sqlite_database, "SLOW_READ_S", inf)
    store = await SQLiteStore.open(tmp_path, [GENERATION])
    if length:
        await store.append("main", [click(f"e{place}", "u", place % 3) for place in range(length)])
    filters = EventFilter(since_us={"click": 0.0}, timed_types=["click"], state_of=GENERATION)

    async def read() -> dict[str, object]:
        seen = await store.seen_items("main", "u", filters)
        parts = ("item_ids", "left_out", "timed_items", "times_us", "is_complete", "state")
        return {name: getattr(seen, name) for name in parts}

    with patch.object(Database, "read_now", return_value=None):
        by_threads = await read()
    with patch.object(Database, "read", side_effect=AssertionError):
        found = await read()
    assert found == by_threads
    assert len(found["times_us"]) == length  # type: ignore[arg-type]
    assert (found["state"] is None) == (length > SHORT_LOG)
    await store.close()


def test_a_slow_read_moves_reads_to_threads_for_a_while(reader: InlineReader) -> None:
    def slow(db: sqlite3.Connection) -> int:
        time.sleep(2 * SLOW_READ_S)
        return one(db)

    assert reader.run(slow) == 1
    assert [reader.run(one) for _ in range(REFUSED_AFTER_SLOW)] == [None] * REFUSED_AFTER_SLOW
    assert reader.run(one) == 1


def test_failed_reads_are_left_to_a_thread(reader: InlineReader, tmp_path: Path) -> None:
    assert reader.run(lambda db: db.execute("SELECT 1 FROM nowhere").fetchone()) is None
    with closing(connect(tmp_path / FILE_NAME)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert reader.run(lambda db: db.execute("BEGIN IMMEDIATE").fetchone()) is None  # at once, not after 10 s
        other.execute("ROLLBACK")


def test_the_connection_is_used_by_one_thread_at_a_time(reader: InlineReader) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def long(db: sqlite3.Connection) -> int:
        has_begun.set()
        may_end.wait()
        return one(db)

    thread = threading.Thread(target=reader.run, args=(long,))
    thread.start()
    has_begun.wait()
    assert reader.run(one) is None
    may_end.set()
    thread.join()
