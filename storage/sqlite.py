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
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from storage import (
    item_counts,
    sqlite_corrections,
    sqlite_generations,
    sqlite_items,
    sqlite_states,
    sqlite_tallies,
    sqlite_trends,
)
from storage.corrections import LogFold
from storage.errors import MergeRefused, StorageBusy, StorageError, StorageUnavailable, UnknownEvent
from storage.fold import compile_fold
from storage.records import (
    MAIN_TENANT,
    AppendResult,
    FoldedState,
    ItemChanges,
    ItemEntry,
    KnownGeneration,
    LogEntry,
    LogPage,
    NamedGeneration,
    TenantPointers,
)
from storage.sqlite_append import FAR_BEHIND, Append, append
from storage.sqlite_log import LOG_PAGE, log_entries, log_page, newest_entries
from storage.sqlite_states import DAY_S
from storage.state import Generation
from storage.state_event import Event, digest
from storage.trends import Trends

FILE_NAME = "lisarec.sqlite3"
BUSY_TIMEOUT_S = 10.0
READERS = 2
KEPT_AT_ONCE = 256  # states of a rebuild in one transaction, about 1 MB
# About half a second of work: who comes later hears StorageBusy instead of waiting longer.
MAX_WAITING_EVENTS = 8192

# AUTOINCREMENT, so that a sequence number is never used again: states and readers remember how far they got.
# log_by_user ends in the rowid, which is seq: it also finds a user's newest entry.
FIRST_SCHEMA = """
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

# When a state was written, in days: the index changes only with the first event of a day. What is older than the column
# counts as written today.
GENERATIONS_SCHEMA = f"""
ALTER TABLE states ADD COLUMN written_day INTEGER NOT NULL DEFAULT {int(time.time() // DAY_S)};
CREATE INDEX states_by_day ON states (written_day);
{sqlite_generations.SCHEMA}
"""

# Who was erased and how far the log went then, for copies of the log that are made elsewhere.
ERASURES_SCHEMA = """
CREATE TABLE erasures (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    user BLOB NOT NULL, -- digest of the user's id
    through_seq INTEGER NOT NULL
);
"""

# a file of version n has had the first n
SCHEMA_STEPS = (
    FIRST_SCHEMA,
    GENERATIONS_SCHEMA,
    ERASURES_SCHEMA,
    sqlite_generations.TENANTS_SCHEMA,
    sqlite_corrections.SCHEMA,
    sqlite_items.SCHEMA,
    sqlite_trends.SCHEMA,
    sqlite_tallies.SCHEMA,
)
SCHEMA_VERSION = len(SCHEMA_STEPS)

logger = logging.getLogger(__name__)
T = TypeVar("T")


class SQLiteStore:
    """A UserStore in one directory. Make it with `open`; it may be used from any event loop."""

    def __init__(
        self,
        path: Path,
        generations: Sequence[Generation],
        max_waiting_events: int,
        state_ttl_days: int | None,
        tenant: str,
    ) -> None:
        self.generations = SQLiteGenerations(self, tenant)
        self._serving = tuple(generations)
        self._tenant = tenant
        self._state_ttl_days = state_ttl_days
        self._idle_readers: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        for _ in range(READERS):
            self._idle_readers.put(_connect(path))
        self._reader_threads = ThreadPoolExecutor(READERS, thread_name_prefix="sqlite-reader")
        self._writer = _GroupCommit(_connect(path), max_waiting_events)
        self._catch_up = _CatchUp(_connect(path), self._writer)
        self._closed = False

    @classmethod
    async def open(
        cls,
        directory: Path,
        generations: Sequence[Generation],
        *,
        tenant: str = MAIN_TENANT,
        max_waiting_events: int = MAX_WAITING_EVENTS,
        state_ttl_days: int | None = None,
    ) -> "SQLiteStore":
        """Open the store in the directory, or make it there. Without a generation it takes no events.

        raises  StorageUnavailable  when the directory or file cannot be used
                StorageError        when a newer lisarec has written the file
        """
        path = Path(directory) / FILE_NAME

        def open_files() -> "SQLiteStore":
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                _prepare(path)
                if generations:
                    compile_fold(generations[0])
                return cls(path, generations, max_waiting_events, state_ttl_days, tenant)
            except (OSError, sqlite3.Error) as exc:
                raise StorageUnavailable(f"cannot open '{path}': {exc}") from exc

        return await asyncio.to_thread(open_files)

    @property
    def waiting(self) -> int:
        return self._writer.waiting

    def serve_generations(self, generations: Sequence[Generation]) -> None:
        self._serving = tuple(generations)

    async def append(self, tenant: str, events: Sequence[Event]) -> list[AppendResult]:
        if not events:
            return []
        serving = self._serving
        if not serving:
            raise ValueError("a store that takes events needs at least one generation")
        answers, behind = await self._write(Append(serving, tenant, events), size=len(events))
        for user_id, generation in behind:
            self._catch_up.start(tenant, user_id, generation)
        return answers

    async def states(
        self, tenant: str, user_ids: Sequence[str], generation: Generation, *, max_missing: int | None = None
    ) -> list[bytes | None]:
        def look(db: sqlite3.Connection) -> tuple[dict[str, str], dict[str, sqlite_states.Current | None]]:
            roots = {user_id: sqlite_corrections.root(db, tenant, user_id) for user_id in user_ids}
            return roots, sqlite_states.current(db, generation, tenant, roots.values(), max_missing)

        roots, users = await self._read(look)
        caught_up = []
        for user_id, user in users.items():
            if user is None:
                self._catch_up.start(tenant, user_id, generation)
            elif user.folded_seq < user.newest_seq:
                caught_up.append(FoldedState(tenant, user_id, user.newest_seq, user.value))
        if caught_up:
            with suppress(StorageError):  # what cannot be kept, as where the disk is full, can still be served
                await self._write(lambda db: sqlite_states.keep(db, generation, caught_up), size=len(caught_up))
        return [
            user.value if user is not None and user.newest_seq else None
            for user in (users[roots[user_id]] for user_id in user_ids)
        ]

    async def log(self) -> AsyncIterator[LogPage]:
        tenant, user_id = "", ""
        while True:
            page = await self._read(lambda db, after=(tenant, user_id): list(log_page(db, *after)))  # type: ignore[misc]
            is_complete = len(page) < LOG_PAGE
            yield LogPage(page, is_complete)
            if is_complete:
                return
            tenant, last = page[-1]
            user_id, seq = last.event.user_id, last.seq
            while not is_complete:  # the rest of the last user
                rest = await self._entries(tenant, user_id, seq - 1, 1 + LOG_PAGE)
                is_complete = len(rest) < 1 + LOG_PAGE
                is_same = bool(rest) and rest[0].seq == seq
                new = [(tenant, entry) for entry in rest if entry.seq > seq]
                yield LogPage(new, is_complete, () if is_same else [(tenant, digest(user_id))])
                seq = rest[-1].seq if rest else seq

    async def save_states(self, generation: Generation, states: Sequence[FoldedState]) -> None:
        for start in range(0, len(states), KEPT_AT_ONCE):
            some = states[start : start + KEPT_AT_ONCE]
            await self._write(lambda db, some=some: sqlite_states.keep(db, generation, some), size=len(some))  # type: ignore[misc]

    async def drop_idle_states(self) -> int:
        if self._state_ttl_days is None:
            return 0
        before_day, total = sqlite_states.today() - self._state_ttl_days, 0
        while removed := await self._write(lambda db: sqlite_generations.drop_idle_states(db, before_day), size=1):
            total += removed
        return total

    async def seen_items(self, tenant: str, user_id: str, unseen_types: Collection[str] = ()) -> set[str]:
        return await self._read(lambda db: sqlite_corrections.seen_items(db, tenant, user_id, unseen_types))

    async def item_counts(self, tenant: str, types: Collection[str]) -> dict[str, int]:
        return await self._read(
            lambda db: item_counts.count_items_of_rows(
                newest_entries(db, tenant, item_counts.MAX_NEWEST_ENTRIES), types
            )
        )

    async def events(self, tenant: str, user_id: str, *, after: int = 0, limit: int = 100) -> list[LogEntry]:
        def look(db: sqlite3.Connection) -> list[LogEntry]:
            return list(log_entries(db, tenant, sqlite_corrections.root(db, tenant, user_id), after, limit))

        return await self._read(look)

    async def _entries(self, tenant: str, user_id: str, after: int, limit: int) -> list[LogEntry]:
        """Of the log of that name, also where the user has become another one."""
        return await self._read(lambda db: list(log_entries(db, tenant, user_id, after, limit)))

    async def pointers(self) -> TenantPointers:
        return await self._read(
            lambda db: TenantPointers(
                sqlite_generations.active(db, self._tenant),
                sqlite_items.version(db, self._tenant),
                sqlite_tallies.note(db, self._tenant, sqlite_tallies.EXPERIMENT),
            )
        )

    async def put_items(self, tenant: str, entries: Sequence[ItemEntry]) -> None:
        await self._write(lambda db: sqlite_items.put(db, tenant, entries), size=len(entries))

    async def item_changes(self, tenant: str, after: int, limit: int) -> ItemChanges:
        return await self._read(lambda db: sqlite_items.changes(db, tenant, after, limit))

    async def item_tenants(self) -> list[str]:
        return await self._read(sqlite_items.tenants)

    async def add_trends(self, tenant: str, trends: Trends) -> None:
        if trends:
            await self._write(lambda db: sqlite_trends.add(db, tenant, trends), size=len(trends))

    async def trends(self, tenant: str, limit: int) -> dict[str, float]:
        return await self._read(lambda db: sqlite_trends.best(db, tenant, limit))

    async def add_tallies(self, tenant: str, counts: Mapping[str, int]) -> None:
        if counts:
            await self._write(lambda db: sqlite_tallies.add(db, tenant, counts), size=len(counts))

    async def tallies(self, tenant: str) -> dict[str, int]:
        return await self._read(lambda db: sqlite_tallies.tallies(db, tenant))

    async def secret(self) -> bytes:
        return await self._write(sqlite_tallies.secret, size=1)

    async def undo(self, tenant: str, user_id: str, event_id: str) -> bool:
        is_new = await self._write(lambda db: sqlite_corrections.undo_event(db, tenant, user_id, event_id), size=1)
        if is_new is None:
            raise UnknownEvent("the user's log has no event of this id")
        await self._fold_apart(tenant, user_id)
        return is_new

    async def merge(self, tenant: str, user_id: str, visitor: str) -> bool:
        is_new = await self._write(lambda db: sqlite_corrections.merge(db, tenant, user_id, visitor), size=1)
        if isinstance(is_new, MergeRefused):
            raise is_new
        await self._fold_apart(tenant, user_id)
        return is_new

    async def _fold_apart(self, tenant: str, user_id: str) -> None:
        """Fold what was corrected before anybody needs it."""
        root = await self._read(lambda db: sqlite_corrections.root(db, tenant, user_id))
        for generation in self._serving:
            self._catch_up.start(tenant, root, generation)

    async def erase(self, tenant: str, user_id: str) -> None:
        await self._write(lambda db: _erase(db, tenant, user_id), size=1)
        await self._read(_empty_wal)

    async def ping(self) -> None:
        await self._read(lambda db: db.execute("SELECT seq FROM log LIMIT 1").fetchone())

    async def close(self) -> None:
        self._closed = True
        await asyncio.to_thread(self._finish)

    def _finish(self) -> None:
        self._catch_up.close()
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


class SQLiteGenerations:
    """The GenerationRegistry of one tenant in a store."""

    def __init__(self, store: SQLiteStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant

    async def announce(self, generation: NamedGeneration, live_for_s: float) -> None:
        await self._store._write(
            lambda db: sqlite_generations.announce(db, self._tenant, generation, live_for_s), size=1
        )

    async def known(self) -> list[KnownGeneration]:
        return await self._store._read(lambda db: sqlite_generations.known(db, self._tenant))

    async def active(self) -> NamedGeneration | None:
        return await self._store._read(lambda db: sqlite_generations.active(db, self._tenant))

    async def activate(self, generation: NamedGeneration) -> None:
        await self._store._write(lambda db: sqlite_generations.activate(db, self._tenant, generation), size=1)

    async def set_experiment(self, text: str | None) -> None:
        await self._store._write(
            lambda db: sqlite_tallies.set_note(db, self._tenant, sqlite_tallies.EXPERIMENT, text), size=1
        )

    async def drop(self, tag: bytes) -> int:
        total, row = 0, 0
        while rows := await self._store._write(
            lambda db, row=row: sqlite_generations.forget_states(db, self._tenant, tag, row),  # type: ignore[misc]
            size=1,
        ):
            total, row = total + len(rows), max(rows)
        await self._store._write(lambda db: sqlite_generations.forget_name(db, self._tenant, tag), size=1)
        return total


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

    @property
    def waiting(self) -> int:
        """Size of all that waits."""
        return self._waiting_size

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
            results = [result for together in _together(group) for result in self._results(together)]
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite has rolled back by itself after some errors
                self._connection.execute("ROLLBACK")
            raise
        return results

    def _results(self, together: list[_Request]) -> list[Any]:
        works = [request.work for request in together]
        appends = [work for work in works if isinstance(work, Append)]
        return append(self._connection, appends) if appends else [work(self._connection) for work in works]


def _together(group: list[_Request]) -> list[list[_Request]]:
    """The requests in order; appends that come one after the other are done as one."""
    runs: list[list[_Request]] = []
    for request in group:
        if runs and isinstance(request.work, Append) and request.work.goes_with(runs[-1][-1].work):
            runs[-1].append(request)
        else:
            runs.append([request])
    return runs


def _fail(group: list[_Request], cause: Exception) -> None:
    for request in group:
        failure = _translated(cause)  # one for each: a raised exception collects the traceback of its waiter
        failure.__cause__ = cause
        request.answer.set_exception(failure)


class _CatchUp:
    """A thread that folds states which are far behind their logs, one at a time; it owns the connection."""

    def __init__(self, connection: sqlite3.Connection, writer: _GroupCommit) -> None:
        self._connection = connection
        self._writer = writer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite-catch-up")
        self._under_way: set[tuple[str, str, bytes]] = set()
        self._closed = False

    def start(self, tenant: str, user_id: str, generation: Generation) -> None:
        """Fold what the user's state lacks, unless that is under way. Who needs the state then finds it."""
        key = (tenant, user_id, generation.tag)
        if key in self._under_way:
            return
        self._under_way.add(key)
        with suppress(RuntimeError):  # closed meanwhile
            self._thread.submit(self._run, key, generation)

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown(cancel_futures=True)
        self._connection.close()

    def _run(self, key: tuple[str, str, bytes], generation: Generation) -> None:
        try:
            self._catch_up(key[0], key[1], generation)
        except (sqlite3.Error, StorageError) as exc:
            logger.warning("a state could not be folded from the log, which will be tried again: %s", exc)
        finally:
            self._under_way.discard(key)

    def _catch_up(self, tenant: str, user_id: str, generation: Generation) -> None:
        (stored,) = sqlite_states.stored_states(self._connection, generation, tenant, [user_id]).values()
        newest_seq, through_seq = stored.newest_seq, stored.through_seq
        fold = LogFold(generation, generation.decode(stored.value))
        while through_seq < newest_seq:
            found = log_entries(self._connection, tenant, user_id, through_seq, FAR_BEHIND)
            entries = [entry for entry in found if entry.seq <= newest_seq]  # above may be who was erased and came back
            if self._closed or not entries:  # the log may be gone
                return
            for entry in entries:
                fold.take(entry.event)
            through_seq = entries[-1].seq
            if fold.is_spoiled and through_seq == newest_seq:
                fold, through_seq = fold.again(), 0
        folded = FoldedState(tenant, user_id, through_seq, generation.encode(fold.state))
        self._writer.submit(lambda db: sqlite_states.keep(db, generation, [folded]), 1).result()


def _translated(cause: Exception) -> StorageError:
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
        for step in SCHEMA_STEPS[version:]:
            for statement in step.split(";\n"):
                connection.execute(statement)
        if version < SCHEMA_VERSION:
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


def _erase(db: sqlite3.Connection, tenant: str, user_id: str) -> None:
    (through_seq,) = db.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'log'").fetchone()
    for name in sqlite_corrections.names_of(db, tenant, user_id):
        of_user = (tenant, name)
        if db.execute("DELETE FROM log WHERE tenant = ? AND user_id = ?", of_user).rowcount:
            erased = (tenant, digest(name), through_seq)
            db.execute("INSERT INTO erasures (tenant, user, through_seq) VALUES (?, ?, ?)", erased)
        db.execute("DELETE FROM states WHERE tenant = ? AND user_id = ?", of_user)
        db.execute("DELETE FROM aliases WHERE tenant = ? AND user_id = ?", of_user)


def _empty_wal(db: sqlite3.Connection) -> None:
    """Let the write-ahead log forget what it had; others who read or write just then are waited for."""
    give_up_at = time.monotonic() + BUSY_TIMEOUT_S
    while time.monotonic() < give_up_at:
        (is_busy, _, _) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if not is_busy:
            return
        time.sleep(0.01)
    raise StorageUnavailable("the user is erased, but the write-ahead log could not be emptied; erase again")
