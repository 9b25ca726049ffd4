"""Writing an archive: Parquet files, their hashes, and the manifest that makes them count."""

from __future__ import annotations

import errno
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import BytesIO
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from uuid import uuid4

import numpy as np
import polars as pl

from storage.archive.hashes import Hashes, contains, hashes_of_digests, hashes_of_table, merge_hashes, read_hashes
from storage.archive.manifest import COLUMNS, MANIFEST, THROUGH, ArchiveFile, Manifest, tenant_folder
from storage.archive.pieces import ORDER, merge, pack, slices
from storage.errors import StorageUnavailable
from storage.folders.folder import Folder, Overtaken, Version
from storage.folders.place import as_folder
from storage.state.event import LogRecord, digest
from storage.state.record_encoding import to_row

MAX_FILE_ROWS = 5_000_000  # a file is packed in memory, in up to about 100 B a row with its hashes
DIGEST_DIGITS = 32  # of a file's hash, in its name
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class EventEntry:
    """An entry of the log that goes into the archive; `seq` orders the entries of its partition.

    filed_under  the day (UTC) whose file has the entry, where it is not the day of logging
    """

    tenant: str
    partition: int
    seq: int
    logged_ms: int
    record: LogRecord
    filed_under: str = ""

    @property
    def day(self) -> str:
        """The day (UTC) whose file has the entry."""
        return self.filed_under or datetime.fromtimestamp(self.logged_ms / 1000, UTC).strftime("%Y-%m-%d")


@dataclass(frozen=True, slots=True)
class ErasureEntry:
    """An entry of the log that erases the user's earlier entries in this partition."""

    tenant: str
    partition: int
    seq: int
    user: bytes  # digest of the id


