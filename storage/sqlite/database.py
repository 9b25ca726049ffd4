"""The connections to one SQLite file: several for reading, and one for writing, with its own thread."""

import asyncio
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TypeVar

from storage.errors import StorageUnavailable
from storage.folders.folder import OWNER_ONLY
from storage.folders.local_folder import make_folder
from storage.sqlite.batches import require_aggregates
from storage.sqlite.connections.checkpoints import MAX_LOG_BYTES, CheckpointThread
from storage.sqlite.connections.open_files import OpenFiles, require_log_of_database
from storage.sqlite.connections.writer_thread import WriterThread, failure_cause, storage_error
from storage.sqlite.schema import create_schema
from storage.state.switch_interval import short_turns

FILE_NAME = "lisarec.sqlite3"
BUSY_TIMEOUT_S = 10.0
READERS = 2
SLOW_READ_S = 0.001
REFUSED_AFTER_SLOW = 32  # reads: a slow disk blocks the event loop only once in this many

T = TypeVar("T")


class Database:
    """A SQLite file that any number of processes share. It may be used from any event loop.

    The file and its tables are created if they do not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        make_folder(path.parent, OWNER_ONLY)
        require_log_of_database(path)
        with closing(self.connect()) as connection:
            require_aggregates(connection)
            _switch_to_wal(connection)
            create_schema(connection, path)
        with ExitStack() as opened:  # closes them if one fails
            connections = [opened.enter_context(closing(self.connect())) for _ in range(READERS + 4)]
            long_reader, inline, writer, checkpoints, *readers = connections
            for connection in (*readers, long_reader, inline):
                connection.execute("SELECT 1 FROM sqlite_schema").fetchone()  # opens the write-ahead log
            self._files = OpenFiles(path)
            opened.pop_all()
        self._readers = _Readers(readers, self._files, "sqlite-reader")
        self._long_reader = _Readers([long_reader], self._files, "sqlite-long-reader")
        self._inline = InlineReader(inline, self._files)
        self._writer = WriterThread(writer, self._files)
        self._checkpoints = CheckpointThread(checkpoints, self._files)
        self._closed = False

    def connect(self) -> sqlite3.Connection:
        """Open one more connection, which the caller closes.

        raises  StorageUnavailable  when the file cannot be used any more
        """
        try:
            return connect(self._path)
        except sqlite3.Error as exc:
            raise StorageUnavailable(f"cannot open '{self._path}': {exc}", failure_cause(exc)) from exc

    @property
    def waiting(self) -> int:
        """The total size of all queued writes."""
        return self._writer.waiting_size

    @property
    def failure(self) -> StorageUnavailable | None:
        """What is wrong with the files, as of the last half second; None if nothing is."""
        return self._files.failure

    def read(self, query: Callable[[sqlite3.Connection], T]) -> "asyncio.Future[T]":
        """Run a query of some milliseconds in a reader's thread."""
        return self._readers.run(self._require_usable(query))

    def read_now(self, query: Callable[[sqlite3.Connection], T]) -> T | None:
        """Run a query of some microseconds in the caller's thread; return None if `read` has to run it."""
        return self._inline.run(self._require_usable(query))

    def read_page(self, query: Callable[[sqlite3.Connection], T]) -> "asyncio.Future[T]":
        """Run a query that reads one page of a long result.

        All pages are read one after another, so that they delay each other but no short query. Some take milliseconds
        of Python, during which the thread often lets the event loop run.
        """
        usable = self._require_usable(query)

        def run(connection: sqlite3.Connection) -> T:
            with short_turns():
                return usable(connection)

        return self._long_reader.run(run)

    def _require_usable(self, query: Callable[[sqlite3.Connection], T]) -> Callable[[sqlite3.Connection], T]:
        self._require_open()
        if self._files.failure is not None:
            raise storage_error(self._files.failure)
        return query

    def write(self, work: Callable[[sqlite3.Connection], T], *, size: int = 1) -> "asyncio.Future[T]":
        """Run the work in the transaction of the next group. Its result arrives when it is durable.

        size  the size of the work in the queue, in events
        """
        self._require_open()
        return self._writer.write(work, size)

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Do the same as `write` for the store's own threads, which may finish their work while the store closes."""
        return self._writer.submit(work)

    def refuse_calls(self) -> None:
        """Refuse new reads and writes from now on; those of the store's own threads go on until `close`."""
        self._closed = True

    async def empty_log(self, timeout_s: float) -> bool:
        """Empty the write-ahead log; return whether that is done in time, else it continues in the background."""
        emptied = asyncio.wrap_future(self._checkpoints.empty_log())
        return emptied in (await asyncio.wait([emptied], timeout=timeout_s))[0]

    async def close(self) -> None:
        """Answer all accepted requests, then close every connection."""
        self.refuse_calls()
        await asyncio.to_thread(self._close)

    def _require_open(self) -> None:
        if self._closed:
            raise StorageUnavailable("the store is closed", "closed")

    def _close(self) -> None:
        self._readers.close()
        self._long_reader.close()
        self._inline.close()
        self._checkpoints.close()
        self._writer.close()
        if self._files.failure is None:
            self._files.close()


