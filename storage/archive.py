"""The archive: where the log goes when it is no longer hot. Parquet files, and one list that says which of them count.

  DIR/archive.json                                 the list, see `Manifest`; only ever replaced as a whole, by rename
  DIR/tenant=main/day=2026-11-21/00000017.parquet  events logged on that day (UTC), by user, a user's in log order; zstd
  DIR/tenant=main/day=2026-11-21/00000017.npy      (2, n) uint64: a hash of every user in it and of every (user, event
                                                   id), 128 bits in two columns of halves, sorted by the first half
  DIR/archive.lock                                 held by the one process that writes

TENANT is percent-encoded. A file that the list does not name is what a killed writer left behind: nobody reads it, and
the next writer removes it. So replacing the list is the only commit there is, and what it says and how far it has got
with each partition of the log change in one step.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import IO, TypeVar
from urllib.parse import quote
from uuid import uuid4

import numpy as np
import polars as pl
from numpy.typing import NDArray

from storage.errors import StorageError, StorageUnavailable
from storage.records import LogEntry
from storage.state_event import Event, digest, event_fields

MANIFEST = "archive.json"
THROUGH = "through"  # an empty file; everything logged before the time that it bears is in the archive
LOCK = "archive.lock"
UNFINISHED = ".unfinished"
VERSION = 1
ROW_GROUP = 16_384  # rows; who looks for one user reads one or two of these in each file that has the user
MAX_FILE_ROWS = 10_000_000  # files are merged in memory
SCANNED_ROWS = 2_000_000  # of the archive in memory at once when all of it is read, about 400 MB
READ_ATTEMPTS = 5
FOREVER = 2**62

EVENT_COLUMNS = [field.name for field in fields(Event)]
COLUMNS = {
    "seq": pl.Int64,
    "partition": pl.Int32,
    "logged_ms": pl.Int64,
    **dict.fromkeys(EVENT_COLUMNS, pl.String),
    "timestamp_us": pl.Int64,
    "id_time_us": pl.Int64,
    "value": pl.Float64,
}

Hashes = NDArray[np.uint64]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Logged:
    """An entry of the log as it goes into the archive; `seq` orders the entries of its partition."""

    tenant: str
    partition: int
    seq: int
    logged_ms: int
    event: Event

    @property
    def day(self) -> str:
        return datetime.fromtimestamp(self.logged_ms / 1000, UTC).strftime("%Y-%m-%d")


@dataclass(frozen=True, slots=True)
class Erased:
    """An entry of the log that says: forget the user's earlier entries in this partition."""

    tenant: str
    partition: int
    seq: int
    user: bytes  # digest of the id


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """One file of the list."""

    path: str  # of the Parquet file, relative to the archive
    tenant: str
    day: str
    rows: int

    @property
    def hashes_path(self) -> str:
        return self.path.removesuffix(".parquet") + ".npy"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the archive is.

    archive_id  made with it; the log remembers it, so that nobody takes another archive for it
    positions   partition -> its newest entry here, as "SEQ-..."; every entry up to it is here
    files       in the order in which they were written
    """

    archive_id: str
    positions: Mapping[int, str]
    next_number: int
    files: tuple[ArchiveFile, ...]

    def seq(self, partition: int) -> int:
        """Every entry of the partition up to this one is here; 0 before the first."""
        return int(self.positions.get(partition, "0").partition("-")[0])

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def of_json(cls, text: str) -> Manifest:
        """raises StorageError when the text is none of this version"""
        try:
            found = json.loads(text)
            if found["version"] != VERSION:
                raise StorageError(f"the archive has version {found['version']}, this lisarec knows {VERSION}")
            return cls(
                str(found["archive_id"]),
                {int(number): str(place) for number, place in found["positions"].items()},
                int(found["next_number"]),
                tuple(ArchiveFile(**file) for file in found["files"]),
            )
        except (ValueError, TypeError, LookupError, AttributeError) as exc:
            raise StorageError(f"{MANIFEST} is no list of archived files: {exc!r}") from exc


class Archive:
    """Reads an archive that somebody else may be writing. It may be used from any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = Path(directory)
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._snapshot: Snapshot | None = None

    def ask(self, question: Callable[[Snapshot], T]) -> T:
        """The answer of one moment of the archive. Files that go away meanwhile were merged: then it is asked again.

        raises  StorageUnavailable  when the archive cannot be read
                StorageError        when it is none, or what the question raises
        """
        try:
            for _ in range(READ_ATTEMPTS):
                with suppress(FileNotFoundError):
                    return question(self._current())
            self._current()
            raise StorageUnavailable(f"the archive '{self._directory}' lacks files that its {MANIFEST} names")
        except (OSError, pl.exceptions.PolarsError) as exc:
            raise StorageUnavailable(f"the archive '{self._directory}' cannot be read: {exc}") from exc

    def _current(self) -> Snapshot:
        path = self._directory / MANIFEST
        with self._lock, path.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
            if self._snapshot is None or stamp != self._stamp:
                known = self._snapshot.hashes if self._snapshot else {}
                self._snapshot = Snapshot(self._directory, Manifest.of_json(file.read()), known)
                self._stamp = stamp
            return self._snapshot


