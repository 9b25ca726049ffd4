"""The embedded store: one SQLite file, shared by any number of processes.

Events are logged, folded and acknowledged in one transaction, synced to disk. A sync costs far more than an event,
so one writer thread commits everything that waits as one group.
"""

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from storage.state import Effect, Event, Generation, State, StateError, digest, event_fields
from storage.store import Appended, LogEntry, StorageBusy, StorageError, StorageUnavailable

FILE_NAME = "lisarec.sqlite3"
SCHEMA_VERSION = 2
BUSY_TIMEOUT_S = 10.0
READERS = 2
# A state this many entries behind the log is folded by a reader first, so that no writer waits for it.
FAR_BEHIND = 1000
# About half a second of work: who comes later hears StorageBusy instead of waiting longer.
MAX_WAITING_EVENTS = 8192

# AUTOINCREMENT, so that a sequence number is never used again: states and readers remember how far they got.
# log_by_user ends in the rowid, which is seq: it also finds a user's newest entry.
SCHEMA = """
CREATE TABLE log (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    user_id TEXT NOT NULL,
    event_id TEXT NOT NULL,
    item_id TEXT NOT NULL,
    type TEXT NOT NULL,
    timestamp_us INTEGER NOT NULL,
    id_time_us INTEGER,
    value REAL,
    recommendation_id TEXT
);
CREATE UNIQUE INDEX log_by_event ON log (tenant, user_id, event_id);
CREATE INDEX log_by_user ON log (tenant, user_id);
CREATE TABLE states (
    tenant TEXT NOT NULL,
    user_id TEXT NOT NULL,
    generation BLOB NOT NULL,
    through_seq INTEGER NOT NULL, -- the last log entry that is folded into the value
    value BLOB NOT NULL,
    PRIMARY KEY (tenant, user_id, generation)
);
"""

# Who was erased and how far the log went then, for copies of the log that are made elsewhere.
ERASURES_SCHEMA = """
CREATE TABLE erasures (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    user BLOB NOT NULL, -- digest of the user's id
    through_seq INTEGER NOT NULL
)
"""

EVENT_COLUMNS = "event_id, user_id, item_id, type, timestamp_us, id_time_us, value, recommendation_id"

INSERT_EVENT = f"""
INSERT INTO log (tenant, {EVENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING
"""  # noqa: S608, the columns are the constant above

SELECT_EVENTS = f"""
SELECT seq, {EVENT_COLUMNS} FROM log WHERE tenant = ? AND user_id = ? AND seq > ? ORDER BY seq LIMIT ?
"""  # noqa: S608, the columns are the constant above
NO_LIMIT = -1

SELECT_STATE = """
SELECT newest.seq, states.through_seq, states.value
FROM (SELECT max(seq) AS seq FROM log WHERE tenant = :tenant AND user_id = :user_id) AS newest
LEFT JOIN states ON states.tenant = :tenant AND states.user_id = :user_id AND states.generation = :generation
"""

# A state that somebody else has brought further meanwhile stays.
UPSERT_STATE = """
INSERT INTO states (tenant, user_id, generation, through_seq, value) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (tenant, user_id, generation) DO UPDATE SET through_seq = excluded.through_seq, value = excluded.value
WHERE excluded.through_seq >= states.through_seq
"""

logger = logging.getLogger(__name__)
T = TypeVar("T")


