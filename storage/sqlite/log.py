"""The tables of logs and aliases in the embedded store: which log an event belongs to, and its entries."""

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Protocol, TypeVar

import orjson

from storage.records import LogEntry, LogPage
from storage.sqlite.batches import execute_in_batches
from storage.state.corrections import EventFilter, SeenItems
from storage.state.event import IMPRESSION, LogRecord, digest, event_hash
from storage.state.record_encoding import COLUMNS, from_row, to_row

T = TypeVar("T")

LOG_PAGE = 2_000  # entries of the whole log that are read at once, some 20 ms
NEWEST_PAGE = 1_000  # entries of one user
ERASED = ""  # target of a user who is being erased: nobody reads the rest of the log or appends to it
NO_LIMIT = -1
NEWEST = 2**63 - 1  # above every sequence number

RECORD_COLUMNS = ", ".join(COLUMNS)

IS_ERASED = f"""
EXISTS (SELECT 1 FROM aliases AS own WHERE own.tenant = log.tenant AND own.user_id = log.user_id
    AND own.target = '{ERASED}')
"""  # noqa: S608, a constant
SELECT_EVENTS = f"""
SELECT seq, {RECORD_COLUMNS} FROM log WHERE tenant = ? AND user_id = ? AND seq > ? AND NOT {IS_ERASED}
ORDER BY seq LIMIT ?
"""  # noqa: S608, the columns are a constant
SELECT_NEWEST_OF_USER = f"""
SELECT {RECORD_COLUMNS} FROM log WHERE tenant = ? AND user_id = ? AND NOT {IS_ERASED} ORDER BY seq DESC LIMIT ?
"""  # noqa: S608, the columns are a constant
SELECT_ENTRY = f"""
SELECT tenant, {RECORD_COLUMNS} FROM log WHERE seq = ? AND NOT {IS_ERASED}
"""  # noqa: S608, the columns are a constant
SELECT_ERASED_AT = "SELECT 1 FROM erasures WHERE through_seq >= ? LIMIT 1"
# One row for a page: other Python threads run between rows, which takes longer than reading the rows.
SELECT_SEEN = """
SELECT json_group_array(json_array(seq, event_id, item_id, type, timestamp_us, json(CASE WHEN ? THEN items END))) FROM (
    SELECT seq, event_id, item_id, type, timestamp_us, items FROM log WHERE tenant = ? AND user_id = ? AND seq < ?
    ORDER BY seq DESC LIMIT ?
)
"""
SELECT_LOG = f"""
SELECT tenant, seq, {RECORD_COLUMNS} FROM log WHERE (tenant, user_id) > (?, ?) AND NOT {IS_ERASED}
ORDER BY tenant, user_id, seq LIMIT ?
"""  # noqa: S608, the columns are a constant

INSERT_EVENT = f"""
INSERT INTO log (tenant, {RECORD_COLUMNS}) VALUES (?{", ?" * len(COLUMNS)}) ON CONFLICT DO NOTHING
"""  # noqa: S608, the columns are a constant

COUNT_ENTRIES = "SELECT count(*) FROM (SELECT 1 FROM log WHERE tenant = ? AND user_id = ? LIMIT ?)"

SELECT_WITHOUT_LOG = """
SELECT batch.column1 FROM ({rows}) AS batch
WHERE NOT EXISTS (SELECT 1 FROM log WHERE tenant = ? AND user_id = batch.column1)
    AND NOT EXISTS (SELECT 1 FROM aliases WHERE tenant = ? AND user_id = batch.column1)
"""

SELECT_NEWEST = """
SELECT kind, user_id, event_id, item_id, type FROM log
WHERE tenant = ? AND seq > (SELECT coalesce(max(seq), 0) FROM log) - ?
"""


class PageReader(Protocol):
    """Runs short queries at once, and queries for pages of long results one after another."""

    def read_now(self, query: Callable[[sqlite3.Connection], T]) -> T | None:
        """Run a query of some microseconds in the caller's thread; return None if `read` has to run it."""

    def read(self, query: Callable[[sqlite3.Connection], T]) -> Awaitable[T]:
        """Run a query of some milliseconds."""

    def read_page(self, query: Callable[[sqlite3.Connection], T]) -> Awaitable[T]:
        """Run a query that reads a page."""


def resolve_alias(db: sqlite3.Connection, tenant: str, user_id: str) -> str:
    """Return the user that this one was merged into, ERASED during an erasure, else the same id."""
    row = db.execute("SELECT target FROM aliases WHERE tenant = ? AND user_id = ?", (tenant, user_id)).fetchone()
    return user_id if row is None else str(row[0])


def log_event(db: sqlite3.Connection, tenant: str, event: LogRecord) -> int | None:
    """Log the event, or correction, and return its sequence number; None when the log already has its id.

    The unique index decides: it has to be written anyway, and unlike the ring of ids in a state it has every id.
    """
    cursor = db.execute(INSERT_EVENT, (tenant, *to_row(event)))
    return cursor.lastrowid if cursor.rowcount == 1 else None