@dataclass(frozen=True, slots=True)
class ArchivedLog:
    """One partition's log through an entry, without what was erased or dropped up to there."""

    through_seq: int
    table: pl.DataFrame

    def pages(self, size: int) -> Iterator[list[tuple[str, LogEntry]]]:
        """Entries with their tenants, in log order."""
        for some in self.table.iter_slices(size):
            rows = some.select("tenant", "seq", *EVENT_COLUMNS).iter_rows()
            yield [(tenant, LogEntry(seq, Event(*columns))) for tenant, seq, *columns in rows]


class Snapshot:
    """The archive as one list describes it."""

    def __init__(self, directory: Path, manifest: Manifest, known_hashes: Mapping[str, Hashes]) -> None:
        self._directory = directory
        self.manifest = manifest
        listed = {file.path for file in manifest.files}
        self.hashes: dict[str, Hashes] = {path: array for path, array in known_hashes.items() if path in listed}

    def require(self, archive_id: str, partition: int, through: int) -> None:
        """Raise StorageUnavailable unless this is that archive, with all entries of the partition up to `through`."""
        if archive_id != self.manifest.archive_id:
            raise StorageUnavailable(f"'{self._directory}' is not the archive of this log; see --archive-dir")
        if self.manifest.seq(partition) < through:
            raise StorageUnavailable(f"'{self._directory}' is an older copy of the archive; see --archive-dir")

    def entries(
        self, tenant: str, user_id: str, *, after: int = 0, through: int = FOREVER, limit: int = FOREVER
    ) -> list[LogEntry]:
        """The user's first `limit` entries above `after` and up to `through`, in log order."""
        user = _hashes([user_id])
        paths = [self.path(file) for file in self._files(tenant) if _are_in(self._hashes(file), user)[0]]
        if not paths:
            return []
        wanted = (pl.col("user_id") == user_id) & (pl.col("seq") > after) & (pl.col("seq") <= through)
        found = pl.scan_parquet(paths).filter(wanted).sort("seq").head(min(limit, 2**31)).collect()
        return [LogEntry(seq, Event(*columns)) for seq, *columns in found.select("seq", *EVENT_COLUMNS).iter_rows()]

    def logs(self, first: int, end: int) -> dict[int, ArchivedLog]:
        """All that is here of the partitions from the first one on, as many of them as fit into memory at once."""
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
        """Whether each (user id, event id) is here; by the hashes alone, which at 128 bits is as good as the ids."""
        held: NDArray[np.bool_] = np.zeros(len(events), np.bool_)
        wanted = _hashes([_name(*event) for event in events])
        for file in self._files(tenant):
            held |= _are_in(self._hashes(file), wanted)
        return [bool(one) for one in held]

    def paths(self, tenant: str) -> list[Path]:
        """Of the tenant's Parquet files."""
        return [self.path(file) for file in self._files(tenant)]

    def _files(self, tenant: str) -> Iterator[ArchiveFile]:
        return (file for file in self.manifest.files if file.tenant == tenant)

    def path(self, file: ArchiveFile) -> Path:
        return self._directory / file.path

    def _hashes(self, file: ArchiveFile) -> Hashes:
        if file.path not in self.hashes:
            self.hashes[file.path] = _read_hashes(self._directory / file.hashes_path)
        return self.hashes[file.path]


