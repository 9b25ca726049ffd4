"""A database removed, replaced or overwritten while in use accepts nothing more, and keeps acknowledged events."""

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from storage.errors import StorageUnavailable
from storage.sqlite.connections.checkpoints import TURN_S
from storage.sqlite.connections.open_files import PARTS, OpenFiles
from storage.sqlite.database import FILE_NAME, Database, connect
from storage.sqlite.store import SQLiteStore
from tests.storage.oracles.random_events import click, make_generation
from tests.waiting import PATIENCE_S, until

GENERATION = make_generation()


def remove(directory: Path) -> None:
    directory.joinpath(FILE_NAME).unlink()


def remove_log(directory: Path) -> None:
    directory.joinpath(f"{FILE_NAME}-wal").unlink()


def remove_index(directory: Path) -> None:
    directory.joinpath(f"{FILE_NAME}-shm").unlink()


def replace(directory: Path) -> None:
    """Replace the file by a copy, like a restored backup."""
    copy = directory / "copy"
    shutil.copy(directory / FILE_NAME, copy)
    copy.rename(directory / FILE_NAME)


def move_away(directory: Path) -> None:
    """Move the files away, like an unmounted file system."""
    directory.rename(directory.with_name("elsewhere"))


DAMAGES = [remove, remove_log, remove_index, replace, move_away]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_nothing_more_is_acknowledged_with_an_immediate_reason(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    directory = tmp_path / "state"
    store = await SQLiteStore.open(directory, [GENERATION])
    await store.append("main", [click("before")])
    assert store.failure is None
    damage(directory)
    with pytest.raises(StorageUnavailable, match=r"cannot be found|was replaced"):
        await store.append("main", [click("into the void")])
    assert store.failure is not None
    with pytest.raises(StorageUnavailable):
        await store.states("main", ["u"], GENERATION)
    await store.close()


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damage_is_detected_within_a_second_without_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    """By the next check; checks are at most half a second apart."""
    assert TURN_S <= 0.5
    directory, checks, check = tmp_path / "state", list[tuple[OpenFiles, bool]](), OpenFiles.check

    def noted_check(files: OpenFiles) -> None:
        check(files)
        checks.append((files, files.failure is None))

    monkeypatch.setattr(OpenFiles, "check", noted_check)
    store = await SQLiteStore.open(directory, [GENERATION])
    damage(directory)
    before = len(checks)
    await until(lambda: store.failure is not None)
    (damaged,) = {files for files, has_passed in checks[before:] if not has_passed}  # other stores may be open, too
    assert sum(has_passed for files, has_passed in checks[before:] if files is damaged) <= 1  # it had begun before
    await store.close()


def test_a_file_damaged_during_opening_is_named(tmp_path: Path) -> None:
    """The store opens several connections, and the file may change between them."""
    database = Database(tmp_path / FILE_NAME)
    remove(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b"no database " * 1000)
    with pytest.raises(StorageUnavailable, match=f"cannot open '{tmp_path / FILE_NAME}'"):
        database.connect()
    asyncio.run(database.close())


def test_a_failed_open_leaves_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would close it later, with a warning from 3.13 on."""
    opened: list[sqlite3.Connection] = []

    def noted_connect(path: Path) -> sqlite3.Connection:
        opened.append(connect(path))
        return opened[-1]

    monkeypatch.setattr("storage.sqlite.database.connect", noted_connect)
    monkeypatch.setattr(OpenFiles, "__init__", Mock(side_effect=FileNotFoundError))
    with pytest.raises(FileNotFoundError):
        Database(tmp_path / FILE_NAME)
    assert len(opened) > 5
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")


def test_a_file_put_back_has_every_acknowledged_event(tmp_path: Path) -> None:
    """A process posts while its file is repeatedly moved away, replaced and put back."""
    directory, elsewhere = tmp_path / "state", tmp_path / "elsewhere"

    async def law() -> None:
        store = await SQLiteStore.open(directory, [GENERATION])
        acknowledged: list[str] = []
        refused = 0

        async def post() -> None:
            nonlocal refused
            for number in range(400):
                try:
                    await store.append("main", [click(f"e{number}")])
                except StorageUnavailable:
                    refused += 1
                else:
                    acknowledged.append(f"e{number}")

        posting = asyncio.ensure_future(post())
        while not posting.done():
            await asyncio.sleep(0.02)
            before = refused
            directory.rename(elsewhere)
            async with asyncio.timeout(PATIENCE_S):
                while refused == before and not posting.done():
                    await asyncio.sleep(0.001)
            os.rename(elsewhere, directory)
        await posting
        assert refused
        assert acknowledged
        await until(lambda: store.failure is None)
        logged = {entry.record.entry_id for entry in await store.events("main", "u", limit=1000)}
        assert logged.issuperset(acknowledged)
        await store.close()
        again = await SQLiteStore.open(directory, [GENERATION])
        assert {entry.record.entry_id for entry in await again.events("main", "u", limit=1000)} == logged
        await again.close()

    asyncio.run(law())


# ---- overwritten in place: the inodes stay


def checkpoint(directory: Path, mode: str = "PASSIVE") -> None:
    """Copy the WAL into the main file, like services do."""
    with closing(sqlite3.connect(directory / FILE_NAME)) as connection:
        connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()


def overwrite(directory: Path, copy: Path) -> None:
    shutil.copyfile(copy / FILE_NAME, directory / FILE_NAME)


def overwrite_and_remove_log(directory: Path, copy: Path) -> None:
    overwrite(directory, copy)
    remove_log(directory)


def overwrite_and_cut_log_off(directory: Path, copy: Path) -> None:
    overwrite(directory, copy)
    cut_log_off(directory, copy)


def cut_log_off(directory: Path, _copy: Path) -> None:
    os.truncate(directory / f"{FILE_NAME}-wal", 0)


def overwrite_log(directory: Path, copy: Path) -> None:
    shutil.copyfile(copy / f"{FILE_NAME}-wal", directory / f"{FILE_NAME}-wal")


def restore_by_sqlite(directory: Path, copy: Path) -> None:
    """Like `.restore` of the sqlite3 shell: an older file becomes a commit."""
    older = directory.with_name("one file")
    older.mkdir()
    for part in PARTS[:2]:
        shutil.copyfile(copy / f"{FILE_NAME}{part}", older / f"{FILE_NAME}{part}")
    with (
        closing(sqlite3.connect(older / FILE_NAME)) as source,
        closing(sqlite3.connect(directory / FILE_NAME)) as target,
    ):
        source.backup(target)


OVERWRITES = [
    overwrite,
    overwrite_and_remove_log,
    overwrite_and_cut_log_off,
    cut_log_off,
    overwrite_log,
    restore_by_sqlite,
]


async def grow(stores: Sequence[SQLiteStore], directory: Path, copies: Sequence[Path]) -> list[str]:
    """Append events and copy the files after each half of them; the main file of each copy has all before it.

    The last event of each half is the last store's, so every store knows of commits that an older copy lacks.
    """
    appended: list[str] = []
    for copy in copies:
        for place in range(30):
            appended.append(f"{copy.name}-{place}")
            await stores[0].append("main", [click(appended[-1], f"u{place % 3}", place % 12)])
        checkpoint(directory)
        appended.append(f"{copy.name}-last")
        await stores[-1].append("main", [click(appended[-1], "u0")])
        shutil.copytree(directory, copy)
    return appended


async def until_failure(store: SQLiteStore, *, is_there: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (store.failure is not None) != is_there:
            await asyncio.sleep(0.01)


async def logged_ids(store: SQLiteStore) -> set[str]:
    return {entry.record.entry_id for n in range(3) for entry in await store.events("main", f"u{n}", limit=1000)}


class TestOverwrittenInPlace:
    @pytest.mark.parametrize("damage", OVERWRITES)
    async def test_processes_acknowledge_nothing_until_the_files_are_restored(
        self, tmp_path: Path, damage: Callable[[Path, Path], None]
    ) -> None:
        directory, older, newer = tmp_path / "state", tmp_path / "older", tmp_path / "newer"
        store, other = [await SQLiteStore.open(directory, [GENERATION]) for _ in range(2)]
        appended = await grow([store, other], directory, [older, newer])
        damage(directory, older)
        with pytest.raises(StorageUnavailable, match=r"overwritten|cut off|cannot be found|SQLite failed"):
            await store.append("main", [click("into the void", "u0")])
        for one in (store, other):  # the other one without any request
            await until_failure(one, is_there=True)
            with pytest.raises(StorageUnavailable):
                await one.states("main", ["u0"], GENERATION)
            with pytest.raises(StorageUnavailable):
                await one.append("main", [click("into the void", "u0")])
        if (directory / f"{FILE_NAME}-wal").exists() and damage is not restore_by_sqlite:
            for part in PARTS[:2]:
                shutil.copyfile(newer / f"{FILE_NAME}{part}", directory / f"{FILE_NAME}{part}")
            for one in (store, other):
                await until_failure(one, is_there=False)
                await one.append("main", [click("healed", "u0")])
                assert await logged_ids(one) == {*appended, "healed"}
                for state in await one.states("main", ["u0", "u1", "u2"], GENERATION):
                    assert state is not None
        await other.close()
        await store.close()

    async def test_shutdown_copies_nothing_into_other_files(self, tmp_path: Path) -> None:
        """SQLite itself would copy the WAL into the current file and delete it."""
        directory, older, newer = tmp_path / "state", tmp_path / "older", tmp_path / "newer"
        store = await SQLiteStore.open(directory, [GENERATION])
        appended = await grow([store], directory, [older, newer])
        overwrite(directory, older)
        await until_failure(store, is_there=True)
        await store.close()
        assert (directory / FILE_NAME).read_bytes() == (older / FILE_NAME).read_bytes()
        assert (directory / f"{FILE_NAME}-wal").stat().st_size
        shutil.copyfile(newer / FILE_NAME, directory / FILE_NAME)
        again = await SQLiteStore.open(directory, [GENERATION])
        assert await logged_ids(again) == set(appended)
        await again.close()

    async def test_an_older_main_file_beside_a_newer_wal_is_refused(self, tmp_path: Path) -> None:
        directory, older, newer = tmp_path / "state", tmp_path / "older", tmp_path / "newer"
        store = await SQLiteStore.open(directory, [GENERATION])
        appended = await grow([store], directory, [older])
        checkpoint(directory, "TRUNCATE")  # so that the next commit begins another log
        appended += await grow([store], directory, [newer])
        await store.close()
        started = tmp_path / "started"
        started.mkdir()
        shutil.copyfile(older / FILE_NAME, started / FILE_NAME)
        shutil.copyfile(newer / f"{FILE_NAME}-wal", started / f"{FILE_NAME}-wal")
        with pytest.raises(StorageUnavailable, match="were together"):
            await SQLiteStore.open(started, [GENERATION])
        shutil.copyfile(newer / FILE_NAME, started / FILE_NAME)
        again = await SQLiteStore.open(started, [GENERATION])
        assert await logged_ids(again) == set(appended)
        await again.close()

    async def test_commit_counters_may_wrap_around(self, tmp_path: Path) -> None:
        for number in (2**31 - 3, -3):
            with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
                connection.execute(f"PRAGMA application_id = {number}")
            store = await SQLiteStore.open(tmp_path, [GENERATION])
            for place in range(6):
                await store.append("main", [click(f"{number} {place}")])
                checkpoint(tmp_path)
            assert store.failure is None
            await store.close()
