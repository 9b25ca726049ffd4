"""The archive's manifest: which files count, and how far each partition of the log is archived.

  archive.json                              the manifest, see `Manifest`; only replaced as a whole
  tenant=main/day=2026-11-21/NAME.parquet   events logged on that day (UTC), or archived on it if that was long after,
                                            by user, a user's in log order; zstd
  tenant=main/day=2026-11-21/NAME.npy       (2, n) uint64: a hash of every user in it and of every (user, event id), 128
                                            bits in two columns of halves, sorted by the first half
  archive.lock                              held by the one process that writes, where the folder is a directory
  through                                   a Unix time; everything logged before it is archived

NAME is a number and the first 32 hex digits of each file's SHA-256, as 00000017-HASH-HASH: files of two writers have
two names, and a copy can be verified. Earlier files have only the number. TENANT is percent-encoded.

A killed writer leaves files behind that the manifest does not name: nobody reads them, and the next writer removes
them. So replacing the manifest is the only commit. The files and the positions of the partitions change in one step. A
writer first commits a manifest with its own id; after that, an earlier writer can no longer commit.

Other programs may read these files, as docs/reference/data-formats.md says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import polars as pl

from storage.errors import StorageError
from storage.folders.folder import Folder
from storage.state.record_encoding import COLUMNS as RECORD_COLUMNS

MANIFEST = "archive.json"
THROUGH = "through"
VERSION = 4
FILE_NAME = re.compile(r"[0-9a-f-]+\.parquet")
EARLIER_VERSION = (
    "the archive was written by an earlier lisarec (version {found}, this version supports {known}); run "
    "'lisarec backup' with that version, 'lisarec restore' with this one, and archive to another directory"
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


def tenant_folder(tenant: str) -> str:
    """Return the name of the folder with the tenant's files."""
    return f"tenant={quote(tenant, safe='')}"


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

    def local_path(self, archive: Folder) -> Path:
        """Return the path of a local file with the content of this one: in the archive itself, or a verified copy."""
        return archive.path(self.path, self._digests[0])

    def local_hashes(self, archive: Folder) -> Path:
        """Return the same for the file's hashes."""
        return archive.path(self.hashes_path, self._digests[1])

    @property
    def _digests(self) -> tuple[str, str] | tuple[None, None]:
        """The first digits of the SHA-256 of the file and of its hashes; None for a file of an earlier version."""
        match PurePosixPath(self.path).stem.split("-"):
            case [_, first, second]:
                return first, second
        return None, None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The list of the archive's files, and the positions that they reach in the log.

    archive_id  created with the archive; the log stores it, so that no other archive is mistaken for it
    positions   partition -> its newest archived entry, as "SEQ-..."; every entry up to it is in the files
    files       in the order in which they were written
    writer      random id of the last writer that opened the archive
    must_scrub  whether days were dropped whose events the files of the log's store may still have
    """

    archive_id: str
    positions: Mapping[int, str]
    next_number: int
    files: tuple[ArchiveFile, ...]
    writer: str = ""
    must_scrub: bool = False

    def names(self) -> set[str]:
        """Return the names of all files, and of their hashes."""
        return {name for file in self.files for name in (file.path, file.hashes_path)}

    def seq(self, partition: int) -> int:
        """Return the number of the partition's newest archived entry; 0 before the first."""
        return int(self.positions.get(partition, "0").partition("-")[0])

    def to_json(self) -> str:
        """Return the manifest as the text of its file."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse the text of a manifest's file.

        raises  StorageError  when the text is not a manifest of this version
        """
        try:
            fields = json.loads(text)
            if fields["version"] < VERSION:
                raise StorageError(EARLIER_VERSION.format(found=fields["version"], known=VERSION))
            if fields["version"] != VERSION:
                raise StorageError(f"the archive has version {fields['version']}, but this lisarec supports {VERSION}")
            return cls(
                str(fields["archive_id"]),
                {int(number): str(place) for number, place in fields["positions"].items()},
                int(fields["next_number"]),
                tuple(_listed_file(**file) for file in fields["files"]),
                str(fields.get("writer", "")),
                bool(fields.get("must_scrub", False)),
            )
        except (ValueError, TypeError, LookupError, AttributeError) as exc:
            raise StorageError(f"{MANIFEST} is not a list of archived files: {exc!r}") from exc


def _listed_file(path: str, tenant: str, day: str, rows: int) -> ArchiveFile:
    """Return a file of the manifest; raises ValueError if it is not where the writer puts files.

    Files are read, copied and removed by their paths, so no path may lead out of the archive.
    """
    folder, _, name = path.rpartition("/")
    date.fromisoformat(day)
    if folder != f"{tenant_folder(tenant)}/day={day}" or not FILE_NAME.fullmatch(name):
        raise ValueError(f"'{path}' is not a path of a file of {tenant} and {day}")
    return ArchiveFile(path, tenant, day, rows)


def archived_through_s(folder: Folder) -> float | None:
    """Return the Unix time before which everything logged is archived.

    It is None before the archiver's first turn, and while the archive cannot be read.
    """
    try:
        found = folder.read(THROUGH)
        return None if found is None else float(found.data)
    except (OSError, ValueError):  # earlier archivers left the file empty
        return None