class ArchiveWriter:
    """The one process that writes an archive. Make it with `open`, which takes the lock, and close it."""

    def __init__(self, directory: Path, lock: IO[bytes]) -> None:
        self._directory = directory
        self._lock = lock
        self.manifest = self._read_or_make()
        self._remove_unlisted()

    @classmethod
    @contextmanager
    def open(cls, directory: Path) -> Iterator[ArchiveWriter]:
        """Open the archive for writing, or make it; what a killed writer has left unfinished is removed.

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

    def commit(self, entries: Iterable[Logged | Erased], positions: Mapping[int, str]) -> None:
        """Take the entries in, and note the positions that are reached with them. Durable when this returns.

        The entries are all those between the noted positions and the new ones. Who is erased by one of them leaves all
        files in the same step.
        """
        days: defaultdict[tuple[str, str], list[Logged]] = defaultdict(list)
        erasures: list[Erased] = []
        for entry in entries:
            if isinstance(entry, Erased):
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

    def _without(self, erasures: Sequence[Erased], file: ArchiveFile) -> Sequence[ArchiveFile]:
        """The file, or what is written in its place when it has rows of an erased user."""
        mine = [erased for erased in erasures if erased.tenant == file.tenant]
        if not mine:
            return [file]
        hashes = _read_hashes(self._directory / file.hashes_path)
        if not np.any(_are_in(hashes, _of_digests([erased.user for erased in mine]))):
            return [file]
        return self._write_rest(file.tenant, file.day, pl.read_parquet(self._directory / file.path), mine)

    def _write_rest(
        self, tenant: str, day: str, table: pl.DataFrame, erasures: Sequence[Erased]
    ) -> Sequence[ArchiveFile]:
        """Write the table without the rows of erased users, if any other is left."""
        rest = _without_erased(table, [erased for erased in erasures if erased.tenant == tenant])
        return [] if rest.is_empty() else [self._write(tenant, day, rest, _hashes_of(rest))]

    def note_through(self, time_s: float) -> None:
        """Tell others that everything logged before that moment is here, whether there was something or not."""
        path = self._directory / THROUGH
        path.touch()
        os.utime(path, (time_s, time_s))

    def compact(self, today: str) -> None:
        """Merge files of the same day, so that their number stays small; days before `today` end up as one."""
        for files in self._days():
            while len(merged := _to_merge(files, is_over=files[0].day < today)) > 1:
                files = self._merge(merged)

    def drop_before(self, day: str) -> int:
        """Forget the events logged before that day for ever; returns how many."""
        kept = tuple(file for file in self.manifest.files if file.day >= day)
        dropped = sum(file.rows for file in self.manifest.files) - sum(file.rows for file in kept)
        if dropped:
            self._replace(files=kept)
        return dropped

    def _days(self) -> list[list[ArchiveFile]]:
        """The files of each tenant and day."""

        def key(file: ArchiveFile) -> tuple[str, str]:
            return file.tenant, file.day

        return [list(files) for _, files in groupby(sorted(self.manifest.files, key=key), key)]

    def _merge(self, files: Sequence[ArchiveFile]) -> list[ArchiveFile]:
        """Replace the files by one; returns the day's files."""
        table = pl.concat([pl.read_parquet(self._directory / file.path) for file in files])
        hashes = _sorted(np.hstack([_read_hashes(self._directory / file.hashes_path) for file in files]))
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
        """Commit another list, and remove what it no longer names."""
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
            return Manifest.of_json(path.read_text(encoding="utf-8"))
        self.manifest = Manifest(uuid4().hex, {}, 1, ())
        self._save()
        return self.manifest

    def _remove_unlisted(self) -> None:
        listed = {name for file in self.manifest.files for name in (file.path, file.hashes_path)}
        for path in [*self._directory.glob("tenant=*/day=*/*"), *self._directory.glob(f"*{UNFINISHED}")]:
            if str(path.relative_to(self._directory)) not in listed:
                path.unlink()


