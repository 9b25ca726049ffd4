"""The archived events that a model trains on: the newest of one tenant, as one table."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from storage.archive.item_counts import effective_events
from storage.archive.manifest import ArchiveFile
from storage.archive.reader import ArchiveReader, ArchiveSnapshot
from storage.folders.folder import Folder

COLUMNS = ("user_id", "item_id", "type", "timestamp_us", "value", "order_id", "logged_ms")


class TrainingEvents:
    """Reads a tenant's events from an archive that an archiver may be writing.

    raises  StorageError  from every method, when the archive cannot be read
    """

    def __init__(self, folder: Path | Folder, tenant: str) -> None:
        self._reader = ArchiveReader(folder)
        self._tenant = tenant

    def exist(self) -> bool:
        """Return whether there is an archive."""
        return self._reader.finds_archive()

    def __len__(self) -> int:
        """Return the number of entries, a few more than the number of events that count."""
        return self._reader.read(lambda snapshot: sum(file.rows for file in self._files(snapshot)))

    def newest(self, max_rows: int) -> pl.DataFrame:
        """Return the newest whole days of events, as many as fit, at least one; each user's events in order of time.

        Undone events and those of merged users are left out. Events of equal times keep the order of the log.
        """

        def read(snapshot: ArchiveSnapshot) -> pl.DataFrame:
            paths = [snapshot.path(file) for file in _newest(self._files(snapshot), max_rows)]
            if not paths:
                return pl.DataFrame(schema=_schema())
            events = effective_events(pl.scan_parquet(paths)).sort("user_id", "timestamp_us", "seq")
            return events.select(*COLUMNS).collect()

        return self._reader.read(read)

    def _files(self, snapshot: ArchiveSnapshot) -> list[ArchiveFile]:
        return [file for file in snapshot.manifest.files if file.tenant == self._tenant]


def _newest(files: list[ArchiveFile], max_rows: int) -> list[ArchiveFile]:
    """Return the files of the newest whole days, newest first."""
    chosen: list[ArchiveFile] = []
    rows = 0
    for day in sorted({file.day for file in files}, reverse=True):
        of_day = [file for file in files if file.day == day]
        rows += sum(file.rows for file in of_day)
        if chosen and rows > max_rows:
            break
        chosen += of_day
    return chosen


def _schema() -> dict[str, type[pl.DataType]]:
    return dict.fromkeys(COLUMNS, pl.String) | {
        "timestamp_us": pl.Int64,
        "value": pl.Float64,
        "logged_ms": pl.Int64,
    }