def users_without_log(db: sqlite3.Connection, tenant: str, user_ids: Iterable[str]) -> set[str]:
    """Return the users who have no log, and were not merged into another user."""
    rows = [(user_id,) for user_id in user_ids]
    return {user_id for (user_id,) in execute_in_batches(db, SELECT_WITHOUT_LOG, rows, after=[tenant, tenant])}


def log_length(db: sqlite3.Connection, tenant: str, user_id: str, limit: int) -> int:
    """Return how many log entries the user, or the one they were merged into, has, counted up to `limit`."""
    (entries,) = db.execute(COUNT_ENTRIES, (tenant, resolve_alias(db, tenant, user_id), limit)).fetchone()
    return int(entries)


def log_entries(db: sqlite3.Connection, tenant: str, user_id: str, after: int, limit: int) -> Iterator[LogEntry]:
    """Iterate over the first `limit` entries of the user's log with sequence numbers above `after`, in log order."""
    for seq, *columns in db.execute(SELECT_EVENTS, (tenant, user_id, after, limit)):
        yield LogEntry(seq, from_row(columns))


def add_seen(db: sqlite3.Connection, tenant: str, user_id: str, before: int, limit: int, seen: SeenItems) -> list[int]:
    """Add the last `limit` entries of the user's log below `before`; return their sequence numbers, newest first."""
    needs_shown = IMPRESSION in seen.events.since_us
    (text,) = db.execute(SELECT_SEEN, (needs_shown, tenant, user_id, before, limit)).fetchone()
    entries = sorted(orjson.loads(text), reverse=True)
    seen.add(entry[1:] for entry in entries)
    return [entry[0] for entry in entries]


def newest_of_user(db: sqlite3.Connection, tenant: str, user_id: str, limit: int) -> list[LogRecord]:
    """Return the newest `limit` entries of the user's log, newest first."""
    return [from_row(columns) for columns in db.execute(SELECT_NEWEST_OF_USER, (tenant, user_id, limit))]


def log_page(db: sqlite3.Connection, tenant: str, user_id: str) -> Iterator[tuple[str, LogEntry]]:
    """Iterate over the first entries of the users that follow this one in order, each with its tenant."""
    for of_tenant, seq, *columns in db.execute(SELECT_LOG, (tenant, user_id, LOG_PAGE)):
        yield of_tenant, LogEntry(seq, from_row(columns))


def newest_entries(db: sqlite3.Connection, tenant: str, limit: int) -> list[tuple[str | None, ...]]:
    """Return kind, user, id, item and type of the tenant's entries among the newest `limit` ones of all tenants."""
    return db.execute(SELECT_NEWEST, (tenant, limit)).fetchall()


def archive_position(seq: int, tenant: str, record: LogRecord) -> str:
    """Return the position that an archive notes of an entry, by which the log can be recognised."""
    return f"{seq}-{event_hash(f'{tenant}/{record.user_id}/{record.entry_id}'):016x}"


def holds_archived(db: sqlite3.Connection, position: str) -> bool:
    """Return whether the log has the entry at an archive's position, or had it before its user was erased."""
    seq = int(position.partition("-")[0])
    row = db.execute(SELECT_ENTRY, (seq,)).fetchone()
    if row is None:
        return db.execute(SELECT_ERASED_AT, (seq,)).fetchone() is not None
    tenant, *columns = row
    return archive_position(seq, tenant, from_row(columns)) == position


async def log_pages(reader: PageReader) -> AsyncIterator[LogPage]:
    """Iterate over the log of every user, in pages, with other reads in between."""
    tenant, user_id = "", ""
    while True:
        page = await reader.read_page(lambda db, after=(tenant, user_id): list(log_page(db, *after)))  # type: ignore[misc]
        is_complete = len(page) < LOG_PAGE
        yield LogPage(page, is_complete)
        if is_complete:
            return
        tenant, last = page[-1]
        user_id, seq = last.record.user_id, last.seq
        while not is_complete:  # the rest of the last user
            rest = await reader.read_page(
                lambda db, tenant=tenant, user_id=user_id, after=seq - 1: list(  # type: ignore[misc]
                    log_entries(db, tenant, user_id, after, 1 + LOG_PAGE)
                )
            )
            is_complete = len(rest) < 1 + LOG_PAGE
            is_same = bool(rest) and rest[0].seq == seq
            new = [(tenant, entry) for entry in rest if entry.seq > seq]
            yield LogPage(new, is_complete, () if is_same else [(tenant, digest(user_id))])
            seq = rest[-1].seq if rest else seq


async def read_seen_items(reader: PageReader, tenant: str, user_id: str, events: EventFilter, limit: int) -> SeenItems:
    """Return the items of these events among the newest `limit` entries of the user's log."""
    seen = SeenItems(events, limit)

    def add_page(db: sqlite3.Connection, before: int, count: int) -> list[int]:
        return add_seen(db, tenant, resolve_alias(db, tenant, user_id), before, count, seen)

    before, left = NEWEST, limit + 1
    while left > 0:
        count = min(left, NEWEST_PAGE)
        added = await reader.read_page(partial(add_page, before=before, count=count))
        if len(added) < count:
            break
        before, left = added[-1], left - count
    return seen