def archived_through_s(directory: Path) -> float | None:
    """The moment before which everything logged is in the archive, in Unix seconds; None before its first turn."""
    try:
        return (directory / THROUGH).stat().st_mtime
    except OSError:
        return None


def _name(user_id: str, event_id: str) -> str:
    return f"{user_id}\0{event_id}"


def _hashes(names: Sequence[str]) -> Hashes:
    """(2, n) halves of 128 bits of BLAKE2b of each name."""
    return _of_digests([digest(name) for name in names])


def _of_digests(digests: Sequence[bytes]) -> Hashes:
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2).T


def _sorted(hashes: Hashes) -> Hashes:
    """Each hash once, in order of the first half."""
    hashes = hashes[:, np.lexsort(hashes[::-1])]
    is_new = np.append(True, np.any(hashes[:, 1:] != hashes[:, :-1], axis=0))
    return np.ascontiguousarray(hashes[:, is_new])


def _are_in(hashes: Hashes, wanted: Hashes) -> NDArray[np.bool_]:
    """(n,) whether each of the wanted is among the sorted hashes."""
    begin = np.searchsorted(hashes[0], wanted[0], "left")
    end = np.searchsorted(hashes[0], wanted[0], "right")
    held: NDArray[np.bool_] = np.zeros(len(begin), np.bool_)
    for place in np.flatnonzero(end > begin):
        held[place] = wanted[1, place] in hashes[1, begin[place] : end[place]]
    return held


def _read_hashes(path: Path) -> Hashes:
    try:
        hashes: Hashes = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as exc:
        raise StorageError(f"'{path}' is damaged: {exc}") from exc
    return hashes


def _table(logged: Sequence[Logged]) -> pl.DataFrame:
    rows = [(entry.seq, entry.partition, entry.logged_ms, *event_fields(entry.event)) for entry in logged]
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def _hashes_of(table: pl.DataFrame) -> Hashes:
    """Of the table's users and of its (user, event id) pairs."""
    events = {_name(*row) for row in table.select("user_id", "event_id").iter_rows()}
    return _sorted(_hashes([*events, *table["user_id"].unique()]))


def _without_erased(table: pl.DataFrame, erasures: Sequence[Erased]) -> pl.DataFrame:
    users = {erased.user: erased for erased in erasures}
    named = {user_id: users[digest(user_id)] for user_id in table["user_id"].unique() if digest(user_id) in users}
    for user_id, erased in named.items():
        gone = (pl.col("user_id") == user_id) & (pl.col("seq") < erased.seq) & (pl.col("partition") == erased.partition)
        table = table.filter(~gone)
    return table


def _to_merge(files: Sequence[ArchiveFile], *, is_over: bool) -> Sequence[ArchiveFile]:
    """The newest files of a day that are worth merging. A row is merged about as often as its day's file doubles."""
    merged = [files[-1]]
    rows = merged[0].rows
    for file in reversed(files[:-1]):
        if rows + file.rows > MAX_FILE_ROWS or (file.rows > 2 * rows and not is_over):
            break
        merged.insert(0, file)
        rows += file.rows
    return merged


def _write_durably(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let the file appear with all of its content, on disk, or not at all."""
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
