"""Writes data directories: the same rows give the same bytes, and a directory appears only when it is complete."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from storage.folders.local_folder import make_folder, sync

INTERACTION_COLUMNS = ("user_id", "item_id", "timestamp")
ITEM_COLUMNS = ("item_id", "title", "categories")

Row = tuple[object, ...]


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory, which becomes ``target`` when the block succeeds, and is removed otherwise.

    raises  FileExistsError  when ``target`` exists
    """
    if target.exists():
        raise FileExistsError(f"{str(target)!r} exists already; remove it or choose another directory with --out")
    make_folder(target.parent)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        unfinished = Path(scratch) / target.name
        unfinished.mkdir()
        yield unfinished
        for path in (unfinished, *unfinished.rglob("*")):
            sync(path)
        unfinished.rename(target)
        sync(target.parent)


def write_interactions(directory: Path, rows: Iterable[Row]) -> str:
    """Write ``interactions.tsv.gz``; return the SHA-256 of the uncompressed table, in hex."""
    return _write_table(directory / "interactions.tsv.gz", INTERACTION_COLUMNS, rows)


def write_items(directory: Path, rows: Iterable[Row]) -> str:
    """Write ``items.tsv.gz``; return the SHA-256 of the uncompressed table, in hex."""
    return _write_table(directory / "items.tsv.gz", ITEM_COLUMNS, rows)


def _write_table(path: Path, columns: Row, rows: Iterable[Row]) -> str:
    digest = hashlib.sha256()
    # the bytes must not depend on the file's name or the time of writing
    with (
        path.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as packed,
    ):
        for row in chain([columns], rows):
            line = ("\t".join(map(str, row)) + "\n").encode()
            digest.update(line)
            packed.write(line)
    return digest.hexdigest()
