"""The contract of a folder: files by name, which appear completely or not at all.

Names are relative, with slashes. A folder fails as a file system does: FileNotFoundError where there is no such file,
another OSError where it cannot be reached, read or written.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

Version: TypeAlias = tuple[str, str]  # of a file's content, as the folder tells it; to be compared alone


class Content(NamedTuple):
    """The bytes of a file, the version that they are, and the Unix time of the file's last change."""

    data: bytes
    version: Version
    modified_s: float


class Overtaken(OSError):
    """Another process writes the folder: it holds the lock, or has replaced a file since this one read it."""


class Folder(Protocol):
    """A folder of files."""

    def names(self) -> Iterator[str]:
        """Yield the names of all files, those in folders below too, in no order."""

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name."""

    def read(self, name: str, known: Version | None = None) -> Content | None:
        """Return a file's content; None where it still is the known version."""

    def add(self, name: str, data: bytes | memoryview) -> None:
        """Write a file. It is durable when this returns."""

    def replace(self, name: str, data: bytes, version: Version | None) -> Version:
        """Write a file that is of this version, or that is not there (None), and return its new version.

        raises  Overtaken  when it is of another version; it stays as it is
        """

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def path(self, name: str, sha256: str | None = None) -> Path:
        """Return a file of this machine with the content: the file itself, or a copy whose hash was verified.

        sha256  the first digits of its hash, in hex; None where nobody knows it
        """

    def forget_copies_except(self, names: Collection[str]) -> None:
        """Remove the copies of all other files from this machine."""

    def writing(self) -> AbstractContextManager[None]:
        """Make the folder, and keep other processes of this machine from writing it, where a lock can do that.

        raises  Overtaken  when another one does
        """


def add_file(folder: Folder, name: str, path: Path) -> None:
    """Write a file with the content of another one, which is not empty; OSError when that fails."""
    with (
        path.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as data,
    ):
        folder.add(name, data)
