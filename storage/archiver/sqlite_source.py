"""The log of an embedded store, as the archiver reads it."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from typing_extensions import override

from storage.archive.writer import ErasureEntry, EventEntry
from storage.archiver.source import PAGE, EntryPage, LogSource
from storage.errors import StorageError, StorageUnavailable
from storage.sqlite.database import BUSY_TIMEOUT_S, FILE_NAME
from storage.sqlite.log import IS_ERASED, RECORD_COLUMNS, archive_position, holds_archived
from storage.state.record_encoding import from_row

SELECT_LOG = f"""
SELECT seq, tenant, {RECORD_COLUMNS} FROM log WHERE seq > ? AND NOT {IS_ERASED} ORDER BY seq LIMIT ?
"""  # noqa: S608, the columns are a constant
SELECT_ERASURES = "SELECT id, tenant, user, through_seq FROM erasures WHERE id > ? ORDER BY id"
ERASURES = 1  # a separate partition in the manifest's positions; the log is partition 0


class SQLiteSource(LogSource):
    """The log table of an embedded store. It keeps its entries; the archive gets copies."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    @classmethod
    @contextmanager
    def open(cls, data_dir: Path) -> Iterator[SQLiteSource]:
        """Open the store in the directory; StorageUnavailable when there is none, or it cannot be read, also later."""
        path = Path(data_dir) / FILE_NAME
        if not path.is_file():
            raise StorageUnavailable(f"'{path}' does not exist; pass the --data-dir of 'lisarec serve'")
        try:
            with closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as db:
                yield cls(db)
        except sqlite3.Error as exc:
            raise StorageUnavailable(f"SQLite failed: {exc}") from exc

    @override
    def attach(self) -> None:
        pass

    @override
    def claim(self, archive_id: str, is_new: bool) -> None:
        pass  # Nothing is trimmed here, so any number of archives may copy the log; positions reveal other data.

    @override
    def entries(self, position_of: Callable[[int], str | None]) -> Iterator[EntryPage]:
        position = position_of(0)
        if position is not None and not holds_archived(self._db, position):
            raise StorageError("the archive contains events of another SQLite file; use another archive directory")
        after = int(position.partition("-")[0]) if position is not None else 0
        while page := self._page(after):
            after = page[-1].seq
            yield EntryPage(0, page, archive_position(after, page[-1].tenant, page[-1].record))
        erased = self._db.execute(SELECT_ERASURES, (int(position_of(ERASURES) or 0),)).fetchall()
        if erased:
            users = [ErasureEntry(tenant, 0, through_seq + 1, user) for _, tenant, user, through_seq in erased]
            yield EntryPage(ERASURES, users, str(erased[-1][0]))

    @override
    def require(self, positions: Mapping[int, str]) -> None:
        pass  # commits are synced, so entries stay

    @override
    def trim(self, position_of: Callable[[int], str | None], before_ms: int) -> int:
        return 0

    @override
    def scrub(self) -> None:
        pass  # erasing has already emptied the pages of the file

    @override
    def memory_usage(self) -> Sequence[tuple[str, int, int]]:
        return []

    def _page(self, after: int) -> list[EventEntry]:
        # the table has no logging time, so the archive's days are those of archiving
        now_ms = time.time_ns() // 1_000_000
        rows = self._db.execute(SELECT_LOG, (after, PAGE))
        return [EventEntry(tenant, 0, seq, now_ms, from_row(columns)) for seq, tenant, *columns in rows]
