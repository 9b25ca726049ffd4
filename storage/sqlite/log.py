"""The tables of logs and aliases in the embedded store: which log an event belongs to, and what is in it."""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from storage.records import LogEntry
from storage.state.corrections import readdressed
from storage.state.event import Event, LogRecord, Undo
from storage.state.record_encoding import COLUMNS, EVENT, UNDO, from_row, to_row

LOG_PAGE = 10_000  # entries of the whole log that are read at once
NO_LIMIT = -1

RECORD_COLUMNS = ", ".join(COLUMNS)

SELECT_EVENTS = f"""
SELECT seq, {RECORD_COLUMNS} FROM log WHERE tenant = ? AND user_id = ? AND seq > ? ORDER BY seq LIMIT ?
"""  # noqa: S608, the columns are a constant
SELECT_LOG = f"""
SELECT tenant, seq, {RECORD_COLUMNS} FROM log WHERE (tenant, user_id) > (?, ?) ORDER BY tenant, user_id, seq LIMIT ?
"""  # noqa: S608, the columns are a constant

INSERT_EVENT = f"""
INSERT INTO log (tenant, {RECORD_COLUMNS}) VALUES (?{", ?" * len(COLUMNS)}) ON CONFLICT DO NOTHING
"""  # noqa: S608, the columns are a constant

INSERT_EVENTS = f"INSERT INTO log (seq, tenant, {RECORD_COLUMNS}) {{rows}}"

SELECT_KNOWN = """
SELECT asked.column1, asked.column2, asked.column3 FROM ({rows}) AS asked
CROSS JOIN log ON log.tenant = ? AND log.user_id = asked.column1 AND log.event_id = asked.column2
    AND log.kind = asked.column3
"""

SELECT_WITHOUT_LOG = """
SELECT asked.column1 FROM ({rows}) AS asked
WHERE NOT EXISTS (SELECT 1 FROM log WHERE tenant = ? AND user_id = asked.column1)
    AND NOT EXISTS (SELECT 1 FROM aliases WHERE tenant = ? AND user_id = asked.column1)
"""

SELECT_TARGETS = """
SELECT asked.column1, aliases.target FROM ({rows}) AS asked
CROSS JOIN aliases ON aliases.tenant = ? AND aliases.user_id = asked.column1
"""

SELECT_NEWEST = """
SELECT kind, user_id, event_id, item_id, type FROM log
WHERE tenant = ? AND seq > (SELECT coalesce(max(seq), 0) FROM log) - ?
"""


def resolve_alias(db: sqlite3.Connection, tenant: str, user_id: str) -> str:
    """Return the user whom this one has become by a merge; the same id without one."""
    row = db.execute("SELECT target FROM aliases WHERE tenant = ? AND user_id = ?", (tenant, user_id)).fetchone()
    return user_id if row is None else str(row[0])


def log_event(db: sqlite3.Connection, tenant: str, event: LogRecord) -> int | None:
    """Log the event, or correction, and return its sequence number; None when the log has its id already.

    The unique index decides: it has to be written anyway, and unlike the ring of a state it knows every id.
    """
    cursor = db.execute(INSERT_EVENT, (tenant, *to_row(event)))
    return cursor.lastrowid if cursor.rowcount == 1 else None


def deduplicate(
    db: sqlite3.Connection, tenant: str, events: Sequence[Event | Undo]
) -> tuple[list[Event | Undo], list[bool]]:
    """Return the events as they stand in the logs of the users they belong to now, and whether each is new there.

    An event that is twice among them is new once. The caller holds the write lock.
    """
    user_ids = [(user_id,) for user_id in dict.fromkeys(event.user_id for event in events)]
    targets: dict[str, str] = dict(execute_in_batches(db, SELECT_TARGETS, user_ids, after=[tenant]))
    if targets:
        events = [readdressed(event, targets[event.user_id]) if event.user_id in targets else event for event in events]
    keys = [(event.user_id, event.event_id, UNDO if isinstance(event, Undo) else EVENT) for event in events]
    logged = set(execute_in_batches(db, SELECT_KNOWN, keys, after=[tenant]))
    is_new = []
    for key in keys:
        is_new.append(key not in logged)
        logged.add(key)
    return list(events), is_new


def log_new_events(db: sqlite3.Connection, tenant: str, events: Sequence[LogRecord]) -> range:
    """Log events that the log does not have; return their sequence numbers. The caller holds the write lock."""
    (last,) = db.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'log'").fetchone()
    seqs = range(last + 1, last + 1 + len(events))
    rows = [(seq, tenant, *to_row(event)) for seq, event in zip(seqs, events, strict=True)]
    execute_in_batches(db, INSERT_EVENTS, rows)
    return seqs


def users_without_log(db: sqlite3.Connection, tenant: str, user_ids: Iterable[str]) -> set[str]:
    """Return those of the users who have no log, and have become nobody else."""
    rows = [(user_id,) for user_id in user_ids]
    return {user_id for (user_id,) in execute_in_batches(db, SELECT_WITHOUT_LOG, rows, after=[tenant, tenant])}


def log_entries(db: sqlite3.Connection, tenant: str, user_id: str, after: int, limit: int) -> Iterator[LogEntry]:
    """Iterate over the first `limit` entries of the user's log with sequence numbers above `after`, in log order."""
    for seq, *columns in db.execute(SELECT_EVENTS, (tenant, user_id, after, limit)):
        yield LogEntry(seq, from_row(columns))


def log_page(db: sqlite3.Connection, tenant: str, user_id: str) -> Iterator[tuple[str, LogEntry]]:
    """Iterate over the first entries of the users that follow this one in order, each with its tenant."""
    for of_tenant, seq, *columns in db.execute(SELECT_LOG, (tenant, user_id, LOG_PAGE)):
        yield of_tenant, LogEntry(seq, from_row(columns))


def newest_entries(db: sqlite3.Connection, tenant: str, limit: int) -> list[tuple[str | None, ...]]:
    """Return kind, user, id, item and type of the tenant's entries among the newest `limit` ones of all tenants."""
    return db.execute(SELECT_NEWEST, (tenant, limit)).fetchall()


def execute_in_batches(
    db: sqlite3.Connection,
    sql: str,
    rows: Sequence[Sequence[Any]],
    *,
    before: Sequence[Any] = (),
    after: Sequence[Any] = (),
    sizes: Sequence[int] = (64, 8, 1),
) -> list[Any]:
    """Execute a statement for all of the rows, in order, with a batch of them at a time; return all result rows.

    Each statement releases the interpreter's lock, and then waits until another thread gives it back. So a hundred rows
    in a few statements cost far less than in a hundred. Batches have a few sizes only, so that SQLite prepares few
    statements.

    sql     has {rows} where VALUES of a batch's rows belong
    before  parameters that precede the rows' ones in the statement
    after   parameters that follow them
    sizes   of the batches, the largest first and the last one 1
    """
    results: list[Any] = []
    start = 0
    for size in sizes:
        while start + size <= len(rows):
            batch = rows[start : start + size]
            start += size
            place = f"({', '.join('?' * len(batch[0]))})"
            values = f"VALUES {', '.join([place] * size)}"
            parameters = [*before, *(value for row in batch for value in row), *after]
            results += db.execute(sql.format(rows=values), parameters)
    return results