class ArchiveWriter:
    """The one writer of an archive. Make it with `open`, which takes the lock."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.manifest, self._version = self._claim()
        self._remove_unlisted(self.manifest)

    @classmethod
    @contextmanager
    def open(cls, folder: Path | Folder) -> Iterator[ArchiveWriter]:
        """Open or create the archive for writing, and remove the unfinished files of a killed writer.

        raises  StorageUnavailable  when another process writes it, or the directory cannot be used
                StorageError        when another version of lisarec has written it
        """
        folder = as_folder(folder)
        try:
            with folder.writing():
                yield cls(folder)
        except Overtaken as exc:
            raise StorageUnavailable(f"another process is writing to the archive '{folder}'") from exc
        except (OSError, pl.exceptions.PolarsError) as exc:
            raise StorageUnavailable(f"cannot write to the archive '{folder}': {exc}") from exc

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
            for file in self._write_rest(tenant, day, [_table(logged)], erasures)
        ]
        positions = {**self.manifest.positions, **positions}
        if new or positions != self.manifest.positions:
            self._replace(files=(*kept, *new), positions=positions)

    def _without(self, erasures: Sequence[ErasureEntry], file: ArchiveFile) -> Sequence[ArchiveFile]:
        """Return the file, or its replacements if it has rows of an erased user."""
        mine = [erased for erased in erasures if erased.tenant == file.tenant]
        if not mine:
            return [file]
        hashes = read_hashes(file.local_hashes(self._folder))
        if not np.any(contains(hashes, hashes_of_digests([erased.user for erased in mine]))):
            return [file]
        return self._write_rest(file.tenant, file.day, slices(file.local_path(self._folder)), mine)

    def _write_rest(
        self, tenant: str, day: str, pieces: Iterable[pl.DataFrame], erasures: Sequence[ErasureEntry]
    ) -> Sequence[ArchiveFile]:
        """Write the rows without those of erased users, if any other is left."""
        mine = [erased for erased in erasures if erased.tenant == tenant]
        rows, hashes = 0, []

        def rest() -> Iterator[pl.DataFrame]:
            nonlocal rows
            for piece in pieces:
                left = _without_erased(piece, mine)
                if len(left):
                    rows += len(left)
                    hashes.append(hashes_of_table(left))
                    yield left

        packed = pack(rest())
        return [self._add(tenant, day, packed, rows, merge_hashes(hashes))] if rows else []

    def note_through(self, time_s: float) -> None:
        """Note for other processes that everything logged before that moment is archived."""
        self._folder.add(THROUGH, repr(time_s).encode())

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
            self._replace(files=kept, must_scrub=True)
        return dropped

    def note_scrubbed(self) -> None:
        """Note that the store's files have no dropped events any more."""
        self._replace(must_scrub=False)

    def _days(self) -> list[list[ArchiveFile]]:
        """Return the files of each tenant and day."""
        key = attrgetter("tenant", "day")
        return [list(files) for _, files in groupby(sorted(self.manifest.files, key=key), key)]

    def _merge(self, files: Sequence[ArchiveFile]) -> list[ArchiveFile]:
        """Replace the files by one, and return the day's files."""
        packed = pack(merge([file.local_path(self._folder) for file in files]))
        hashes = merge_hashes([read_hashes(file.local_hashes(self._folder)) for file in files])
        tenant, day = files[0].tenant, files[0].day
        merged = self._add(tenant, day, packed, sum(file.rows for file in files), hashes)
        gone = {file.path for file in files}
        kept = tuple(file for file in self.manifest.files if file.path not in gone)
        self._replace(files=(*kept, merged))
        return [file for file in self.manifest.files if (file.tenant, file.day) == (tenant, day)]

    def _add(self, tenant: str, day: str, packed: BytesIO, rows: int, hashes: Hashes) -> ArchiveFile:
        """Write a file that the manifest does not list yet."""
        packed_hashes = BytesIO()
        np.save(packed_hashes, hashes, allow_pickle=False)
        name = f"{self.manifest.next_number:08}-{_digest(packed)}-{_digest(packed_hashes)}"
        self.manifest = replace(self.manifest, next_number=self.manifest.next_number + 1)
        file = ArchiveFile(f"{tenant_folder(tenant)}/day={day}/{name}.parquet", tenant, day, rows)
        self._folder.add(file.path, packed.getbuffer())
        self._folder.add(file.hashes_path, packed_hashes.getbuffer())
        return file

    def _replace(self, **changes: object) -> None:
        """Commit another manifest, and remove the files that it no longer names."""
        old = self.manifest.names()
        self.manifest = replace(self.manifest, **changes)  # type: ignore[arg-type]
        self._version = self._save(self.manifest, self._version)
        for name in old - self.manifest.names():
            self._folder.remove(name)

    def _save(self, manifest: Manifest, version: Version | None) -> Version:
        return self._folder.replace(MANIFEST, manifest.to_json().encode(), version)

    def _claim(self) -> tuple[Manifest, Version]:
        """Make this the archive's writer. The previous one can no longer commit."""
        try:
            found = self._folder.read(MANIFEST)
        except FileNotFoundError:
            found = None
        manifest = Manifest(uuid4().hex, {}, 1, ()) if found is None else Manifest.from_json(found.data.decode())
        manifest, version = replace(manifest, writer=uuid4().hex), None if found is None else found.version
        try:
            return manifest, self._save(manifest, version)
        except OSError as exc:
            if exc.errno not in DISK_FULL:
                raise
            self._remove_unlisted(manifest)  # before the claim only here: no other process has the lock of a directory
            return manifest, self._save(manifest, version)

    def _remove_unlisted(self, manifest: Manifest) -> None:
        listed = manifest.names()
        for name in self._folder.names():
            if name.startswith("tenant=") and "/day=" in name and name not in listed:
                self._folder.remove(name)


def _digest(file: BytesIO) -> str:
    return hashlib.sha256(file.getbuffer()).hexdigest()[:DIGEST_DIGITS]


def _table(logged: Sequence[EventEntry]) -> pl.DataFrame:
    rows = [(entry.seq, entry.partition, entry.logged_ms, *to_row(entry.record)) for entry in logged]
    return pl.DataFrame(rows, schema=COLUMNS, orient="row").sort(ORDER)


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
