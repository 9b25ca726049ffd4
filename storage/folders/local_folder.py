"""A directory on this machine, or on a file system that is mounted on it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from typing_extensions import override

from storage.folders.folder import OWNER_ONLY, Content, Folder, Overtaken, Version

LOCK = "archive.lock"
UNFINISHED = ".unfinished"


class LocalFolder(Folder):
    """A directory. Files appear by rename. Only one process at a time, the holder of the lock, replaces them."""

    def __init__(self, directory: Path) -> None:
        self._directory = Path(directory)

    def __str__(self) -> str:
        return str(self._directory)

    @override
    def names(self) -> Iterator[str]:
        for path in [*self._directory.rglob("*")]:  # a list, because the caller may remove files during the iteration
            if path.is_file():
                yield path.relative_to(self._directory).as_posix()

    @override
    def has(self, name: str) -> bool:
        return (self._directory / name).is_file()

    @override
    def read(self, name: str, known: Version | None = None) -> Content | None:
        with (self._directory / name).open("rb") as file:
            found = os.fstat(file.fileno())
            version = _version(found)
            return None if version == known else Content(file.read(), version, found.st_mtime)

    @override
    def add(self, name: str, data: bytes | memoryview) -> None:
        """Write a file that appears on disk with all of its content, or not at all."""
        path = self._directory / name
        make_folder(path.parent)
        replace_file(path, data)

    @override
    def replace(self, name: str, data: bytes | memoryview, version: Version | None) -> Version:
        path = self._directory / name
        if version != (_version(path.stat()) if path.exists() else None):
            raise Overtaken(f"another process has replaced '{path}'")
        self.add(name, data)
        return _version(path.stat())

    @override
    def remove(self, name: str) -> None:
        path = self._directory / name
        path.unlink(missing_ok=True)
        if path.parent != self._directory:
            with suppress(OSError):  # not empty
                path.parent.rmdir()

    @override
    def path(self, name: str, sha256: str | None = None) -> Path:
        return self._directory / name

    @override
    def forget_copies_except(self, names: Collection[str]) -> None:
        pass  # there are none

    @override
    @contextmanager
    def writing(self) -> Iterator[None]:
        make_folder(self._directory, OWNER_ONLY)
        with (self._directory / LOCK).open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise Overtaken(f"another process has locked '{lock.name}'") from exc
            for path in self._directory.glob(f"*{UNFINISHED}"):
                path.unlink()
            yield


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder with these permissions and its missing parents, whose names are durable afterwards."""
    missing = [one for one in (folder, *folder.parents) if not one.is_dir()]
    folder.mkdir(mode, parents=True, exist_ok=True)
    for one in missing:
        sync(one.parent)


def replace_file(path: Path, data: bytes | memoryview, mode: int | None = None) -> None:
    """Write a file that appears on disk with all of its content, or not at all; then the previous one remains.

    mode  the file's permissions, which it has from the beginning; by default those of the process
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    unfinished.unlink(missing_ok=True)  # it may have other permissions
    try:
        with open(unfinished, "wb", opener=partial(os.open, mode=0o666 if mode is None else mode)) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)  # regardless of the umask
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except OSError:
        unfinished.unlink(missing_ok=True)  # on a full disk it would take the room that the next attempt needs
        raise
    sync(path.parent)


def _version(found: os.stat_result) -> Version:
    return str(found.st_ino), f"{found.st_mtime_ns}-{found.st_size}"


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
