"""Writing an archive: Parquet files, their hashes, and the manifest that makes them count."""

from __future__ import annotations

import fcntl
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import IO
from urllib.parse import quote
from uuid import uuid4

import numpy as np
import polars as pl

from storage.archive.hashes import Hashes, contains, hashes_of_digests, hashes_of_table, merge_hashes, read_hashes
from storage.archive.manifest import COLUMNS, LOCK, MANIFEST, THROUGH, UNFINISHED, ArchiveFile, Manifest
from storage.errors import StorageUnavailable
from storage.state.event import LogRecord, digest
from storage.state.record_encoding import to_row

ROW_GROUP = 16_384  # rows; a look-up of one user reads one or two groups of each file that has the user
MAX_FILE_ROWS = 10_000_000  # files are merged in memory


@dataclass(frozen=True, slots=True)
class EventEntry:
    """An entry of the log that goes into the archive; `seq` orders the entries of its partition."""

    tenant: str
    partition: int
    seq: int
    logged_ms: int
    record: LogRecord

    @property
    def day(self) -> str:
        """The day (UTC) on which the event was logged."""
        return datetime.fromtimestamp(self.logged_ms / 1000, UTC).strftime("%Y-%m-%d")


@dataclass(frozen=True, slots=True)
class ErasureEntry:
    """An entry of the log that erases the user's earlier entries in this partition."""

    tenant: str
    partition: int
    seq: int
    user: bytes  # digest of the id


