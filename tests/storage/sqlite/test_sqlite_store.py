"""Specifics of the embedded store: its file, schema, queue and group commits."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import storage.sqlite.append
import storage.sqlite.catch_up
import storage.sqlite.database
import storage.sqlite.log
import storage.sqlite.states
from storage.errors import StorageBusy, StorageError, StorageUnavailable
from storage.items.trends import Visit
from storage.maintenance.rebuild import rebuild
from storage.records import DAY_S
from storage.sqlite.database import FILE_NAME
from storage.sqlite.schema import SCHEMA_VERSION
from storage.sqlite.store import SQLiteStore
from storage.state.corrections import EventFilter, ReadState
from tests.storage.contract.stores import begun
from tests.storage.folders.durability import Disk
from tests.storage.oracles.naive_fold import assert_state_is, fold
from tests.storage.oracles.random_events import KNOWN_ITEMS, START_US, click, make_generation, make_newer
from tests.waiting import until

GENERATION = make_generation()


@contextmanager
def write_lock(directory: Path) -> Iterator[None]:
    """Hold the write lock of the file, so that accepted requests wait."""
    with closing(sqlite3.connect(directory / FILE_NAME, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


def change(directory: Path, sql: str) -> None:
    with closing(sqlite3.connect(directory / FILE_NAME)) as connection, connection:
        connection.execute(sql)


async def test_a_full_queue_refuses_at_once_and_answers_accepted_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.sqlite.connections.writer_thread.MAX_WAITING", 10)
    store = await SQLiteStore.open(tmp_path, [GENERATION])
    with write_lock(tmp_path):
        first = await begun(store, click("first"))  # and waits for the lock
        accepted = [asyncio.ensure_future(store.append("main", [click(f"e{number}")])) for number in range(10)]
        await asyncio.sleep(0)
        with pytest.raises(StorageBusy):
            await store.append("main", [click("too much")])
    await asyncio.gather(first, *accepted)
    log = await store.events("main", "u")
    assert [entry.record.entry_id for entry in log] == ["first", *(f"e{number}" for number in range(10))]
    await store.close()


async def test_an_empty_queue_accepts_one_request_beyond_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.sqlite.connections.writer_thread.MAX_WAITING", 10)
    store = await SQLiteStore.open(tmp_path, [GENERATION])
    await store.append("main", [click(f"e{number}") for number in range(11)])
    assert len(await store.events("main", "u")) == 11
    await store.close()


async def test_visits_of_many_users_leave_queue_space_for_events(tmp_path: Path) -> None:
    """A flush of trends may have ten times as many visits as the queue has places."""
    store = await SQLiteStore.open(tmp_path, [GENERATION])
    visits = [Visit("cup", number.to_bytes(4, "big"), 1.0) for number in range(100_000)]
    with write_lock(tmp_path):
        first = await begun(store, click("first"))  # and waits for the lock
        flush = asyncio.ensure_future(store.add_visits("main", visits))
        await asyncio.sleep(0)
        appended = asyncio.ensure_future(store.append("main", [click(f"e{number}") for number in range(1_000)]))
        await asyncio.sleep(0)
    await asyncio.gather(first, appended, flush)
    assert await store.trends("main", 1)
    await store.close()


async def test_concurrent_requests_share_a_commit(
    tmp_path: Path,
) -> None:
    store = await SQLiteStore.open(tmp_path, [GENERATION])
    with write_lock(tmp_path):
        await asyncio.sleep(0)
        events = [click(f"e{n % 70}", f"user{n % 7}", n % 14, START_US - n) for n in range(150)]
        requests = [events[start : start + 3] for start in range(0, len(events), 3)]
        waiting = [asyncio.ensure_future(store.append("main", request)) for request in requests]
        await asyncio.sleep(0)  # all of them are in the queue
    answers = [answer for some in await asyncio.gather(*waiting) for answer in some]
    assert [answer.duplicate for answer in answers] == [False] * 70 + [True] * 80
    assert [answer.unknown_item for answer in answers[:70]] == [n % 14 >= KNOWN_ITEMS for n in range(70)]
    for number in range(7):
        log = [entry.record for entry in await store.events("main", f"user{number}")]
        assert log == [event for event in events[:70] if event.user_id == f"user{number}"]
        assert_state_is((await store.states("main", [f"user{number}"], GENERATION))[0], fold(GENERATION, log))
    await store.close()


async def test_a_cancelled_waiter_leaves_the_queue(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path, [GENERATION])
    with write_lock(tmp_path):
        first = await begun(store, click("first"))
        waiting = [asyncio.ensure_future(store.append("main", [click(f"e{number}")])) for number in range(3)]
        await asyncio.sleep(0)
        first.cancel()  # its group has begun: it is applied, nobody hears of it
        waiting[1].cancel()
        await asyncio.sleep(0)
    await asyncio.gather(waiting[0], waiting[2])
    assert [entry.record.entry_id for entry in await store.events("main", "u")] == ["first", "e0", "e2"]
    await store.close()


async def test_a_closed_event_loop_does_not_disturb_others(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path, [GENERATION])

    async def write_and_leave() -> None:
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
        await store.append("main", [click("left")])

    def run_loop_that_ends() -> None:
        with closing(asyncio.new_event_loop()) as loop, pytest.raises(RuntimeError):
            loop.run_until_complete(write_and_leave())  # it stops before the write is done

    with write_lock(tmp_path):
        first = await begun(store, click("first"))
        await asyncio.to_thread(run_loop_that_ends)
        last = asyncio.ensure_future(store.append("main", [click("last")]))
        await asyncio.sleep(0)
    await asyncio.gather(first, last)
    assert [entry.record.entry_id for entry in await store.events("main", "u")] == ["first", "left", "last"]
    await store.close()


async def test_an_invalid_request_fails_alone_without_effect(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path, [GENERATION])
    too_large_for_sqlite = [click("half applied?"), click("odd", timestamp_us=2**70)]
    with write_lock(tmp_path):  # so that the requests form a group
        first = await begun(store, click("first"))
        requests = [[click("a")], too_large_for_sqlite, [click("b")]]
        waiting = [asyncio.ensure_future(store.append("main", events)) for events in requests]
        await asyncio.sleep(0)
    before, odd, after = await asyncio.gather(*waiting, return_exceptions=True)
    await first
    assert isinstance(odd, StorageError)
    assert not isinstance(before, BaseException)
    assert not isinstance(after, BaseException)
    log = [entry.record for entry in await store.events("main", "u")]
    assert [event.entry_id for event in log] == ["first", "a", "b"]
    assert_state_is((await store.states("main", ["u"], GENERATION))[0], fold(GENERATION, log))
    await store.close()


async def test_a_long_lock_fails_all_waiters_and_the_store_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.sqlite.database, "BUSY_TIMEOUT_S", 0.2)
    store = await SQLiteStore.open(tmp_path, [GENERATION])
    with write_lock(tmp_path):
        waiting = [store.append("main", [click(f"e{number}")]) for number in range(5)]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StorageUnavailable] * 5
    assert len({id(outcome) for outcome in outcomes}) == 5
    await store.append("main", [click("later")])
    assert [entry.record.entry_id for entry in await store.events("main", "u")] == ["later"]
    await store.close()


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM states",
        "UPDATE states SET value = x'00'",
        "UPDATE states SET value = CAST(x'63' || substr(value, 2) AS BLOB)",  # another layout version
    ],
)
async def test_a_missing_or_unreadable_state_is_folded_again(tmp_path: Path, damage: str) -> None:
    store = await SQLiteStore.open(tmp_path, [GENERATION])
    events = [click(f"e{number}", item=number % 12) for number in range(30)]
    await store.append("main", events)
    (value,) = await store.states("main", ["u"], GENERATION)
    change(tmp_path, damage)
    assert await store.states("main", ["u"], GENERATION) == [value]
    change(tmp_path, damage)
    await store.append("main", [click("one more")])
    assert_state_is((await store.states("main", ["u"], GENERATION))[0], fold(GENERATION, [*events, click("one more")]))
    await store.close()


async def test_a_short_log_is_read_with_its_current_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.sqlite.states, "SHORT_LOG", 4)
    store = await SQLiteStore.open(tmp_path, [GENERATION])
    with_state = EventFilter(state_of=GENERATION)
    nobody = await store.seen_items("main", "u", with_state)
    assert (nobody.item_ids, nobody.state) == (set(), ReadState(None))
    for entries in range(1, 7):
        await store.append("main", [click(f"e{entries}", item=entries)])
        for limit in (2, 4, 100):
            seen = await store.seen_items("main", "u", with_state, limit=limit)
            plain = await store.seen_items("main", "u", limit=limit)
            assert (seen.item_ids, seen.is_complete) == (plain.item_ids, plain.is_complete)
            (value,) = await store.states("main", ["u"], GENERATION)
            assert seen.state == (ReadState(value) if entries <= 4 or limit <= 4 else None)
    behind = await store.seen_items("main", "u", EventFilter(state_of=make_newer()), limit=4)
    assert (len(behind.item_ids), behind.state) == (4, None)
    await store.close()


async def test_a_state_that_cannot_be_saved_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full disk and a newly activated model, logged events can still be folded."""
    connections = []
    connect = storage.sqlite.database.connect

    def connect_and_remember(path: Path) -> sqlite3.Connection:
        connections.append(connect(path))
        return connections[-1]

    monkeypatch.setattr(storage.sqlite.database, "connect", connect_and_remember)
    store = await SQLiteStore.open(tmp_path, [GENERATION])
    events = [click(f"e{n}", item=n) for n in range(10)]
    await store.append("main", events)
    for db in connections[1:]:  # the first one, which made the file, is closed
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageUnavailable, match="full"):
        await store.append("main", [click(f"e{n}", f"user{n}") for n in range(200)])
    for _ in range(2):
        (value,) = await store.states("main", ["u"], make_newer())
        assert_state_is(value, fold(make_newer(), events))
    await store.close()


