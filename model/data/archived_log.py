"""The event log of the service as a data directory: the Parquet files that 'lisarec archive' has written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import polars as pl

from model.config import IMPRESSION
from model.data.interactions import DataError
from model.data.table import Table

Found = TypeVar("Found")
ARCHIVE_MANIFEST = "archive.json"  # see storage/archive/manifest.py
ARCHIVE_ATTEMPTS = 5
ARCHIVE_VERSION = 4
ARCHIVE_COLUMNS = ("kind", "user_id", "seq", "event_id", "item_id", "timestamp_us", "type", "value", "order_id")
ARCHIVE_COLUMNS_AS_TEXT = {
    "user_id": pl.col("user_id"),
    "item_id": pl.col("item_id"),
    "timestamp": (pl.col("timestamp_us") / 1e6).cast(pl.String),
    "type": pl.col("type"),
    "value": pl.col("value").cast(pl.String),
    "order_id": pl.col("order_id"),
}


def read_archive(directory: Path) -> Table | None:
    """Read the events of an archive, DIR, or of one of its tenants, DIR/tenant=NAME; None if there is no archive.

    Each user's events keep the order of the log. The digest is that of the table as text, so it does not depend on the
    division of the archive into files.
    """
    if not is_archive(directory):
        return None

    def read(paths: list[Path]) -> Table:
        log = pl.concat([pl.read_parquet(path, columns=[*ARCHIVE_COLUMNS]) for path in paths])
        table = Corrections.of(log.lazy()).effective(log).sort("user_id", "seq").select(**ARCHIVE_COLUMNS_AS_TEXT)
        return Table(directory, table, hashlib.sha256(table.write_csv(separator="\t").encode()).hexdigest())

    return with_archived_files(directory, read)


def is_archive(directory: Path) -> bool:
    """Return whether the directory is an archive, or one tenant's part of it."""
    return (_root(directory) / ARCHIVE_MANIFEST).is_file()


def with_archived_files(directory: Path, read: Callable[[list[Path]], Found]) -> Found:
    """Return the result of `read` for the archive's files. If an archiver merges them meanwhile, read again.

    raises  DataError  when they cannot be read
    """
    root = _root(directory)
    tenant = "" if root == directory else directory.name
    for _ in range(ARCHIVE_ATTEMPTS):
        paths = [root / path for path in _archived_files(root / ARCHIVE_MANIFEST, tenant)]
        try:
            return read(paths)
        except FileNotFoundError:
            continue
        except (OSError, pl.exceptions.PolarsError) as exc:
            raise DataError(f"archive {str(root)!r} cannot be read: {str(exc)[:200]}") from exc
    raise DataError(f"archive {str(root)!r} lacks files that {ARCHIVE_MANIFEST} lists")


def _root(directory: Path) -> Path:
    return directory.parent if directory.name.startswith("tenant=") else directory


class Corrections(NamedTuple):
    """The events of a log that do not count: undone events, and those of users who were merged into another one."""

    undone: pl.DataFrame
    merged: pl.DataFrame

    @classmethod
    def of(cls, log: pl.LazyFrame) -> Corrections:
        """Find the corrections in a whole log."""
        undone = log.filter(pl.col("kind") == "undo").select("user_id", "event_id")
        merged = log.filter(pl.col("kind") == "merge").select("user_id")
        return cls(undone.collect(), merged.collect())

    def effective(self, log: pl.DataFrame) -> pl.DataFrame:
        """Return the effective events of a part of the log. Those of merged users have copies in other logs."""
        events = log.filter((pl.col("kind") == "event") & (pl.col("type") != IMPRESSION))
        kept = events.join(self.undone, on=["user_id", "event_id"], how="anti")
        return kept.join(self.merged, on="user_id", how="anti")


def _archived_files(manifest: Path, folder: str) -> list[str]:
    """Return the paths of the Parquet files in the manifest, of one tenant's folder if there are several."""
    try:
        fields = json.loads(manifest.read_text(encoding="utf-8"))
        version, files = fields["version"], fields["files"]
        paths = [Path(file["path"]) for file in files]
    except (OSError, ValueError, TypeError, LookupError) as exc:
        raise DataError(f"{manifest} is not a list of archived files: {exc!r}") from exc
    if version != ARCHIVE_VERSION:
        raise DataError(
            f"archive {str(manifest.parent)!r} has version {version}, but this lisarec reads {ARCHIVE_VERSION}; run "
            "'lisarec backup' with the version that wrote it, 'lisarec restore' with this one, and archive to a new "
            "directory"
        )
    folders = sorted({path.parts[0] for path in paths})
    if not folders:
        raise DataError(f"archive {str(manifest.parent)!r} has no events yet; run 'lisarec archive'")
    if not folder and len(folders) > 1:
        named = ", ".join(str(manifest.parent / name) for name in folders[:5])
        raise DataError(f"archive {str(manifest.parent)!r} has several tenants; choose one of {named}")
    if folder and folder not in folders:
        raise DataError(f"archive {str(manifest.parent)!r} has no {folder!r}; it has {', '.join(folders[:5])}")
    return [str(path) for path in paths if path.parts[0] == (folder or folders[0])]
