"""Reading an archive, while an archiver may be writing it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from storage.archive.hashes import Hashes, contains, hashes_of_events, hashes_of_users, read_hashes
from storage.archive.manifest import COLUMNS, MANIFEST, ArchiveFile, Manifest
from storage.errors import StorageUnavailable
from storage.folders.folder import Content, Folder, Version
from storage.folders.place import as_folder
from storage.records import LogEntry
from storage.state.record_encoding import COLUMNS as RECORD_COLUMNS
from storage.state.record_encoding import from_row

SCANNED_ROWS = 2_000_000  # in memory at once when the whole archive is read, about 400 MB
READ_ATTEMPTS = 5
FOREVER = 2**62
PAUSE_AFTER_FAILURE_S = 5.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ArchiveReader:
    """Reads an archive that another process may be writing. It may be used from any thread."""

    def __init__(self, folder: Path | Folder) -> None:
        self._folder = as_folder(folder)
        self._lock = threading.Lock()
        self._version: Version | None = None
        self._snapshot: ArchiveSnapshot | None = None
        self._read_again_at_s = 0.0

    def read(self, query: Callable[[ArchiveSnapshot], T]) -> T:
        """Run the query on the current state of the archive.

        If a file is missing, it was merged into another one meanwhile, and the query runs again on the newer manifest.
        While the manifest cannot be read, the last known one is used, because copies of its files may still be here.

        raises  StorageUnavailable  when the archive cannot be read
                StorageError        when the archive has another version; also what the query raises
        """
        try:
            for _ in range(READ_ATTEMPTS):
                with suppress(FileNotFoundError):
                    return query(self._current())
            self._current()
            raise StorageUnavailable(f"the archive '{self._folder}' lacks files that {MANIFEST} lists", "archive")
        except (OSError, pl.exceptions.PolarsError) as exc:
            raise StorageUnavailable(f"the archive '{self._folder}' cannot be read: {exc}", "archive") from exc

    def finds_archive(self) -> bool:
        """Return whether there is an archive.

        raises  StorageUnavailable  when the folder cannot be read
        """
        try:
            self._folder.read(MANIFEST)
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise StorageUnavailable(f"the archive '{self._folder}' cannot be read: {exc}", "archive") from exc
        return True

    def _current(self) -> ArchiveSnapshot:
        with self._lock:
            found = self._read_manifest()
            if found is not None:
                known = self._snapshot.hashes if self._snapshot else {}
                manifest = Manifest.from_json(found.data.decode())
                self._snapshot, self._version = ArchiveSnapshot(self._folder, manifest, known), found.version
                self._folder.forget_copies_except(manifest.names())
            assert self._snapshot is not None
            return self._snapshot

    def _read_manifest(self) -> Content | None:
        """Return the manifest; None if it has not changed, or cannot be read while an older one is known."""
        if self._snapshot is not None and time.monotonic() < self._read_again_at_s:
            return None
        try:
            return self._folder.read(MANIFEST, self._version)
        except FileNotFoundError:
            raise
        except OSError as exc:
            if self._snapshot is None:
                raise
            logger.warning("reading an older state of the archive: %s", exc)
            self._read_again_at_s = time.monotonic() + PAUSE_AFTER_FAILURE_S
            return None


@dataclass(frozen=True, slots=True)
class ArchivedLog:
    """The archived part of a partition's log, without erased and dropped entries."""

    through_seq: int
    table: pl.DataFrame

    def pages(self, size: int) -> Iterator[list[tuple[str, LogEntry]]]:
        """Yield the entries with their tenants, in log order, in pages of that size."""
        for some in self.table.iter_slices(size):
            rows = some.select("tenant", "seq", *RECORD_COLUMNS).iter_rows()
            yield [(tenant, LogEntry(seq, from_row(columns))) for tenant, seq, *columns in rows]


