"""Copying the log of an embedded store into the archive."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from storage.archive.reader import ArchiveReader
from storage.archive.writer import ArchiveWriter
from storage.archiver.archiver import TurnCounts, archive_log
from storage.archiver.sqlite_source import SQLiteSource
from storage.errors import StorageError, StorageUnavailable
from storage.sqlite.database import FILE_NAME
from storage.sqlite.store import SQLiteStore
from storage.state.event import Event, LogRecord
from tests.storage.oracles.random_events import as_impression, click
from tests.storage.redis.stores import GENERATION
from tests.waiting import PATIENCE_S

PAGES = Path(__file__).parents[3] / "docs" / "how-to" / "operate"


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

    def read(self, directory: Path, tenant: str = "main") -> list[LogRecord]:
        found = ArchiveReader(directory).read(lambda snapshot: snapshot.entries(tenant, "u"))
        return [entry.record for entry in found]

    def run_script(self, page: str, directory: Path, last: str = "") -> str:
        """Return what the Python of a page prints, with another line at its end."""
        (script,) = re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.DOTALL | re.MULTILINE)
        command = [sys.executable, "-c", script + last]
        return subprocess.run(
            command, cwd=directory, capture_output=True, text=True, check=True, timeout=PATIENCE_S
        ).stdout

    def test_each_event_is_copied_once(self, tmp_path: Path) -> None:
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

    def test_the_documented_script_counts_valid_events(self, tmp_path: Path) -> None:
        self.fill(tmp_path / "state", [click("own"), click("undone"), click("of visitor", "v"), click("also", "v")])
        self.fill(tmp_path / "state", [click("own", "v")], tenant="shop")

        async def correct() -> None:
            store = await SQLiteStore.open(tmp_path / "state", [GENERATION])
            await store.undo("main", "u", "undone")
            await store.merge("main", "u", "v")
            await store.undo("main", "u", "v/also")
            await store.close()

        asyncio.run(correct())
        self.turn(tmp_path / "state", tmp_path / "archive")
        shown = 'print(sorted(events.select("tenant", "user_id", "event_id").collect().rows()))'
        counted = [("main", "u", "own"), ("main", "u", "v/of visitor"), ("shop", "v", "own")]
        assert self.run_script("archive.md", tmp_path, shown).endswith(f"{counted}\n")

    def test_the_documented_script_finds_users_of_one_item_who_have_seen_lists(self, tmp_path: Path) -> None:
        only, others = (
            [
                replace(click(user, user), item_id="tea-2"),
                as_impression(click(f"{user}-shown", user), ["tea-2", "cup-1"]),
            ]
            for user in ("bot", "visitor")
        )
        self.fill(tmp_path / "state", [*only, *others, click("visit", "visitor"), click("other", "other")])
        self.turn(tmp_path / "state", tmp_path / "archive")
        self.run_script("bots.md", tmp_path)
        assert (tmp_path / "bots.txt").read_text().split() == ["bot"]

    def test_events_of_a_clock_behind_have_the_full_retention(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The archiver adopts such a clock only after an hour."""
        self.fill(tmp_path / "state", [click("e1")])
        monkeypatch.setattr("time.time_ns", lambda: 0)
        begin = datetime.now(UTC)
        for days, dropped in ((0, 0), (9, 0), (10, 1)):
            now = begin + timedelta(days=days)
            with SQLiteSource.open(tmp_path / "state") as log, ArchiveWriter.open(tmp_path / "archive") as writer:
                assert archive_log(log, writer, now, keep_tail_s=0, keep_days=9).dropped == dropped

    def test_a_different_database_is_refused(self, tmp_path: Path) -> None:
        for number in (1, 2):
            self.fill(tmp_path / f"state{number}", [click(f"e{n}-{number}") for n in range(5)])
        self.turn(tmp_path / "state1", tmp_path / "archive")
        with pytest.raises(StorageError, match="another SQLite file"):
            self.turn(tmp_path / "state2", tmp_path / "archive")

    def test_a_missing_store_is_reported_and_not_created(self, tmp_path: Path) -> None:
        with pytest.raises(StorageUnavailable, match="--data-dir"):
            self.turn(tmp_path, tmp_path / "archive")
        assert not (tmp_path / FILE_NAME).exists()

    def test_a_file_that_lacks_archived_events_is_refused_until_accepted(self, tmp_path: Path) -> None:
        data_dir, directory, older = tmp_path / "state", tmp_path / "archive", tmp_path / "older"
        self.fill(data_dir, [click(f"e{n}") for n in range(5)])
        self.turn(data_dir, directory)
        shutil.copytree(data_dir, older)
        self.fill(data_dir, [click(f"e{n}") for n in range(5, 8)])
        self.turn(data_dir, directory)

        async def require(place: Path) -> None:
            store = await SQLiteStore.open(place, [GENERATION], archive_dir=directory)
            try:
                await store.require_whole()
            finally:
                await store.close()

        async def repair(place: Path, *, accept_loss: bool) -> None:
            store = await SQLiteStore.open(place, (), archive_dir=directory)
            try:
                await store.repair(accept_loss=accept_loss)
            finally:
                await store.close()

        asyncio.run(require(data_dir))
        for place in (older, tmp_path / "empty"):
            with pytest.raises(StorageError, match="the store lacks"):
                asyncio.run(require(place))
            with pytest.raises(StorageError, match="the store lacks"):
                asyncio.run(repair(place, accept_loss=False))
            asyncio.run(repair(place, accept_loss=True))
            asyncio.run(require(place))
        asyncio.run(repair(data_dir, accept_loss=False))
