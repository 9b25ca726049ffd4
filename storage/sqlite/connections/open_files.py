"""Checks that the files of an open database are still those at its path, and have all commits.

Writes to a file that was removed, replaced or overwritten succeed, but are lost when the process ends. Three things
reveal such a file:

  identity   A file that was removed or replaced has another inode at its path.
  number     Every commit has the next number, in the first page of the database: `PRAGMA application_id`. It never
             decreases, neither for a connection nor in the main file, to which checkpoints copy it. The main file has
             the number of the last commit before the write-ahead log, and once all of the log is copied, that of the
             last commit in the log.
  last frame The write-ahead log has the frame that its index names as the last one. The formats of both are documented
             at https://www.sqlite.org/walformat.html and stay.

The number has 32 bits and wraps around, so the newer of two numbers is less than half a turn ahead.
"""

import os
import sqlite3
import struct
import threading
from pathlib import Path

from storage.errors import StorageUnavailable

PARTS = ("", "-wal", "-shm")  # the database, its write-ahead log and the log's index
TURN = 2**32
NUMBER_AT = 68  # of the main file, big-endian
INDEX_HEADER = struct.Struct("=14xHI4x8s8s8x")  # page size, frames, checksum and salt of the last one
INDEX = struct.Struct(f"={INDEX_HEADER.size}s{INDEX_HEADER.size}sI")  # twice; and how many frames the main file has
LOG_HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24
MAX_FRAMES = 2**31
READ_ATTEMPTS = 100  # while others commit

_descriptors: dict[tuple[int, int], list[int]] = {}  # by identity: a descriptor, and how many use it
_descriptors_lock = threading.Lock()


class OpenFiles:
    """The files that some connection has open as long as this object is used. Any thread may use it.

    failure     what was wrong at the last check; None if nothing was
    has_failed  whether anything was ever wrong
    """

    def __init__(self, path: Path) -> None:
        self._paths = [f"{path}{part}" for part in PARTS]  # texts, because the system takes these twice as fast
        self._identities = [_identity(part) for part in self._paths]
        self._main, self._log, self._index = map(_share_descriptor, self._paths)
        self._shared = list(self._identities)  # whose descriptors are to be released
        self._newest: int | None = None  # number of a commit that a connection has read or made
        self._newest_in_main = _number_in(self._main)
        self._is_behind = False  # a connection sees less than the newest one
        self._restored = 0  # how often the right contents came back
        self._forgotten: dict[int, int] = {}  # by connection: `_restored` when it last dropped its cache
        self.failure: StorageUnavailable | None = None
        self.has_failed = False

    def close(self) -> None:
        """Release the files. Call it when no connection of this object has them open any more."""
        while self._shared:
            _release_descriptor(self._shared.pop())

    @property
    def log_bytes(self) -> int:
        """The size of the write-ahead log; 0 if it does not exist."""
        try:
            return os.stat(self._paths[1]).st_size
        except OSError:
            return 0

    def require_same(self) -> None:
        """Raise StorageUnavailable unless the files are those that were opened, with all commits."""
        self.check()
        if self.failure is not None:
            raise self.failure

    def check(self) -> None:
        """Set `failure` if a file was removed, replaced or overwritten; clear it when the right files are back."""
        try:
            failure = self._moved() or self._overwritten()
        except OSError as exc:
            failure = _failure(f"'{self._paths[0]}' cannot be read while it is in use: {exc.strerror}")
        if failure is None and self.failure is not None:
            self._restored += 1
        self.has_failed |= failure is not None
        self.failure = failure

    def count_commit(self, connection: sqlite3.Connection) -> int:
        """Give the transaction of the connection the next number, and return it."""
        number = (self.read_number(connection) + 1) % TURN
        connection.execute(f"PRAGMA application_id = {number - TURN if number >= TURN // 2 else number}")
        return number

    def read_number(self, connection: sqlite3.Connection) -> int:
        """Return the number of the newest commit that the connection sees, and note whether it is behind others."""
        known = self._newest  # read first: others go on
        (signed,) = connection.execute("PRAGMA application_id").fetchone()
        number = int(signed) % TURN
        self._is_behind = known is not None and is_newer(known, number)
        self.remember(number)
        return number

    def remember(self, number: int) -> None:
        """Remember the number of a commit."""
        if self._newest is None or is_newer(number, self._newest):
            self._newest = number

    def forget_other_contents(self, connection: sqlite3.Connection) -> None:
        """Drop the connection's cache, which may have pages of files that were overwritten and put back."""
        if self.failure is not None or self._forgotten.get(id(connection), 0) != self._restored:
            connection.execute("PRAGMA shrink_memory")
            self._forgotten[id(connection)] = self._restored

    def _moved(self) -> StorageUnavailable | None:
        for path, opened in zip(self._paths, self._identities, strict=True):
            try:
                is_same = _identity(path) == opened
            except OSError as exc:
                return _failure(f"'{path}' cannot be found while it is in use: {exc.strerror}")
            if not is_same:
                return _failure(f"'{path}' was replaced while it is in use; put it back, or restart")
        return None

    def _overwritten(self) -> StorageUnavailable | None:
        for _ in range(READ_ATTEMPTS):
            index = os.pread(self._index, INDEX.size, 0)
            failure = self._difference(index)
            if failure is None or os.pread(self._index, INDEX.size, 0) == index:
                return failure
        return None

    def _difference(self, index: bytes) -> StorageUnavailable | None:
        """Return what is wrong. It does not count if the index has changed afterwards, because somebody was writing."""
        known = self._newest_in_main
        header, same_header, copied = INDEX.unpack(index.ljust(INDEX.size, b"\0"))
        page_bytes, frames, checksum, salt = INDEX_HEADER.unpack(header)
        if header != same_header:
            return None  # somebody is writing
        number = _number_in(self._main)
        if frames:
            log = _Log(self._log, page_bytes, salt)
            if not log.ends_with(frames, checksum):
                return _failure(f"'{self._paths[1]}' was overwritten or cut off while it is in use; put it back")
            least = log.first_number(range(frames, 0, -1)) if copied == frames else log.number_before()
            if least is not None and is_newer(least, number):
                return self._older()
        if is_newer(known, number) or self._is_behind:
            return self._older()
        self._newest_in_main = number
        return None

    def _older(self) -> StorageUnavailable:
        return _failure(f"'{self._paths[0]}' was overwritten by older data while it is in use; put it back")


