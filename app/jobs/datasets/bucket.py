"""Data directories and archives in a bucket, copied to this machine to train on."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from storage.archive.manifest import MANIFEST, Manifest
from storage.archive.reader import ArchiveReader, ArchiveSnapshot
from storage.folders.place import ObjectUrl, open_folder


def local_copy(url: ObjectUrl, cache: Path) -> Path:
    """Return a directory with the files of the data directory or archive, or of one tenant of an archive.

    raises  StorageError  when an archive cannot be read
            OSError       when a file cannot be copied
    """
    root, tenant = (url.parent, url.name) if url.name.startswith("tenant=") else (url, "")
    folder = open_folder(root, cache)
    directory = cache / "data" / hashlib.sha256(root.url.encode()).hexdigest()[:16]
    shutil.rmtree(directory, ignore_errors=True)
    names = [name for name in folder.names() if "/" not in name]
    _link(directory, {name: folder.path(name) for name in names if name != MANIFEST})
    if MANIFEST in names:

        def copy(snapshot: ArchiveSnapshot) -> Manifest:
            _link(directory, {file.path: snapshot.path(file) for file in snapshot.manifest.files})
            return snapshot.manifest

        manifest = ArchiveReader(folder).read(copy)
        (directory / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    (directory / tenant).mkdir(parents=True, exist_ok=True)
    return directory / tenant


def _link(directory: Path, copies: Mapping[str, Path]) -> None:
    """Give the copies their names in the directory."""
    for name, copy in copies.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.link(copy, path)