class _Readers:
    """Threads that read, each with one of the connections."""

    def __init__(self, connections: Sequence[sqlite3.Connection], files: OpenFiles, name: str) -> None:
        self._files = files
        self._idle: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        for connection in connections:
            self._idle.put(connection)
        self._threads = ThreadPoolExecutor(len(connections), thread_name_prefix=name)

    def run(self, query: Callable[[sqlite3.Connection], T]) -> "asyncio.Future[T]":
        """Run the query in a thread."""

        def run() -> T:
            connection = self._idle.get()
            try:
                if self._files.has_failed:
                    self._files.forget_other_contents(connection)
                return query(connection)
            except sqlite3.Error as exc:
                raise storage_error(exc) from exc
            finally:
                self._idle.put(connection)

        return asyncio.get_running_loop().run_in_executor(self._threads, run)

    def close(self) -> None:
        """Finish the queries, and close the connections."""
        self._threads.shutdown()
        with suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()


class InlineReader:
    """Runs short queries on the caller's event loop, with its own connection, which waits for no lock.

    It refuses queries that would have to wait, and some queries after a slow one. The readers' threads run these.
    """

    def __init__(self, connection: sqlite3.Connection, files: OpenFiles) -> None:
        connection.execute("PRAGMA busy_timeout = 0")
        self._connection = connection
        self._files = files
        self._in_use = threading.Lock()  # event loops of several threads may share the store
        self._refusals = 0  # still to make

    def run(self, query: Callable[[sqlite3.Connection], T]) -> T | None:
        """Return the result of the query; None if a thread has to run it."""
        if self._refusals > 0:
            self._refusals -= 1
            return None
        if not self._in_use.acquire(blocking=False):
            return None
        begin_s = time.perf_counter()
        try:
            if self._files.has_failed:
                self._files.forget_other_contents(self._connection)
            return query(self._connection)
        except sqlite3.Error:
            return None  # the thread waits for locks, and reports errors
        finally:
            if time.perf_counter() - begin_s > SLOW_READ_S:
                self._refusals = REFUSED_AFTER_SLOW
            self._in_use.release()

    def close(self) -> None:
        """Close the connection when no query is running."""
        with self._in_use:
            self._connection.close()


def connect(path: Path) -> sqlite3.Connection:
    """Open a connection whose commits are synced to disk."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON")  # moved or deleted data leave no copy behind in the pages
        connection.execute("PRAGMA cache_size = -32768")  # KiB
        connection.execute("PRAGMA wal_autocheckpoint = 8192")  # pages; a checkpoint syncs the whole file once more
        connection.execute(f"PRAGMA journal_size_limit = {MAX_LOG_BYTES}")  # of a log that is restarted
    except BaseException:
        connection.close()
        raise
    return connection


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """Use a write-ahead log. SQLite does not wait by itself when several processes create the file at once."""
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