async def test_a_newer_schema_is_refused_with_a_remedy(tmp_path: Path) -> None:
    await (await SQLiteStore.open(tmp_path, [GENERATION])).close()
    change(tmp_path, f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(StorageError, match=r"newer lisarec.*another directory"):
        await SQLiteStore.open(tmp_path, [GENERATION])


async def test_an_earlier_schema_is_refused_with_a_remedy(tmp_path: Path) -> None:
    await (await SQLiteStore.open(tmp_path, [GENERATION])).close()
    for version in range(1, SCHEMA_VERSION):
        change(tmp_path, f"PRAGMA user_version = {version}")
        with pytest.raises(StorageError, match=r"earlier lisarec.*backup.*restore.*another directory"):
            await SQLiteStore.open(tmp_path, [GENERATION])


def test_an_unusable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    (tmp_path / FILE_NAME).write_text("not a database, but long enough to be looked at as one" * 100)
    for directory in (tmp_path / "file", tmp_path):
        with pytest.raises(StorageUnavailable, match=FILE_NAME):
            asyncio.run(SQLiteStore.open(directory, [GENERATION]))


def test_commits_are_synced(tmp_path: Path) -> None:
    """Acknowledged events must survive a power cut, which SIGKILL does not simulate."""
    store = asyncio.run(SQLiteStore.open(tmp_path, [GENERATION]))
    asyncio.run(store.close())
    with closing(storage.sqlite.database.connect(tmp_path / FILE_NAME)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)


async def test_the_folder_of_the_file_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite syncs only names inside the folder."""
    disk, folder = Disk(monkeypatch), tmp_path / "new" / "state"
    store = await SQLiteStore.open(folder, [GENERATION])
    assert disk.has_name(folder)
    assert disk.has_name(folder.parent)
    await store.close()


async def test_a_lagging_state_is_folded_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.sqlite.append, "MAX_MISSING_ENTRIES", 5)
    monkeypatch.setattr(storage.sqlite.catch_up, "MAX_MISSING_ENTRIES", 5)
    newer = make_generation(tag=b"gen two\0", seed=1)
    logged = [click(f"e{number}", item=number % 7) for number in range(40)]

    def through_seq() -> int:
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
            sql = "SELECT through_seq FROM states WHERE generation = ? AND user_id = 'u'"
            row = connection.execute(sql, (newer.tag,)).fetchone()
        return 0 if row is None else int(row[0])

    older = await SQLiteStore.open(tmp_path, [GENERATION])
    await older.append("main", logged)
    await older.close()
    store = await SQLiteStore.open(tmp_path, [newer])
    requests = [[click("new")], [click("other", user_id="v")], [click("newest", item=3)]]
    await asyncio.gather(*(store.append("main", events) for events in requests))
    await until(lambda: through_seq() >= 40)
    await store.append("main", [click("last")])
    assert through_seq() == 44  # again every event keeps it fresh
    log = [entry.record for entry in await store.events("main", "u")]
    (value,) = await store.states("main", ["u"], newer)
    assert [event.entry_id for event in log[:-3]] == [event.event_id for event in logged]
    assert {event.entry_id for event in log[-3:]} == {"new", "newest", "last"}
    assert_state_is(value, fold(newer, log))
    await store.close()


async def test_a_closing_store_accepts_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.sqlite.append, "MAX_MISSING_ENTRIES", 5)
    is_folding, may_go_on = threading.Event(), threading.Event()
    newer = make_generation(tag=b"gen two\0", seed=1)

    def log_entries(*arguments: Any) -> Any:
        is_folding.set()
        may_go_on.wait()
        return storage.sqlite.log.log_entries(*arguments)

    older = await SQLiteStore.open(tmp_path, [GENERATION])
    await older.append("main", [click(f"e{number}") for number in range(10)])
    await older.close()
    store = await SQLiteStore.open(tmp_path, [newer])
    monkeypatch.setattr(storage.sqlite.catch_up, "log_entries", log_entries)
    await store.append("main", [click("new")])
    await asyncio.to_thread(is_folding.wait)
    closing_store = asyncio.create_task(store.close())
    await asyncio.sleep(0)  # it has begun, and waits for the thread that folds
    with pytest.raises(StorageUnavailable, match="closed"):
        await store.append("main", [click("late")])
    with pytest.raises(StorageUnavailable, match="closed"):
        await store.states("main", ["u"], newer)
    may_go_on.set()
    await closing_store


async def test_a_rebuild_keeps_the_expiry_of_idle_users(tmp_path: Path) -> None:
    newer, now_us = make_generation(tag=b"gen two\0", seed=1), time.time_ns() // 1000
    users = ["idle0", "idle5", "idle9"]
    store = await SQLiteStore.open(tmp_path, [GENERATION], state_ttl_days=7)
    for user in users:
        days = int(user.removeprefix("idle"))
        await store.append("main", [click("e", user, timestamp_us=now_us - days * DAY_S * 1_000_000)])
    await rebuild(store, newer)
    assert await store.drop_idle_states() == 1
    saved = await store.states("main", users, newer, max_missing=0)
    assert [value is not None for value in saved] == [True, True, False]
    await store.close()


@pytest.mark.parametrize("max_missing", [0, None])
async def test_a_returning_user_s_state_survives_the_next_sweep(tmp_path: Path, max_missing: int | None) -> None:
    """Whether the read folds it or, for a long log, the background."""
    newer, long_ago_us = make_generation(tag=b"gen two\0", seed=1), time.time_ns() // 1000 - 9 * DAY_S * 1_000_000
    store = await SQLiteStore.open(tmp_path, [GENERATION], state_ttl_days=7)
    await store.append("main", [click("e", "ada", timestamp_us=long_ago_us)])

    async def is_folded() -> bool:
        return await store.states("main", ["ada"], newer, max_missing=max_missing) != [None]

    await until(is_folded)
    assert await store.drop_idle_states() == 0
    await store.close()


async def test_idle_states_expire_and_are_folded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await SQLiteStore.open(tmp_path, [GENERATION], state_ttl_days=7)
    today = storage.sqlite.states.today()
    monkeypatch.setattr(storage.sqlite.states, "today", lambda: today - 8)
    await store.append("main", [click("old", user_id="idle"), click("old", user_id="busy")])
    monkeypatch.setattr(storage.sqlite.states, "today", lambda: today - 7)
    await store.append("main", [click("new", user_id="busy")])
    monkeypatch.setattr(storage.sqlite.states, "today", lambda: today + 365)  # a clock that is ahead
    await store.append("main", [click("ahead", user_id="ahead")])
    monkeypatch.setattr(storage.sqlite.states, "today", lambda: today)
    assert (await store.drop_idle_states(), await store.drop_idle_states()) == (1, 0)
    monkeypatch.setattr(storage.sqlite.states, "today", lambda: today + 8)
    assert await store.drop_idle_states() == 2
    monkeypatch.undo()
    assert await store.states("main", ["idle"], GENERATION, max_missing=0) == [None]
    for user_id in ("idle", "busy"):
        log = [entry.record for entry in await store.events("main", user_id)]
        assert_state_is((await store.states("main", [user_id], GENERATION))[0], fold(GENERATION, log))
    await store.close()
