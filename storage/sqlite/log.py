"""The tables of logs and aliases in the embedded store: which log an event belongs to, and what is in it."""

import sqlite3
from collections.abc import Iterable, Iterator

from storage.records import LogEntry
from storage.sqlite.batches import execute_in_batches
from storage.state.event import LogRecord, event_hash
from storage.state.record_encoding import COLUMNS, from_row, to_row

LOG_PAGE = 2_000  # entries of the whole log that are read at once, some 20 ms
NEWEST_PAGE = 500  # entries of one user
ERASED = ""  # whom a user has become who is being erased: nobody reads or appends to what is left of the log
NO_LIMIT = -1

RECORD_COLUMNS = ", ".join(COLUMNS)

IS_ERASED = f"""
EXISTS (SELECT 1 FROM aliases AS own WHERE own.tenant = log.tenant AND own.user_id = log.user_id
    AND own.target = '{ERASED}')
"""  # noqa: S608, a constant
SELECT_EVENTS = f"""
SELECT seq, {RECORD_COLUMNS} FROM log WHERE tenant = ? AND user_id = ? AND seq > ? AND NOT {IS_ERASED}
ORDER BY seq LIMIT ?
"""  # noqa: S608, the columns are a constant
SELECT_ENTRY = f"""
SELECT tenant, {RECORD_COLUMNS} FROM log WHERE seq = ? AND NOT {IS_ERASED}
"""  # noqa: S608, the columns are a constant
SELECT_ERASED_AT = "SELECT 1 FROM erasures WHERE through_seq >= ? LIMIT 1"
SELECT_NEWEST_OF_USER = f"""
SELECT seq, {RECORD_COLUMNS} FROM log WHERE tenant = ? AND user_id = ? AND seq < ? ORDER BY seq DESC LIMIT ?
"""  # noqa: S608, the columns are a constant
SELECT_LOG = f"""
SELECT tenant, seq, {RECORD_COLUMNS} FROM log WHERE (tenant, user_id) > (?, ?) AND NOT {IS_ERASED}
ORDER BY tenant, user_id, seq LIMIT ?
"""  # noqa: S608, the columns are a constant

INSERT_EVENT = f"""
INSERT INTO log (tenant, {RECORD_COLUMNS}) VALUES (?{", ?" * len(COLUMNS)}) ON CONFLICT DO NOTHING
"""  # noqa: S608, the columns are a constant

SELECT_WITHOUT_LOG = """
SELECT batch.column1 FROM ({rows}) AS batch
WHERE NOT EXISTS (SELECT 1 FROM log WHERE tenant = ? AND user_id = batch.column1)
    AND NOT EXISTS (SELECT 1 FROM aliases WHERE tenant = ? AND user_id = batch.column1)
"""

SELECT_NEWEST = """
SELECT kind, user_id, event_id, item_id, type FROM log
WHERE tenant = ? AND seq > (SELECT coalesce(max(seq), 0) FROM log) - ?
"""


def resolve_alias(db: sqlite3.Connection, tenant: str, user_id: str) -> str:
    """Return the user whom this one has become by a merge, ERASED while being erased, else the same id."""
    row = db.execute("SELECT target FROM aliases WHERE tenant = ? AND user_id = ?", (tenant, user_id)).fetchone()
    return user_id if row is None else str(row[0])


def log_event(db: sqlite3.Connection, tenant: str, event: LogRecord) -> int | None:
    """Log the event, or correction, and return its sequence number; None when the log has its id already.

    The unique index decides: it has to be written anyway, and unlike the ring of a state it knows every id.
    """
    cursor = db.execute(INSERT_EVENT, (tenant, *to_row(event)))
    return cursor.lastrowid if cursor.rowcount == 1 else None


def users_without_log(db: sqlite3.Connection, tenant: str, user_ids: Iterable[str]) -> set[str]:
    """Return those of the users who have no log, and have become nobody else."""
    rows = [(user_id,) for user_id in user_ids]
    return {user_id for (user_id,) in execute_in_batches(db, SELECT_WITHOUT_LOG, rows, after=[tenant, tenant])}


def log_entries(db: sqlite3.Connection, tenant: str, user_id: str, after: int, limit: int) -> Iterator[LogEntry]:
    """Iterate over the first `limit` entries of the user's log with sequence numbers above `after`, in log order."""
    for seq, *columns in db.execute(SELECT_EVENTS, (tenant, user_id, after, limit)):
        yield LogEntry(seq, from_row(columns))


def newest_log_entries(db: sqlite3.Connection, tenant: str, user_id: str, before: int, limit: int) -> list[LogEntry]:
    """Return the last `limit` entries of the user's log with sequence numbers below `before`, newest first."""
    rows = db.execute(SELECT_NEWEST_OF_USER, (tenant, user_id, before, limit))
    return [LogEntry(seq, from_row(columns)) for seq, *columns in rows]


def log_page(db: sqlite3.Connection, tenant: str, user_id: str) -> Iterator[tuple[str, LogEntry]]:
    """Iterate over the first entries of the users that follow this one in order, each with its tenant."""
    for of_tenant, seq, *columns in db.execute(SELECT_LOG, (tenant, user_id, LOG_PAGE)):
        yield of_tenant, LogEntry(seq, from_row(columns))


def newest_entries(db: sqlite3.Connection, tenant: str, limit: int) -> list[tuple[str | None, ...]]:
    """Return kind, user, id, item and type of the tenant's entries among the newest `limit` ones of all tenants."""
    return db.execute(SELECT_NEWEST, (tenant, limit)).fetchall()


def archive_position(seq: int, tenant: str, record: LogRecord) -> str:
    """Return what an archive notes of an entry, so that the log can be recognised by it."""
    return f"{seq}-{event_hash(f'{tenant}/{record.user_id}/{record.entry_id}'):016x}"


def holds_archived(db: sqlite3.Connection, position: str) -> bool:
    """Return whether the log has the entry at an archive's position, or had it before its user was erased."""
    seq = int(position.partition("-")[0])
    row = db.execute(SELECT_ENTRY, (seq,)).fetchone()
    if row is None:
        return db.execute(SELECT_ERASED_AT, (seq,)).fetchone() is not None
    tenant, *columns = row
    return archive_position(seq, tenant, from_row(columns)) == position
