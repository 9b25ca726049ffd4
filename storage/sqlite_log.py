"""The table of the log in the embedded store; its columns are in the order of an event's fields."""

import sqlite3
from collections.abc import Iterator, Sequence

from storage.records import LogEntry
from storage.sqlite_batches import execute_in_batches
from storage.state_event import Event, event_fields

LOG_PAGE = 10_000  # entries of the whole log that are read at once
NO_LIMIT = -1

EVENT_COLUMNS = "event_id, user_id, item_id, type, timestamp_us, id_time_us, value, recommendation_id"

SELECT_EVENTS = f"""
SELECT seq, {EVENT_COLUMNS} FROM log WHERE tenant = ? AND user_id = ? AND seq > ? ORDER BY seq LIMIT ?
"""  # noqa: S608, the columns are a constant
SELECT_LOG = f"""
SELECT tenant, seq, {EVENT_COLUMNS} FROM log WHERE (tenant, user_id) > (?, ?) ORDER BY tenant, user_id, seq LIMIT ?
"""  # noqa: S608, the columns are a constant

INSERT_EVENT = f"""
INSERT INTO log (tenant, {EVENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING
"""  # noqa: S608, the columns are the constant above

INSERT_EVENTS = f"INSERT INTO log (seq, tenant, {EVENT_COLUMNS}) {{rows}}"

SELECT_KNOWN = """
SELECT asked.column1, asked.column2 FROM ({rows}) AS asked
CROSS JOIN log ON log.tenant = ? AND log.user_id = asked.column1 AND log.event_id = asked.column2
"""

SELECT_NEWEST = """
SELECT user_id, event_id, item_id, type FROM log
WHERE tenant = ? AND seq > (SELECT coalesce(max(seq), 0) FROM log) - ?
"""


def log_event(db: sqlite3.Connection, tenant: str, event: Event) -> int | None:
    """Log the event and return its sequence number; None when the log has its id already.

    The unique index decides: it has to be written anyway, and unlike the ring of a state it knows every id.
    """
    cursor = db.execute(INSERT_EVENT, (tenant, *event_fields(event)))
    return cursor.lastrowid if cursor.rowcount == 1 else None


def logged_ids(db: sqlite3.Connection, tenant: str, events: Sequence[Event]) -> set[tuple[str, str]]:
    """Return the user and id of each of these events that the log has already."""
    ids = [(event.user_id, event.event_id) for event in events]
    return set(execute_in_batches(db, SELECT_KNOWN, ids, after=[tenant]))


def log_new_events(db: sqlite3.Connection, tenant: str, events: Sequence[Event]) -> range:
    """Log events that the log does not have; return their sequence numbers. The caller holds the write lock."""
    (last,) = db.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'log'").fetchone()
    seqs = range(last + 1, last + 1 + len(events))
    rows = [(seq, tenant, *event_fields(event)) for seq, event in zip(seqs, events, strict=True)]
    execute_in_batches(db, INSERT_EVENTS, rows)
    return seqs


def log_entries(db: sqlite3.Connection, tenant: str, user_id: str, after: int, limit: int) -> Iterator[LogEntry]:
    """Iterate over the first `limit` entries of the user's log with sequence numbers above `after`, in log order."""
    for seq, *columns in db.execute(SELECT_EVENTS, (tenant, user_id, after, limit)):
        yield LogEntry(seq, Event(*columns))


def log_page(db: sqlite3.Connection, tenant: str, user_id: str) -> Iterator[tuple[str, LogEntry]]:
    """Iterate over the first entries of the users that follow this one in order, each with its tenant."""
    for of_tenant, seq, *columns in db.execute(SELECT_LOG, (tenant, user_id, LOG_PAGE)):
        yield of_tenant, LogEntry(seq, Event(*columns))


def newest_entries(db: sqlite3.Connection, tenant: str, limit: int) -> list[tuple[str, str, str, str]]:
    """Return user, id, item and type of the tenant's entries among the newest `limit` ones of all tenants."""
    return db.execute(SELECT_NEWEST, (tenant, limit)).fetchall()
