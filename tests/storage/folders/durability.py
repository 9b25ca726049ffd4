"""A simulated disk: what a power cut would leave of files written by this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """Records syncs and renames from now on.

    torn  names that were given to files whose content was not synced yet; after a power cut these may be empty
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.torn: list[Path] = []
        self._synced: dict[int, Any] = {}  # by inode: the bytes of a file, the inodes in a folder by name
        fsync = os.fsync

        def synced(descriptor: int) -> None:
            fsync(descriptor)
            self._synced[os.fstat(descriptor).st_ino] = _content(Path(f"/proc/self/fd/{descriptor}"))

        monkeypatch.setattr(os, "fsync", synced)
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._checked(getattr(os, name)))

    def _checked(self, rename: Any) -> Any:
        def renamed(source: Path, target: Path) -> None:
            files = [Path(source), *Path(source).rglob("*")]
            self.torn += [Path(target) for path in files if path.is_file() and not self._has_content(path)]
            rename(source, target)

        return renamed

    def lost(self, *paths: Path) -> list[Path]:
        """Paths, or content below them, that a power cut may remove or change."""
        every = [path for given in paths for path in (given, *given.rglob("*"))]
        return [path for path in every if not self.has_name(path) or (path.is_file() and not self._has_content(path))]

    def has_name(self, path: Path) -> bool:
        """Return whether the name of the file or folder is on the disk."""
        return (self.names(path.parent) or {}).get(path.name) == path.stat().st_ino

    def names(self, folder: Path) -> dict[str, int] | None:
        """Inodes by name of the folder on the disk; None if it was never synced."""
        found: dict[str, int] | None = self._synced.get(folder.stat().st_ino)
        return found

    def _has_content(self, path: Path) -> bool:
        return bool(self._synced.get(path.stat().st_ino) == path.read_bytes())


def _content(path: Path) -> Any:
    return {entry.name: entry.inode() for entry in os.scandir(path)} if path.is_dir() else path.read_bytes()