class ArchiveWriter:
    """The one writer of an archive. Make it with `open`, which takes the lock."""

    def __init__(self, directory: Path, lock: IO[bytes]) -> None:
        self._directory = directory
        self._lock = lock
        self.manifest = self._read_or_make()
        self._remove_unlisted()

    @classmethod
    @contextmanager
    def open(cls, directory: Path) -> Iterator[ArchiveWriter]:
        """Open the archive for writing, or make it, and remove what a killed writer has left unfinished.

        raises  StorageUnavailable  when another process writes it, or the directory cannot be used
                StorageError        when a newer lisarec has written it
        """
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            with (Path(directory) / LOCK).open("wb") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as exc:
                    raise StorageUnavailable(f"another process is writing the archive '{directory}'") from exc
                yield cls(Path(directory), lock)
        except (OSError, pl.exceptions.PolarsError) as exc:
            raise StorageUnavailable(f"the archive '{directory}' cannot be written: {exc}") from exc

    def commit(self, entries: Iterable[EventEntry | ErasureEntry], positions: Mapping[int, str]) -> None:
        """Add the entries and set the positions that they reach. Both are durable when this returns.

        The entries are all those between the manifest's positions and the new ones. An erasure among them removes its
        user from all files in the same step.
        """
        days: defaultdict[tuple[str, str], list[EventEntry]] = defaultdict(list)
        erasures: list[ErasureEntry] = []
        for entry in entries:
            if isinstance(entry, ErasureEntry):
                erasures.append(entry)
            else:
                days[entry.tenant, entry.day].append(entry)
        kept = [rest for file in self.manifest.files for rest in self._without(erasures, file)]
        new = [
            file
            for (tenant, day), logged in sorted(days.items())
            for file in self._write_rest(tenant, day, _table(logged), erasures)
        ]
        positions = {**self.manifest.positions, **positions}
        if new or positions != self.manifest.positions:
            self._replace(files=(*kept, *new), positions=positions)

    def _without(self, erasures: Sequence[ErasureEntry], file: ArchiveFile) -> Sequence[ArchiveFile]:
        """Return the file, or what is written in its place when it has rows of an erased user."""
        mine = [erased for erased in erasures if erased.tenant == file.tenant]
        if not mine:
            return [file]
        hashes = read_hashes(self._directory / file.hashes_path)
        if not np.any(contains(hashes, hashes_of_digests([erased.user for erased in mine]))):
            return [file]
        return self._write_rest(file.tenant, file.day, pl.read_parquet(self._directory / file.path), mine)

    def _write_rest(
        self, tenant: str, day: str, table: pl.DataFrame, erasures: Sequence[ErasureEntry]
    ) -> Sequence[ArchiveFile]:
        """Write the table without the rows of erased users, if any other is left."""
        rest = _without_erased(table, [erased for erased in erasures if erased.tenant == tenant])
        return [] if rest.is_empty() else [self._write(tenant, day, rest, hashes_of_table(rest))]

    def note_through(self, time_s: float) -> None:
        """Note for other processes that everything logged before that moment is archived."""
        path = self._directory / THROUGH
        path.touch()
        os.utime(path, (time_s, time_s))

    def compact(self, today: str) -> None:
        """Merge files of the same day, so that their number stays small; a day before `today` ends up as one file."""
        for files in self._days():
            while len(merged := _to_merge(files, is_over=files[0].day < today)) > 1:
                files = self._merge(merged)

    def drop_before(self, day: str) -> int:
        """Drop the events logged before that day, and return how many there were."""
        kept = tuple(file for file in self.manifest.files if file.day >= day)
        dropped = sum(file.rows for file in self.manifest.files) - sum(file.rows for file in kept)
        if dropped:
            self._replace(files=kept)
        return dropped

    def _days(self) -> list[list[ArchiveFile]]:
        """Return the files of each tenant and day."""

        def key(file: ArchiveFile) -> tuple[str, str]:
            return file.tenant, file.day

        return [list(files) for _, files in groupby(sorted(self.manifest.files, key=key), key)]

    def _merge(self, files: Sequence[ArchiveFile]) -> list[ArchiveFile]:
        """Replace the files by one, and return the day's files."""
        table = pl.concat([pl.read_parquet(self._directory / file.path) for file in files])
        hashes = merge_hashes([read_hashes(self._directory / file.hashes_path) for file in files])
        tenant, day = files[0].tenant, files[0].day
        merged = self._write(tenant, day, table, hashes)
        gone = {file.path for file in files}
        kept = tuple(file for file in self.manifest.files if file.path not in gone)
        self._replace(files=(*kept, merged))
        return [file for file in self.manifest.files if (file.tenant, file.day) == (tenant, day)]

    def _write(self, tenant: str, day: str, table: pl.DataFrame, hashes: Hashes) -> ArchiveFile:
        """Write a file that does not count yet."""
        path = f"tenant={quote(tenant, safe='')}/day={day}/{self.manifest.next_number:08}.parquet"
        self.manifest = replace(self.manifest, next_number=self.manifest.next_number + 1)
        file = ArchiveFile(path, tenant, day, len(table))
        table = table.sort("user_id", "seq")
        self._make_folder((self._directory / path).parent)
        _write_durably(
            self._directory / path,
            lambda out: table.write_parquet(out, compression="zstd", statistics=True, row_group_size=ROW_GROUP),
        )
        _write_durably(self._directory / file.hashes_path, lambda out: np.save(out, hashes, allow_pickle=False))
        return file

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            for parent in (folder.parent, folder.parent.parent):
                _sync(parent)

    def _replace(self, **changes: object) -> None:
        """Commit another manifest, and remove the files that it no longer names."""
        old = self.manifest.files
        self.manifest = replace(self.manifest, **changes)  # type: ignore[arg-type]
        self._save()
        for file in set(old) - set(self.manifest.files):
            self._remove(file)

    def _save(self) -> None:
        text = self.manifest.to_json().encode()
        _write_durably(self._directory / MANIFEST, lambda out: out.write(text))

    def _remove(self, file: ArchiveFile) -> None:
        path = self._directory / file.path
        path.unlink(missing_ok=True)
        (self._directory / file.hashes_path).unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            path.parent.rmdir()

    def _read_or_make(self) -> Manifest:
        path = self._directory / MANIFEST
        if path.exists():
            return Manifest.from_json(path.read_text(encoding="utf-8"))
        self.manifest = Manifest(uuid4().hex, {}, 1, ())
        self._save()
        return self.manifest

    def _remove_unlisted(self) -> None:
        listed = {name for file in self.manifest.files for name in (file.path, file.hashes_path)}
        for path in [*self._directory.glob("tenant=*/day=*/*"), *self._directory.glob(f"*{UNFINISHED}")]:
            if str(path.relative_to(self._directory)) not in listed:
                path.unlink()


def _table(logged: Sequence[EventEntry]) -> pl.DataFrame:
    rows = [(entry.seq, entry.partition, entry.logged_ms, *to_row(entry.record)) for entry in logged]
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def _without_erased(table: pl.DataFrame, erasures: Sequence[ErasureEntry]) -> pl.DataFrame:
    users = {erased.user: erased for erased in erasures}
    named = {user_id: users[digest(user_id)] for user_id in table["user_id"].unique() if digest(user_id) in users}
    for user_id, erased in named.items():
        gone = (pl.col("user_id") == user_id) & (pl.col("seq") < erased.seq) & (pl.col("partition") == erased.partition)
        table = table.filter(~gone)
    return table


def _to_merge(files: Sequence[ArchiveFile], *, is_over: bool) -> Sequence[ArchiveFile]:
    """Return the newest files of a day that are worth merging. A row is merged as often as its day's file doubles."""
    merged = [files[-1]]
    rows = merged[0].rows
    for file in reversed(files[:-1]):
        if rows + file.rows > MAX_FILE_ROWS or (file.rows > 2 * rows and not is_over):
            break
        merged.insert(0, file)
        rows += file.rows
    return merged


def _write_durably(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file that appears on disk with all of its content, or not at all."""
    unfinished = path.with_name(path.name + UNFINISHED)
    with unfinished.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
