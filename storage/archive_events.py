"""What an archive has for training: the newest events of one tenant, as one table."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from storage.archive import Archive, ArchiveFile, Snapshot
from storage.item_counts import counted

COLUMNS = ("user_id", "item_id", "type", "timestamp_us", "value", "logged_ms")


class ArchivedEvents:
    """Reads an archive that an archiver may be writing.

    raises  StorageError  from every method, when the archive cannot be read
    """

    def __init__(self, directory: Path, tenant: str) -> None:
        self._archive = Archive(directory)
        self._tenant = tenant

    def __len__(self) -> int:
        """Of entries, which are a few more than what counts."""
        return self._archive.ask(lambda snapshot: sum(file.rows for file in self._files(snapshot)))

    def newest(self, at_most: int) -> pl.DataFrame:
        """The days that have the newest events, as many as fit, at least one; each user's events in order of time.

        Events that were taken back, and those of users who became another one, are not among them. Equal times keep
        the order of the log.
        """

        def read(snapshot: Snapshot) -> pl.DataFrame:
            paths = [snapshot.path(file) for file in _newest(self._files(snapshot), at_most)]
            if not paths:
                return pl.DataFrame(schema=_schema())
            events = counted(pl.scan_parquet(paths)).sort("user_id", "timestamp_us", "seq")
            return events.select(*COLUMNS).collect()

        return self._archive.ask(read)

    def _files(self, snapshot: Snapshot) -> list[ArchiveFile]:
        return [file for file in snapshot.manifest.files if file.tenant == self._tenant]


def _newest(files: list[ArchiveFile], at_most: int) -> list[ArchiveFile]:
    """Whole days, the newest first."""
    chosen: list[ArchiveFile] = []
    rows = 0
    for day in sorted({file.day for file in files}, reverse=True):
        of_day = [file for file in files if file.day == day]
        rows += sum(file.rows for file in of_day)
        if chosen and rows > at_most:
            break
        chosen += of_day
    return chosen


def _schema() -> dict[str, type[pl.DataType]]:
    return dict.fromkeys(COLUMNS, pl.String) | {
        "timestamp_us": pl.Int64,
        "value": pl.Float64,
        "logged_ms": pl.Int64,
    }
