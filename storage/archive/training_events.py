"""The archived events that a model trains on: the newest of one tenant, in pieces of whole users.

Each file of the archive is sorted by user and has the users of each row group, so a range of users is read without most
of the rest. Memory is that of one piece and of the number of events of each user, whatever the size of the archive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from pathlib import Path

import polars as pl

from storage.archive.item_events import events_on_items
from storage.archive.manifest import COLUMNS as ARCHIVED_COLUMNS
from storage.archive.manifest import ArchiveFile, tenant_folder
from storage.archive.reader import ArchiveReader, ArchiveSnapshot
from storage.folders.folder import Folder

PIECE_ROWS = 500_000  # some 200 MB while they are read and sorted
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
        return self._reader.read(lambda snapshot: sum(file.rows for file in snapshot.files(self._tenant)))

    def item_folders(self) -> list[str]:
        """Return the folders for the tenant's table of items: its own, and the archive if it is the only one."""
        tenants = self._reader.read(lambda snapshot: {file.tenant for file in snapshot.manifest.files})
        own = f"{tenant_folder(self._tenant)}/"
        return [own, ""] if tenants == {self._tenant} else [own]

    def newest(self, max_rows: int, piece_rows: int = PIECE_ROWS) -> Iterator[pl.DataFrame]:
        """Iterate over the newest events that were logged, at most `max_rows` entries, in order of user and time.

        Entries of one millisecond come together, so there may be slightly fewer, and more if the newest do not fit.

        A piece has all events of its users, and at most `piece_rows` entries more than those of its last user. Undone
        events and those of merged users are left out. Events of equal times keep the order of the log. What is archived
        after the first piece is left out, too.
        """
        newest = self._reader.read(lambda snapshot: self._select(snapshot, max_rows, piece_rows))
        first = ""
        for last in newest.last_users:
            users = pl.col("user_id").is_between(pl.lit(first), pl.lit(last), "right" if first else "both")
            yield self._read(newest, users)
            first = last

    def _select(self, snapshot: ArchiveSnapshot, max_rows: int, piece_rows: int) -> _Newest:
        files, begin_ms = _newest_files(snapshot, snapshot.files(self._tenant), max_rows)
        if not files:
            return _Newest(frozenset(), 0, {}, [""])
        log = _scan(snapshot, files).filter(pl.col("logged_ms") >= begin_ms)
        ends = log.group_by("partition").agg(pl.col("seq").max()).collect(engine="streaming")
        users = log.group_by("user_id").len().collect(engine="streaming").sort("user_id")
        pieces = users.group_by((pl.col("len").cum_sum() - 1) // piece_rows).agg(pl.col("user_id").max())
        days = frozenset(file.day for file in files)
        return _Newest(days, begin_ms, dict(ends.iter_rows()), sorted(pieces["user_id"]))

    def _read(self, newest: _Newest, users: pl.Expr) -> pl.DataFrame:
        def read(snapshot: ArchiveSnapshot) -> pl.DataFrame:
            paths = [snapshot.path(file) for file in snapshot.files(self._tenant) if file.day in newest.days]
            if not paths:  # all were dropped meanwhile
                return pl.DataFrame(schema={name: ARCHIVED_COLUMNS[name] for name in COLUMNS})
            events = events_on_items(pl.scan_parquet(paths).filter(users, newest.includes()))
            return events.sort("user_id", "timestamp_us", "seq").select(*COLUMNS).collect()

        return self._reader.read(read)


@dataclass(frozen=True)
class _Newest:
    """The newest entries of the archive at one moment. Its files may be merged into others afterwards.

    days        the days of the files that have them
    begin_ms    the time from which they were logged
    ends        partition -> its newest entry
    last_users  the last user of each piece
    """

    days: frozenset[str]
    begin_ms: int
    ends: Mapping[int, int]
    last_users: list[str]

    def includes(self) -> pl.Expr:
        """Return the condition that an entry is one of them: logged since, and archived at that moment."""
        end = pl.col("partition").replace_strict(self.ends, default=0, return_dtype=pl.Int64)
        return (pl.col("logged_ms") >= self.begin_ms) & (pl.col("seq") <= end)


def _newest_files(snapshot: ArchiveSnapshot, files: list[ArchiveFile], max_rows: int) -> tuple[list[ArchiveFile], int]:
    """Return the files of the fewest newest days that have the newest `max_rows` entries, and the time of the first.

    A day has entries that were logged on it, or before it if they were archived late, but none from later days.
    """
    chosen: list[ArchiveFile] = []
    begin_ms = 0
    days = sorted({file.day for file in files}, reverse=True)
    for day, day_before in zip_longest(days, days[1:]):
        chosen += [file for file in files if file.day == day]
        if day_before and sum(file.rows for file in chosen) < max_rows:
            continue
        begin_ms = _begin_ms(_scan(snapshot, chosen), max_rows)
        if not day_before or begin_ms >= _end_ms(day_before):
            break
    return chosen, begin_ms


def _scan(snapshot: ArchiveSnapshot, files: list[ArchiveFile]) -> pl.LazyFrame:
    return pl.scan_parquet([snapshot.path(file) for file in files])


def _end_ms(day: str) -> int:
    return int((datetime.fromisoformat(day).replace(tzinfo=UTC) + timedelta(days=1)).timestamp() * 1000)


def _begin_ms(log: pl.LazyFrame, max_rows: int) -> int:
    """Return the earliest time since which at most `max_rows` entries were logged, or that of the newest entry."""
    logged = log.group_by("logged_ms").len().collect(engine="streaming").sort("logged_ms", descending=True)
    fitting = logged.filter(pl.col("len").cum_sum() <= max_rows)
    return int(logged["logged_ms"][max(1, len(fitting)) - 1])
