"""The log's table in the embedded store: its columns in the order of an event's fields, and putting an event there."""

import sqlite3

from storage.state import Event, event_fields

EVENT_COLUMNS = "event_id, user_id, item_id, type, timestamp_us, id_time_us, value, recommendation_id"

INSERT_EVENT = f"""
INSERT INTO log (tenant, {EVENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING
"""  # noqa: S608, the columns are the constant above

SELECT_NEWEST = """
SELECT user_id, event_id, item_id, type FROM log
WHERE tenant = ? AND seq > (SELECT coalesce(max(seq), 0) FROM log) - ?
"""


def newest_entries(db: sqlite3.Connection, tenant: str, at_most: int) -> list[tuple[str, str, str, str]]:
    """User, id, item and type of the tenant's entries among the newest ones of all tenants."""
    return db.execute(SELECT_NEWEST, (tenant, at_most)).fetchall()


def log_event(db: sqlite3.Connection, tenant: str, event: Event) -> int | None:
    """Log the event and return its sequence number; None when the log has its id already.

    The unique index decides: it has to be written anyway, and unlike the ring of a state it knows every id.
    """
    cursor = db.execute(INSERT_EVENT, (tenant, *event_fields(event)))
    return cursor.lastrowid if cursor.rowcount == 1 else None