class _Log:
    """A write-ahead log. Frames with another salt belong to an earlier log."""

    def __init__(self, descriptor: int, page_bytes: int, salt: bytes) -> None:
        self._descriptor = descriptor
        self._page_bytes = page_bytes
        self._salt = salt

    def ends_with(self, frames: int, checksum: bytes) -> bool:
        """Return whether it has this many frames, and the last one has this checksum, in native byte order."""
        in_order = struct.pack(">II", *struct.unpack("=II", checksum))
        return self._frame_header(frames)[8:] == self._salt + in_order

    def number_before(self) -> int | None:
        """Return the number of the last commit before the log; None if no commit in the log reveals it."""
        first = self.first_number(range(1, MAX_FRAMES))
        return None if first is None else (first - 1) % TURN

    def first_number(self, frames: range) -> int | None:
        """Return the number in the first of these frames that has the first page; None if none has."""
        for frame in frames:
            header = self._frame_header(frame)
            if header[8:16] != self._salt:
                return None
            if header[:4] == b"\0\0\0\1":
                at = self._position(frame) + FRAME_HEADER_BYTES + NUMBER_AT
                return int.from_bytes(os.pread(self._descriptor, 4, at), "big")
        return None

    def _frame_header(self, frame: int) -> bytes:
        return os.pread(self._descriptor, FRAME_HEADER_BYTES, self._position(frame))

    def _position(self, frame: int) -> int:
        return LOG_HEADER_BYTES + (frame - 1) * (FRAME_HEADER_BYTES + self._page_bytes)


def is_newer(number: int, other: int) -> bool:
    """Return whether `number` was given after `other`."""
    return 0 < (number - other) % TURN < TURN // 2


def require_log_of_database(path: Path) -> None:
    """Raise StorageUnavailable if the write-ahead log beside a database was begun over a newer database."""
    log = path.with_name(path.name + PARTS[1])
    if not path.exists() or not log.exists():
        return
    with log.open("rb") as file:
        header = file.read(LOG_HEADER_BYTES).ljust(LOG_HEADER_BYTES, b"\0")
        frames = _Log(file.fileno(), int.from_bytes(header[8:12], "big"), header[16:24])
        least = frames.number_before()  # before the main file, which only gets newer
    identity = _identity(path)
    number = _number_in(_share_descriptor(path))
    _release_descriptor(identity)
    if least is not None and is_newer(least, number):
        raise _failure(f"'{path}' is older than '{log}', one was overwritten; put back files that were together")


def _failure(message: str) -> StorageUnavailable:
    return StorageUnavailable(message, "wrong_store")


def _identity(path: str | Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _number_in(main: int) -> int:
    return int.from_bytes(os.pread(main, 4, NUMBER_AT), "big")


def _share_descriptor(path: str | Path) -> int:
    """Return the process's only descriptor of the file: closing any would end all its locks on the file."""
    identity = _identity(path)
    with _descriptors_lock:
        if identity not in _descriptors:
            _descriptors[identity] = [os.open(path, os.O_RDONLY | os.O_CLOEXEC), 0]
        shared = _descriptors[identity]
        shared[1] += 1
        return shared[0]


def _release_descriptor(identity: tuple[int, int]) -> None:
    with _descriptors_lock:
        shared = _descriptors[identity]
        shared[1] -= 1
        if not shared[1]:
            os.close(shared[0])
            del _descriptors[identity]
