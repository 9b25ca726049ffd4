"""The connections to one SQLite file: a few that read, and one whose thread writes."""

import asyncio
import queue
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

from storage.errors import StorageUnavailable
from storage.sqlite.schema import create_schema
from storage.sqlite.writer_thread import WriterThread, storage_error

FILE_NAME = "lisarec.sqlite3"
BUSY_TIMEOUT_S = 10.0
READERS = 2

T = TypeVar("T")


class Database:
    """A SQLite file that any number of processes share. It may be used from any event loop.

    The file and its tables are created if they do not exist yet.
    """

    def __init__(self, path: Path, max_waiting_events: int) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(self.connect()) as connection:
            _switch_to_wal(connection)
            create_schema(connection, path)
        self._idle_readers: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        for _ in range(READERS):
            self._idle_readers.put(self.connect())
        self._reader_threads = ThreadPoolExecutor(READERS, thread_name_prefix="sqlite-reader")
        self._writer = WriterThread(self.connect(), max_waiting_events)
        self._closed = False

    def connect(self) -> sqlite3.Connection:
        """Open one more connection, which the caller closes."""
        return connect(self._path)

    @property
    def waiting(self) -> int:
        """The size of all writes that wait."""
        return self._writer.waiting

    def read(self, query: Callable[[sqlite3.Connection], T]) -> "asyncio.Future[T]":
        """Run the query in a reader's thread."""
        self._require_open()

        def run() -> T:
            connection = self._idle_readers.get()
            try:
                return query(connection)
            except sqlite3.Error as exc:
                raise storage_error(exc) from exc
            finally:
                self._idle_readers.put(connection)

        return asyncio.get_running_loop().run_in_executor(self._reader_threads, run)

    def write(self, work: Callable[[sqlite3.Connection], T], *, size: int = 1) -> "asyncio.Future[T]":
        """Run the work in the transaction of the next group; its result comes when it is durable.

        size  how much the work counts among what waits, in events
        """
        self._require_open()
        return asyncio.wrap_future(self._writer.submit(work, size))

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Do the same as `write` for the store's own threads, which also finish their work while it closes."""
        return self._writer.submit(work, 1)

    def refuse_calls(self) -> None:
        """Refuse new reads and writes from now on; those of the store's own threads go on until `close`."""
        self._closed = True

    async def close(self) -> None:
        """Finish and answer what was accepted, then close every connection."""
        self.refuse_calls()
        await asyncio.to_thread(self._close)

    def _require_open(self) -> None:
        if self._closed:
            raise StorageUnavailable("the store is closed", "closed")

    def _close(self) -> None:
        self._reader_threads.shutdown()
        with suppress(queue.Empty):
            while True:
                self._idle_readers.get_nowait().close()
        self._writer.close()


def connect(path: Path) -> sqlite3.Connection:
    """Open a connection whose commits are synced to disk."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = ON")  # what is moved or deleted leaves no copy behind in the pages
    connection.execute("PRAGMA cache_size = -32768")  # KiB
    connection.execute("PRAGMA wal_autocheckpoint = 8192")  # pages; a checkpoint syncs the whole file once more
    return connection


def empty_write_ahead_log(db: sqlite3.Connection) -> None:
    """Truncate the write-ahead log, so that no copy of erased pages is left in it; wait for other users of the file."""
    give_up_at = time.monotonic() + BUSY_TIMEOUT_S
    while time.monotonic() < give_up_at:
        (is_busy, _, _) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if not is_busy:
            return
        time.sleep(0.01)
    raise StorageUnavailable("the user is erased, but the write-ahead log could not be emptied; erase again", "locked")


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """Use a write-ahead log. SQLite does not wait by itself when several processes make the file at once."""
    give_up_at = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.01)
        else:
            return
