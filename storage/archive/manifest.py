"""The archive's manifest: which files count, and how far each partition of the log is archived.

  DIR/archive.json                                 the manifest, see `Manifest`; only replaced as a whole, by rename
  DIR/tenant=main/day=2026-11-21/00000017.parquet  events logged on that day (UTC), by user, a user's in log order; zstd
  DIR/tenant=main/day=2026-11-21/00000017.npy      (2, n) uint64: a hash of every user in it and of every (user, event
                                                   id), 128 bits in two columns of halves, sorted by the first half
  DIR/archive.lock                                 held by the one process that writes
  DIR/through                                      an empty file; everything logged before its time is archived

TENANT is percent-encoded. A killed writer leaves files behind that the manifest does not name: nobody reads them, and
the next writer removes them. So replacing the manifest is the only commit there is. The files and the positions of the
partitions change in one step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import polars as pl

from storage.errors import StorageError
from storage.state.record_encoding import COLUMNS as RECORD_COLUMNS

MANIFEST = "archive.json"
THROUGH = "through"
LOCK = "archive.lock"
UNFINISHED = ".unfinished"
VERSION = 2
EARLIER_VERSION = (
    "the archive was written by an earlier lisarec (version {found}, this one knows {known}); run 'lisarec backup' "
    "with that version, 'lisarec restore' with this one, and archive to another directory"
)

COLUMNS = {
    "seq": pl.Int64,
    "partition": pl.Int32,
    "logged_ms": pl.Int64,
    **dict.fromkeys(RECORD_COLUMNS, pl.String),
    "timestamp_us": pl.Int64,
    "id_time_us": pl.Int64,
    "value": pl.Float64,
    "codes": pl.Binary,
}


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """One Parquet file of the manifest."""

    path: str  # relative to the archive
    tenant: str
    day: str
    rows: int

    @property
    def hashes_path(self) -> str:
        """The path of the file's hashes, relative to the archive."""
        return self.path.removesuffix(".parquet") + ".npy"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The list of the archive's files, and the positions that they reach in the log.

    archive_id  made with the archive; the log remembers it, so that no other archive is taken for it
    positions   partition -> its newest archived entry, as "SEQ-..."; every entry up to it is in the files
    files       in the order in which they were written
    """

    archive_id: str
    positions: Mapping[int, str]
    next_number: int
    files: tuple[ArchiveFile, ...]

    def seq(self, partition: int) -> int:
        """Return the number of the partition's newest archived entry; 0 before the first."""
        return int(self.positions.get(partition, "0").partition("-")[0])

    def to_json(self) -> str:
        """Return the manifest as the text of its file."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse the text of a manifest's file.

        raises  StorageError  when the text is no manifest of this version
        """
        try:
            fields = json.loads(text)
            if fields["version"] < VERSION:
                raise StorageError(EARLIER_VERSION.format(found=fields["version"], known=VERSION))
            if fields["version"] != VERSION:
                raise StorageError(f"the archive has version {fields['version']}, this lisarec knows {VERSION}")
            return cls(
                str(fields["archive_id"]),
                {int(number): str(place) for number, place in fields["positions"].items()},
                int(fields["next_number"]),
                tuple(ArchiveFile(**file) for file in fields["files"]),
            )
        except (ValueError, TypeError, LookupError, AttributeError) as exc:
            raise StorageError(f"{MANIFEST} is no list of archived files: {exc!r}") from exc


def archived_through_s(directory: Path) -> float | None:
    """Return the Unix time before which everything logged is archived; None before the archiver's first turn."""
    try:
        return (directory / THROUGH).stat().st_mtime
    except OSError:
        return None
