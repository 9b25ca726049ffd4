"""Keeping the write-ahead log short, and free of erased data."""

import logging
import sqlite3
import threading
from concurrent.futures import Future
from contextlib import suppress

from storage.sqlite.connections.open_files import OpenFiles

MAX_LOG_BYTES = 64 << 20  # SQLite's own checkpoints begin at half of it
TURN_S = 0.5
MAX_WAIT_MS = 20  # for readers, in each turn, which blocks writers
WARN_AFTER_TURNS = 20

logger = logging.getLogger(__name__)


class CheckpointThread:
    """A thread that checks the files, and empties the write-ahead log on request or when it is long.

    SQLite's own checkpoints never wait for readers. If there is always a reader, each copies what it can, but none
    restarts the log. This thread waits for readers, but only briefly in each turn: readers of this program take
    milliseconds, while those of another program may take hours. The thread owns the connection.
    """

    def __init__(self, connection: sqlite3.Connection, files: OpenFiles) -> None:
        connection.execute(f"PRAGMA busy_timeout = {MAX_WAIT_MS}")
        self._connection = connection
        self._files = files
        self._asked: list[Future[None]] = [Future()]  # a process that was killed may have left copies
        self._turns_in_vain = 0
        self._is_new = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="sqlite-checkpoints", daemon=True)
        self._thread.start()

    def empty_log(self) -> Future[None]:
        """Empty the log, in as many turns as needed, so that all current commits are only in the database."""
        emptied: Future[None] = Future()
        with self._changed:
            self._asked.append(emptied)
            self._is_new = True
            self._changed.notify()
        return emptied

    def close(self) -> None:
        """Stop. The last connection to the file empties the log when it is closed."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                asked, self._is_new = list(self._asked), False
            self._check_files()
            if self._files.failure is None and (asked or self._files.log_bytes > MAX_LOG_BYTES):
                self._take_turn(asked)
            with self._changed:
                self._changed.wait_for(lambda: self._is_new or self._closed, TURN_S)
        self._check_files()
        if self._files.failure is None:
            self._connection.close()
        else:  # closing the last connection would copy the log into other files than its own, and remove it
            threading.Thread(target=_wait_for_ever, args=(self._connection,), daemon=True).start()

    def _check_files(self) -> None:
        with suppress(sqlite3.Error):  # `check` finds the reason
            self._files.forget_other_contents(self._connection)
            self._files.read_number(self._connection)
        self._files.check()

    def _take_turn(self, asked: list[Future[None]]) -> None:
        if not self._is_emptied():
            self._turns_in_vain += 1
            if self._turns_in_vain % WARN_AFTER_TURNS == 0:
                size = self._files.log_bytes >> 20
                logger.warning("a long read of another program delays emptying the write-ahead log (%d MB)", size)
            return
        self._turns_in_vain = 0
        with self._changed:
            self._asked = self._asked[len(asked) :]
        for one in asked:
            if one.set_running_or_notify_cancel():
                one.set_result(None)

    def _is_emptied(self) -> bool:
        try:
            # copies most of it while others write
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            (is_busy, _, _) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error as exc:
            logger.warning("cannot empty the write-ahead log, retrying: %s", exc)
            return False
        return not is_busy


def _wait_for_ever(_connection: sqlite3.Connection) -> None:
    threading.Event().wait()