class ArchiveSnapshot:
    """The archive as one manifest describes it."""

    def __init__(self, folder: Folder, manifest: Manifest, known_hashes: Mapping[str, Hashes]) -> None:
        self._folder = folder
        self.manifest = manifest
        listed = {file.path for file in manifest.files}
        known = dict(known_hashes)  # in one step, since another thread may add to them
        self.hashes: dict[str, Hashes] = {path: array for path, array in known.items() if path in listed}

    def require(self, archive_id: str, partition: int, through: int) -> None:
        """Raise StorageUnavailable unless this is that archive and has the partition's entries up to `through`."""
        if archive_id != self.manifest.archive_id:
            raise StorageUnavailable(
                f"'{self._folder}' is not the archive of this event log; check --archive-dir", "archive"
            )
        if self.manifest.seq(partition) < through:
            raise StorageUnavailable(
                f"'{self._folder}' is an outdated copy of the archive; check --archive-dir", "archive"
            )

    def entries(
        self, tenant: str, user_id: str, *, after: int = 0, through: int = FOREVER, limit: int = FOREVER
    ) -> list[LogEntry]:
        """Return the user's first `limit` entries above `after` and up to `through`, in log order."""
        wanted = (pl.col("seq") > after) & (pl.col("seq") <= through)
        return self._entries_of(tenant, user_id, wanted, limit)

    def newest_entries(self, tenant: str, user_id: str, *, through: int, limit: int) -> list[LogEntry]:
        """Return the user's last `limit` entries up to `through`, newest first."""
        return self._entries_of(tenant, user_id, pl.col("seq") <= through, limit, newest_first=True)

    def _entries_of(
        self, tenant: str, user_id: str, wanted: pl.Expr, limit: int, *, newest_first: bool = False
    ) -> list[LogEntry]:
        files = self.files_of(tenant, user_id)
        if not files:
            return []
        found = pl.scan_parquet([self.path(file) for file in files]).filter(pl.col("user_id") == user_id, wanted)
        found = found.sort("seq", descending=newest_first).head(min(limit, 2**31))
        rows = found.select("seq", *RECORD_COLUMNS).collect().iter_rows()
        return [LogEntry(seq, from_row(columns)) for seq, *columns in rows]

    def files_of(self, tenant: str, user_id: str) -> list[ArchiveFile]:
        """Return the files that have entries of the user, by the hashes alone."""
        user = hashes_of_users([user_id])
        return [file for file in self.files(tenant) if contains(self._hashes(file), user)[0]]

    def logs(self, first: int, end: int) -> dict[int, ArchivedLog]:
        """Return the archived logs of the partitions from `first` on, as many as fit into memory at once."""
        rows = sum(file.rows for file in self.manifest.files)
        end = min(end, first + max(1, end * SCANNED_ROWS // max(1, rows)))
        wanted = pl.col("partition").is_between(first, end - 1)
        tables = [
            pl.scan_parquet(self.path(file))
            .filter(wanted)
            .select(pl.lit(file.tenant).alias("tenant"), *COLUMNS)
            .collect()
            for file in self.manifest.files
        ]
        table = pl.concat(tables) if tables else pl.DataFrame(schema={"tenant": pl.String, **COLUMNS})
        return {
            number: ArchivedLog(self.manifest.seq(number), table.filter(pl.col("partition") == number).sort("seq"))
            for number in range(first, end)
        }

    def holds(self, tenant: str, events: Sequence[tuple[str, str]]) -> list[bool]:
        """Return whether each (user id, event id) is archived, by the hashes alone."""
        return self._holds(tenant, hashes_of_events(events))

    def holds_users(self, tenant: str, user_ids: Sequence[str]) -> list[bool]:
        """Return whether each user has archived entries, by the hashes alone."""
        return self._holds(tenant, hashes_of_users(user_ids))

    def _holds(self, tenant: str, wanted: Hashes) -> list[bool]:
        held: NDArray[np.bool_] = np.zeros(wanted.shape[1], np.bool_)
        for file in self.files(tenant):
            held |= contains(self._hashes(file), wanted)
        return [bool(one) for one in held]

    def paths(self, tenant: str, max_rows: int = FOREVER) -> list[Path]:
        """Return the paths of the tenant's Parquet files, the newest first, until they have that many rows."""
        newest = sorted(self.files(tenant), key=attrgetter("day"))[::-1]
        before = accumulate((file.rows for file in newest), initial=0)
        return [self.path(file) for file, rows in zip(newest, before, strict=False) if rows < max_rows]

    def files(self, tenant: str) -> list[ArchiveFile]:
        """Return the tenant's files."""
        return [file for file in self.manifest.files if file.tenant == tenant]

    def path(self, file: ArchiveFile) -> Path:
        """Return the path of the Parquet file."""
        return file.local_path(self._folder)

    def _hashes(self, file: ArchiveFile) -> Hashes:
        if file.path not in self.hashes:
            self.hashes[file.path] = read_hashes(file.local_hashes(self._folder))
        return self.hashes[file.path]