class SQLiteStore:
    """A UserStore in one directory. Make it with `open`; it may be used from any event loop."""

    def __init__(self, path: Path, generations: Sequence[Generation], max_waiting_events: int) -> None:
        self._generations = tuple(generations)
        self._idle_readers: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        for _ in range(READERS):
            self._idle_readers.put(_connect(path))
        self._reader_threads = ThreadPoolExecutor(READERS, thread_name_prefix="sqlite-reader")
        self._writer = _GroupCommit(_connect(path), max_waiting_events)
        self._closed = False

    @classmethod
    async def open(
        cls, directory: Path, generations: Sequence[Generation], *, max_waiting_events: int = MAX_WAITING_EVENTS
    ) -> "SQLiteStore":
        """Open the store in the directory, or make it there.

        raises  ValueError          when there is no generation
                StorageUnavailable  when the directory or file cannot be used
                StorageError        when a newer lisarec has written the file
        """
        if not generations:
            raise ValueError("a store needs at least one live generation")
        path = Path(directory) / FILE_NAME

        def open_files() -> "SQLiteStore":
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                _prepare(path)
                return cls(path, generations, max_waiting_events)
            except (OSError, sqlite3.Error) as exc:
                raise StorageUnavailable(f"cannot open '{path}': {exc}") from exc

        return await asyncio.to_thread(open_files)

    async def append(self, tenant: str, events: Sequence[Event]) -> list[Appended]:
        if not events:
            return []
        while True:
            try:
                return await self._write(lambda db: _append(db, self._generations, tenant, events), size=len(events))
            except _FarBehindError as exc:
                for generation in self._generations:
                    await self.states(tenant, [exc.user_id], generation)

    async def states(self, tenant: str, user_ids: Sequence[str], generation: Generation) -> list[bytes | None]:
        users = await self._read(
            lambda db: {user_id: _current(db, generation, tenant, user_id) for user_id in user_ids}
        )
        caught_up = {
            user_id: _UserFold([user.state], user.newest_seq)
            for user_id, user in users.items()
            if user.folded_seq < user.newest_seq
        }
        if caught_up:
            await self._write(lambda db: _keep_unless_erased(db, generation, tenant, caught_up), size=len(caught_up))
        return [generation.encode(user.state) if user.newest_seq else None for user in map(users.__getitem__, user_ids)]

    async def seen_items(self, tenant: str, user_id: str) -> set[str]:
        sql = "SELECT DISTINCT item_id FROM log WHERE tenant = ? AND user_id = ?"
        return await self._read(lambda db: {item_id for (item_id,) in db.execute(sql, (tenant, user_id))})

    async def events(self, tenant: str, user_id: str, *, after: int = 0, limit: int = 100) -> list[LogEntry]:
        return await self._read(lambda db: list(_log_entries(db, tenant, user_id, after, limit)))

    async def erase(self, tenant: str, user_id: str) -> None:
        await self._write(lambda db: _erase(db, tenant, user_id), size=1)
        await self._read(_empty_wal)

    async def ping(self) -> None:
        await self._read(lambda db: db.execute("SELECT seq FROM log LIMIT 1").fetchone())

    async def close(self) -> None:
        self._closed = True
        await asyncio.to_thread(self._finish)

    def _finish(self) -> None:
        self._reader_threads.shutdown()
        with suppress(queue.Empty):
            while True:
                self._idle_readers.get_nowait().close()
        self._writer.close()

    async def _write(self, work: Callable[[sqlite3.Connection], T], *, size: int) -> T:
        return await asyncio.wrap_future(self._writer.submit(work, size))

    async def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        if self._closed:
            raise StorageUnavailable("the store is closed")

        def run() -> T:
            connection = self._idle_readers.get()
            try:
                return query(connection)
            except sqlite3.Error as exc:
                raise _translated(exc) from exc
            finally:
                self._idle_readers.put(connection)

        return await asyncio.get_running_loop().run_in_executor(self._reader_threads, run)


@dataclass(slots=True, eq=False)
class _Request:
    work: Callable[[sqlite3.Connection], Any]
    size: int
    answer: Future[Any]


