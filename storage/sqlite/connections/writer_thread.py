"""Group commit: a sync costs far more than an event, so one thread commits all queued requests together."""

from __future__ import annotations

import asyncio
import copy
import errno
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from storage.errors import FailureCause, StorageBusy, StorageError, StorageUnavailable
from storage.sqlite.append import Append, append_all
from storage.sqlite.connections.open_files import OpenFiles

MAX_WAITING = 8192  # events, about half a second of work: beyond it, writes are refused instead of waiting longer
CAUSES: Mapping[int, FailureCause] = {  # by SQLite's primary result codes
    sqlite3.SQLITE_PERM: "refused",
    sqlite3.SQLITE_AUTH: "refused",
    sqlite3.SQLITE_BUSY: "locked",
    sqlite3.SQLITE_LOCKED: "locked",
    sqlite3.SQLITE_READONLY: "read_only",
    sqlite3.SQLITE_IOERR: "disk_error",
    sqlite3.SQLITE_FULL: "disk_full",
    sqlite3.SQLITE_CANTOPEN: "unreachable",
    sqlite3.SQLITE_CORRUPT: "damaged",
    sqlite3.SQLITE_NOTADB: "damaged",
}

CAUSES_OF_OS_ERRORS: Mapping[int, FailureCause] = {
    errno.EACCES: "refused",
    errno.EPERM: "refused",
    errno.EROFS: "read_only",
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EIO: "disk_error",
}

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Request:
    work: Callable[[sqlite3.Connection], Any]
    size: int
    answer: Future[Any] | asyncio.Future[Any]

    def begin(self) -> bool:
        """Return whether the work is still wanted; a thread's request cannot be withdrawn any more."""
        if isinstance(self.answer, Future):
            return self.answer.set_running_or_notify_cancel()
        return not self.answer.cancelled()


class WriterThread:
    """A thread that runs all queued requests in one transaction and then answers them; it owns the connection.

    waiting_size  the total size of all queued requests
    """

    def __init__(self, connection: sqlite3.Connection, files: OpenFiles) -> None:
        self._connection = connection
        self._files = files
        self._waiting: list[_Request] = []
        self.waiting_size = 0
        self._closed = False
        self._changed = threading.Condition()
        # A daemon: a program that forgets to close loses nothing that was answered, and can still exit.
        self._thread = threading.Thread(target=self._run, name="sqlite-writer", daemon=True)
        self._thread.start()

    def write(self, work: Callable[[sqlite3.Connection], T], size: int) -> asyncio.Future[T]:
        """Queue the work for the next group. Cancelling the answer before that group begins withdraws the work."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue(_Request(work, size, answer))
        return answer

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Do the same as `write`, for a thread without an event loop."""
        answer: Future[T] = Future()
        self._queue(_Request(work, 1, answer))
        return answer

    def _queue(self, request: _Request) -> None:
        with self._changed:
            if self._closed:
                raise StorageUnavailable("the store is closed", "closed")
            if self._waiting and self.waiting_size + request.size > MAX_WAITING:
                raise StorageBusy(f"{self.waiting_size} events wait to be written; try again later")
            self._waiting.append(request)
            self.waiting_size += request.size
            self._changed.notify()

    def close(self) -> None:
        """Refuse new requests; return when all accepted ones are answered."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with closing(self._connection):
            while group := self._next_group():
                self._commit_and_answer([one for one in group if one.begin()])

    def _next_group(self) -> list[_Request]:
        """Return all queued requests; none only when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            group, self._waiting, self.waiting_size = self._waiting, [], 0
        return group

    def _commit_and_answer(self, group: list[_Request]) -> None:
        try:
            results = self._commit(group)
        except Exception as exc:
            # A failure of the database concerns all requests; any other may come from a single one.
            if len(group) == 1 or isinstance(exc, sqlite3.OperationalError | StorageUnavailable):
                _answer(group, [_own_error(exc) for _ in group])
            else:
                for request in group:
                    self._commit_and_answer([request])
        else:
            _answer(group, results)

    def _commit(self, group: list[_Request]) -> list[Any]:
        """Run the group in one transaction: all of it is durable, or nothing happened.

        raises  StorageUnavailable  when the files are no longer those that were opened; others may have the commit
        """
        if self._files.has_failed:
            self._files.forget_other_contents(self._connection)
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            results = [result for run in _runs(group) for result in self._results(run)]
            number = self._files.count_commit(self._connection)
            self._files.require_same()  # if they are already gone, nothing is committed
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite has rolled back by itself after some errors
                self._connection.execute("ROLLBACK")
            raise
        self._files.remember(number)
        self._files.require_same()
        return results

    def _results(self, run: list[_Request]) -> Sequence[Any]:
        works = [request.work for request in run]
        appends = [work for work in works if isinstance(work, Append)]
        return append_all(self._connection, appends) if appends else [work(self._connection) for work in works]


def _runs(group: list[_Request]) -> list[list[_Request]]:
    """Return the requests in order, where consecutive appends that can be combined form one run."""
    runs: list[list[_Request]] = []
    for request in group:
        if runs and isinstance(request.work, Append) and request.work.combines_with(runs[-1][-1].work):
            runs[-1].append(request)
        else:
            runs.append([request])
    return runs


def _answer(group: Sequence[_Request], results: Sequence[Any]) -> None:
    """Answer the requests; those of one event loop together, because waking it takes longer than an answer."""
    of_loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for request, result in zip(group, results, strict=True):
        if isinstance(request.answer, Future):
            _set(request.answer, result)
        else:
            of_loops.setdefault(request.answer.get_loop(), []).append((request.answer, result))
    for loop, answers in of_loops.items():
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_set_all, answers)


def _set_all(answers: Iterable[tuple[asyncio.Future[Any], Any]]) -> None:
    for answer, result in answers:
        if not answer.done():
            _set(answer, result)


def _set(answer: Future[Any] | asyncio.Future[Any], result: Any) -> None:
    if isinstance(result, StorageError):
        answer.set_exception(result)
    else:
        answer.set_result(result)


def _own_error(cause: Exception) -> StorageError:
    """Return an error for one request: a raised exception collects the traceback of its waiter."""
    failure = storage_error(cause)
    failure.__cause__ = cause
    return failure


def storage_error(cause: Exception) -> StorageError:
    """Translate a failure of SQLite, or of a request's work, into the store's own error."""
    if isinstance(cause, sqlite3.Error):
        return StorageUnavailable(f"SQLite failed: {cause}", failure_cause(cause))
    if isinstance(cause, StorageError):
        return copy.copy(cause)
    return StorageError(f"the request could not be applied: {cause!r}")


def failure_cause(failure: Exception) -> FailureCause:
    """Return the cause of a failure of SQLite, or of the file system, as operators know it."""
    if isinstance(failure, OSError):
        return CAUSES_OF_OS_ERRORS.get(failure.errno or 0, "unreachable")
    if getattr(failure, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY_DBMOVED:
        return "wrong_store"
    primary_code = getattr(failure, "sqlite_errorcode", 0) & 0xFF
    return CAUSES.get(primary_code, "failed")
