"""Undo and merge in the embedded store: each is one step of the transaction that it is called in."""

import sqlite3
import time
from collections.abc import Collection, Sequence

from storage.cold import plain_type
from storage.corrections import INTO, UNDO, full_id, into, is_merged, readdressed, undo
from storage.errors import MergeRefused, MergeTooLarge
from storage.records import MAX_MERGED
from storage.sqlite_batches import in_batches, rows_of
from storage.sqlite_log import EVENT_COLUMNS, log_event
from storage.state_event import Event

# A chain of merges is one hop: who has become a user that becomes another one is pointed at that one.
SCHEMA = """
CREATE TABLE aliases (
    tenant TEXT NOT NULL,
    user_id TEXT NOT NULL,
    target TEXT NOT NULL, -- whom the user has become
    PRIMARY KEY (tenant, user_id)
) WITHOUT ROWID;
CREATE INDEX aliases_by_target ON aliases (tenant, target);
"""

SELECT_VISITOR = f"""
SELECT {EVENT_COLUMNS} FROM log WHERE tenant = ? AND user_id = ? ORDER BY seq LIMIT {MAX_MERGED + 1}
"""  # noqa: S608, the columns are a constant

SELECT_SEEN = f"""
SELECT DISTINCT type, item_id FROM log
WHERE tenant = :tenant AND user_id = :user_id AND type NOT IN ('{UNDO}', '{INTO}')
AND event_id NOT IN (SELECT item_id FROM log WHERE tenant = :tenant AND user_id = :user_id AND type = '{UNDO}')
"""  # noqa: S608, the types are constants


SELECT_TARGETS = """
SELECT asked.column1, aliases.target FROM ({rows}) AS asked
CROSS JOIN aliases ON aliases.tenant = ? AND aliases.user_id = asked.column1
"""


def root(db: sqlite3.Connection, tenant: str, user_id: str) -> str:
    """Whom the user has become; themselves if nobody."""
    row = db.execute("SELECT target FROM aliases WHERE tenant = ? AND user_id = ?", (tenant, user_id)).fetchone()
    return user_id if row is None else str(row[0])


def as_logged(db: sqlite3.Connection, tenant: str, events: Sequence[Event]) -> list[Event]:
    """The events as they stand in the logs of those whom their users have become."""
    targets: dict[str, str] = {}
    for batch in in_batches([(user_id,) for user_id in dict.fromkeys(event.user_id for event in events)], (64, 8, 1)):
        asked = [*(user_id for (user_id,) in batch), tenant]
        targets.update(db.execute(SELECT_TARGETS.format(rows=rows_of(batch)), asked).fetchall())
    return [readdressed(event, targets[event.user_id]) if event.user_id in targets else event for event in events]


def seen_items(db: sqlite3.Connection, tenant: str, user_id: str, unseen_types: Collection[str]) -> set[str]:
    of_user = {"tenant": tenant, "user_id": root(db, tenant, user_id)}
    return {item_id for kind, item_id in db.execute(SELECT_SEEN, of_user) if plain_type(kind) not in unseen_types}


def undo_event(db: sqlite3.Connection, tenant: str, user_id: str, event_id: str) -> bool | None:
    """Whether the event counted until now; None where it is not logged."""
    of_user = root(db, tenant, user_id)
    undone = full_id(event_id, user_id, of_user)
    is_logged = "SELECT 1 FROM log WHERE tenant = ? AND user_id = ? AND event_id = ?"
    if db.execute(is_logged, (tenant, of_user, undone)).fetchone() is None:
        return None
    return log_event(db, tenant, undo(of_user, undone, _now_us())) is not None


def merge(db: sqlite3.Connection, tenant: str, user_id: str, visitor: str) -> bool | MergeRefused:
    """Whether the visitor becomes the user with this; or why not, and then nothing changes."""
    target = root(db, tenant, user_id)
    try:
        if is_merged(target, visitor, root(db, tenant, visitor)):
            return False
    except MergeRefused as refusal:
        return refusal
    events = [Event(*columns) for columns in db.execute(SELECT_VISITOR, (tenant, visitor))]
    if len(events) > MAX_MERGED:
        return MergeTooLarge(f"the visitor has more than {MAX_MERGED:,} events; nothing changed")
    for event in events:
        log_event(db, tenant, readdressed(event, target))
    log_event(db, tenant, into(visitor, target, _now_us()))
    db.execute("DELETE FROM states WHERE tenant = ? AND user_id = ?", (tenant, visitor))
    db.execute("UPDATE aliases SET target = ? WHERE tenant = ? AND target = ?", (target, tenant, visitor))
    db.execute("INSERT INTO aliases (tenant, user_id, target) VALUES (?, ?, ?)", (tenant, visitor, target))
    return True


def names_of(db: sqlite3.Connection, tenant: str, user_id: str) -> list[str]:
    """Everybody who has become the one that the user is, and that one."""
    of_user = root(db, tenant, user_id)
    found = db.execute("SELECT user_id FROM aliases WHERE tenant = ? AND target = ?", (tenant, of_user))
    return [*(name for (name,) in found), of_user]


def _now_us() -> int:
    return time.time_ns() // 1_000
