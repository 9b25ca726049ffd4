"""The protocol of a folder: files by name, which appear completely or not at all.

Names are relative paths with slashes. Methods raise FileNotFoundError if a file does not exist, and another OSError if
it cannot be reached, read or written.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

OWNER_ONLY = 0o700  # permissions of a folder with data of users, if it does not exist yet
MAX_CONDITIONAL = 1 << 24  # bytes; buckets take such a file in one request, which must end before it times out

Version: TypeAlias = tuple[str, str]  # identifies a file's content; opaque, only to be compared


class Content(NamedTuple):
    """The bytes of a file, their version, and the Unix time of the file's last change."""

    data: bytes
    version: Version
    modified_s: float


class Overtaken(OSError):
    """Another process writes the folder: it holds the lock, or has replaced a file since this process read it."""


class Folder(Protocol):
    """A folder of files."""

    def names(self) -> Iterator[str]:
        """Yield the names of all files, including those in subfolders, in no particular order."""

    def has(self, name: str) -> bool:
        """Return whether a file with this name exists."""

    def read(self, name: str, known: Version | None = None) -> Content | None:
        """Return a file's content; None if the file still has the known version."""

    def add(self, name: str, data: bytes | memoryview) -> None:
        """Write a file. It is durable when this method returns."""

    def replace(self, name: str, data: bytes | memoryview, version: Version | None) -> Version:
        """Write a file that has this version, or does not exist yet (None), and return its new version.

        raises  Overtaken  if it has another version; the file is unchanged then
        """

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    def path(self, name: str, sha256: str | None = None) -> Path:
        """Return the path of a local file with this content: the file itself, or a copy.

        sha256  leading hex digits of the content's hash, which a new copy must match; None: unknown, so not verified
        """

    def forget_copies_except(self, names: Collection[str]) -> None:
        """Remove the local copies of all other files."""

    def writing(self) -> AbstractContextManager[None]:
        """Create the folder and, if it can be locked, prevent other local processes from writing to it.

        raises  Overtaken  if another process holds the lock
        """


def add_file(folder: Folder, name: str, path: Path, *, is_new: bool = False) -> None:
    """Write a file with the content of another one, which must not be empty.

    is_new  do not replace a file; beyond MAX_CONDITIONAL bytes, one that appears during the call is replaced
    raises  Overtaken  if the file exists, and may not be replaced
            OSError    if writing fails
    """
    with (
        path.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as data,
    ):
        if is_new and len(data) <= MAX_CONDITIONAL:
            folder.replace(name, data, None)
        elif is_new and folder.has(name):
            raise Overtaken(f"another process has written '{folder}/{name}'")
        else:
            folder.add(name, data)
