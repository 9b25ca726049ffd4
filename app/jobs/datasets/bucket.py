"""Data directories and archives in a bucket, copied to this machine to train on."""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from storage.archive.manifest import MANIFEST, Manifest
from storage.archive.reader import ArchiveReader, ArchiveSnapshot
from storage.folders.place import ObjectUrl, open_folder


def local_copy(url: ObjectUrl, cache: Path) -> Path:
    """Return a directory with the files of the data directory or archive, or of one tenant of an archive.

    Only this process uses the directory, which stays unchanged until the process ends.

    raises  StorageError  when an archive cannot be read
            OSError       when a file cannot be copied
    """
    root, tenant = (url.parent, url.name) if url.name.startswith("tenant=") else (url, "")
    folder = open_folder(root, cache)
    directory = own_directory(cache / "data" / hashlib.sha256(root.url.encode()).hexdigest()[:16])
    names = [name for name in folder.names() if name.rpartition("/")[0] in ("", tenant)]
    _link(directory, {name: folder.path(name) for name in names if name != MANIFEST})
    if MANIFEST in names:

        def copy(snapshot: ArchiveSnapshot) -> Manifest:
            _link(directory, {file.path: snapshot.path(file) for file in snapshot.manifest.files})
            return snapshot.manifest

        manifest = ArchiveReader(folder).read(copy)
        (directory / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    (directory / tenant).mkdir(parents=True, exist_ok=True)
    return directory / tenant


def own_directory(parent: Path) -> Path:
    """Make a directory that is removed when this process ends, and remove those of processes that were killed."""
    parent.mkdir(parents=True, exist_ok=True)
    making = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(making, fcntl.LOCK_EX)  # so that nobody removes a directory between its creation and its lock
        for other in parent.iterdir():
            _remove_unless_held(other)
        directory = Path(mkdtemp(dir=parent))
        fcntl.flock(os.open(directory, os.O_RDONLY), fcntl.LOCK_EX)  # open as long as the process
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    finally:
        os.close(making)
    return directory


def _remove_unless_held(directory: Path) -> None:
    with suppress(FileNotFoundError):  # its process has removed it just now
        other = os.open(directory, os.O_RDONLY)
        try:
            with suppress(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
        finally:
            os.close(other)


def _link(directory: Path, copies: Mapping[str, Path]) -> None:
    """Give the copies their names in the directory."""
    for name, copy in copies.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.link(copy, path)