class _GroupCommit:
    """A thread that runs everything that waits in one transaction and then answers it; it owns the connection."""

    def __init__(self, connection: sqlite3.Connection, max_waiting: int) -> None:
        self._connection = connection
        self._max_waiting = max_waiting
        self._waiting: list[_Request] = []
        self._waiting_size = 0
        self._closed = False
        self._changed = threading.Condition()
        # A daemon: who forgets to close loses nothing that was answered, and can still exit.
        self._thread = threading.Thread(target=self._run, name="sqlite-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[sqlite3.Connection], T], size: int) -> Future[T]:
        """Let the work wait for the next group. Cancelling the answer before that group begins takes it back."""
        answer: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise StorageUnavailable("the store is closed")
            if self._waiting and self._waiting_size + size > self._max_waiting:
                raise StorageBusy(f"{self._waiting_size} events wait to be written; try again later")
            self._waiting.append(_Request(work, size, answer))
            self._waiting_size += size
            self._changed.notify()
        return answer

    def close(self) -> None:
        """Accept nothing more; return when everything accepted is answered."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with closing(self._connection):
            while group := self._next_group():
                self._answer([request for request in group if request.answer.set_running_or_notify_cancel()])

    def _next_group(self) -> list[_Request]:
        """Everything that waits; empty only when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            group, self._waiting, self._waiting_size = self._waiting, [], 0
        return group

    def _answer(self, group: list[_Request]) -> None:
        try:
            results = self._commit(group)
        except Exception as exc:
            # Trouble of the database is everybody's; of anything else only one request may be the cause.
            if len(group) == 1 or isinstance(exc, sqlite3.OperationalError):
                _fail(group, exc)
            else:
                for request in group:
                    self._answer([request])
        else:
            for request, result in zip(group, results, strict=True):
                request.answer.set_result(result)

    def _commit(self, group: list[_Request]) -> list[Any]:
        """Run the group in one transaction: all of it is durable, or nothing happened."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            results = [request.work(self._connection) for request in group]
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite has rolled back by itself after some errors
                self._connection.execute("ROLLBACK")
            raise
        return results


def _fail(group: list[_Request], cause: Exception) -> None:
    for request in group:
        failure = _translated(cause)  # one for each: a raised exception collects the traceback of its waiter
        failure.__cause__ = cause
        request.answer.set_exception(failure)


class _FarBehindError(StorageError):
    """A state lacks so much of the log that folding it would hold up everybody's writes."""

    def __init__(self, user_id: str) -> None:
        super().__init__("the state of a user is being folded from the log")
        self.user_id = user_id


def _translated(cause: Exception) -> StorageError:
    if isinstance(cause, _FarBehindError):
        return _FarBehindError(cause.user_id)
    if isinstance(cause, sqlite3.Error):
        return StorageUnavailable(f"SQLite failed: {cause}")
    return StorageError(f"the request could not be applied: {cause!r}")


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = ON")  # what is moved or deleted leaves no copy behind in the pages
    connection.execute("PRAGMA cache_size = -32768")  # KiB
    connection.execute("PRAGMA wal_autocheckpoint = 8192")  # pages; a checkpoint syncs the whole file once more
    return connection


def _prepare(path: Path) -> None:
    """Make the file, or make sure that it is one that this code can use."""
    with closing(_connect(path)) as connection:
        _switch_to_wal(connection)
        connection.execute("BEGIN IMMEDIATE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise StorageError(
                f"'{path}' was written by a newer lisarec (schema {version}, this one knows {SCHEMA_VERSION}); "
                "run that version, or choose another directory"
            )
        if version < 1:
            for statement in SCHEMA.split(";\n"):
                connection.execute(statement)
        if version < 2:
            connection.execute(ERASURES_SCHEMA)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """SQLite does not wait by itself when several processes make the file at once."""
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


@dataclass(slots=True)
class _UserFold:
    """A user's states, one for each live generation, and the newest entry they hold, once there is a new one."""

    states: list[State]
    through_seq: int | None = None


def _append(
    db: sqlite3.Connection, generations: Sequence[Generation], tenant: str, events: Sequence[Event]
) -> list[Appended]:
    folds = {
        user_id: _UserFold([_current(db, generation, tenant, user_id, FAR_BEHIND).state for generation in generations])
        for user_id in dict.fromkeys(event.user_id for event in events)
    }
    seqs = [_log(db, tenant, event) for event in events]
    answers = [
        Appended(duplicate=True) if seq is None else _fold(generations, folds[event.user_id], seq, event)
        for seq, event in zip(seqs, events, strict=True)
    ]
    _keep(db, generations, tenant, folds)
    return answers


def _log(db: sqlite3.Connection, tenant: str, event: Event) -> int | None:
    """Log the event and return its sequence number; None when the log has its id already.

    The unique index decides: it has to be written anyway, and unlike the ring of a state it knows every id.
    """
    cursor = db.execute(INSERT_EVENT, (tenant, *event_fields(event)))
    return cursor.lastrowid if cursor.rowcount == 1 else None


def _fold(generations: Sequence[Generation], fold: _UserFold, seq: int, event: Event) -> Appended:
    effects = [generation.apply(state, event) for generation, state in zip(generations, fold.states, strict=True)]
    fold.through_seq = seq
    serving = effects[0]
    return Appended(unknown_item=serving is Effect.UNKNOWN_ITEM, late=serving is Effect.STEPPED_LATE)


def _keep(db: sqlite3.Connection, generations: Sequence[Generation], tenant: str, folds: dict[str, _UserFold]) -> None:
    db.executemany(
        UPSERT_STATE,
        [
            (tenant, user_id, generation.tag, fold.through_seq, generation.encode(state))
            for user_id, fold in folds.items()
            if fold.through_seq is not None
            for generation, state in zip(generations, fold.states, strict=True)
        ],
    )


def _keep_unless_erased(
    db: sqlite3.Connection, generation: Generation, tenant: str, folds: dict[str, _UserFold]
) -> None:
    """Keep states that were folded before this transaction began."""
    is_logged = "SELECT 1 FROM log WHERE seq = ? AND tenant = ? AND user_id = ?"
    still_there = {
        user_id: fold
        for user_id, fold in folds.items()
        if db.execute(is_logged, (fold.through_seq, tenant, user_id)).fetchone()
    }
    _keep(db, [generation], tenant, still_there)


@dataclass(slots=True)
class _Current:
    """The fold of a user's log through `newest_seq` (0: no log), of which `folded_seq` was in the stored state."""

    state: State
    newest_seq: int
    folded_seq: int


def _current(
    db: sqlite3.Connection, generation: Generation, tenant: str, user_id: str, at_most: int = NO_LIMIT
) -> _Current:
    """The user as of now. What the stored state lacks is folded: all of it for a new generation or layout, the rest
    where a process with other live generations has appended.

    raises  _FarBehindError  when it lacks more than `at_most` entries
    """
    newest_seq, folded_seq, state = _stored_state(db, generation, tenant, user_id)
    if folded_seq < newest_seq:
        limit = at_most + 1 if at_most >= 0 else NO_LIMIT
        for count, entry in enumerate(_log_entries(db, tenant, user_id, folded_seq, limit), start=1):
            if at_most >= 0 and count > at_most:
                raise _FarBehindError(user_id)
            if entry.seq > newest_seq:  # logged since the first look
                break
            generation.apply(state, entry.event)
    return _Current(state, newest_seq, folded_seq)


def _stored_state(db: sqlite3.Connection, generation: Generation, tenant: str, user_id: str) -> tuple[int, int, State]:
    """The newest sequence number of the user's log, that of the stored state, and this state; 0 where there is none."""
    key = {"tenant": tenant, "user_id": user_id, "generation": generation.tag}
    newest_seq, through_seq, value = db.execute(SELECT_STATE, key).fetchone()
    if value is not None:
        try:
            return newest_seq or 0, through_seq, generation.decode(value)
        except StateError as exc:
            logger.warning("folding a state again from the log: %s", exc)
    return newest_seq or 0, 0, generation.empty()


def _erase(db: sqlite3.Connection, tenant: str, user_id: str) -> None:
    (through_seq,) = db.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'log'").fetchone()
    of_user = (tenant, user_id)
    if db.execute("DELETE FROM log WHERE tenant = ? AND user_id = ?", of_user).rowcount:
        erased = (tenant, digest(user_id), through_seq)
        db.execute("INSERT INTO erasures (tenant, user, through_seq) VALUES (?, ?, ?)", erased)
    db.execute("DELETE FROM states WHERE tenant = ? AND user_id = ?", of_user)


def _empty_wal(db: sqlite3.Connection) -> None:
    """Let the write-ahead log forget what it had; others who read or write just then are waited for."""
    give_up_at = time.monotonic() + BUSY_TIMEOUT_S
    while time.monotonic() < give_up_at:
        (is_busy, _, _) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if not is_busy:
            return
        time.sleep(0.01)
    raise StorageUnavailable("the user is erased, but the write-ahead log could not be emptied; erase again")


def _log_entries(db: sqlite3.Connection, tenant: str, user_id: str, after: int, limit: int) -> Iterator[LogEntry]:
    for seq, *columns in db.execute(SELECT_EVENTS, (tenant, user_id, after, limit)):
        yield LogEntry(seq, Event(*columns))
