"""The files of an open database: whether they are still the ones at its path."""

import os
from pathlib import Path

from storage.errors import StorageUnavailable

PARTS = ("", "-wal", "-shm")  # the database, its write-ahead log and the log's index


class OpenFiles:
    """The files that some connection has open as long as this object is used.

    What is written to a file that was removed or replaced goes well, and is gone with the process.
    """

    def __init__(self, path: Path) -> None:
        self._paths = [path.with_name(path.name + part) for part in PARTS]
        self._identities = [_identity(part) for part in self._paths]
        self.failure: StorageUnavailable | None = None

    @property
    def log_bytes(self) -> int:
        """The size of the write-ahead log; 0 where it is gone."""
        try:
            return self._paths[1].stat().st_size
        except OSError:
            return 0

    def require_same(self) -> None:
        """Raise StorageUnavailable where a file was removed or replaced since it was opened."""
        self.look()
        if self.failure is not None:
            raise self.failure

    def look(self) -> None:
        """Note in `failure` whether a file was removed or replaced; one that was put back is as before."""
        for path, opened in zip(self._paths, self._identities, strict=True):
            try:
                is_same = _identity(path) == opened
            except OSError as exc:
                self.failure = _failure(f"'{path}' cannot be found while it is in use: {exc.strerror}")
                return
            if not is_same:
                self.failure = _failure(f"'{path}' was replaced while it is in use; put it back, or restart")
                return
        self.failure = None


def _failure(message: str) -> StorageUnavailable:
    return StorageUnavailable(message, "wrong_store")


def _identity(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino
