"""Undo, merge and erasure in the embedded store: each runs as a whole in the caller's transaction."""

import sqlite3
import time
from collections.abc import Collection

from storage.errors import MergeRefused, MergeTooLarge
from storage.records import MAX_MERGED
from storage.sqlite.log import RECORD_COLUMNS, log_event, resolve_alias
from storage.state.corrections import full_id, is_already_merged, readdressed
from storage.state.event import Merge, Undo, digest
from storage.state.record_encoding import EVENT, UNDO, from_row

SELECT_VISITOR = f"""
SELECT {RECORD_COLUMNS} FROM log WHERE tenant = ? AND user_id = ? ORDER BY seq LIMIT {MAX_MERGED + 1}
"""  # noqa: S608, the columns are a constant

SELECT_SEEN = f"""
SELECT DISTINCT type, item_id FROM log
WHERE tenant = :tenant AND user_id = :user_id AND kind = '{EVENT}'
AND event_id NOT IN (SELECT event_id FROM log WHERE tenant = :tenant AND user_id = :user_id AND kind = '{UNDO}')
"""  # noqa: S608, the kinds are constants


def seen_items(db: sqlite3.Connection, tenant: str, user_id: str, unseen_types: Collection[str]) -> set[str]:
    """Return the items of all events that count in the user's log, except events of `unseen_types`."""
    of_user = {"tenant": tenant, "user_id": resolve_alias(db, tenant, user_id)}
    return {item_id for kind, item_id in db.execute(SELECT_SEEN, of_user) if kind not in unseen_types}


def undo_event(db: sqlite3.Connection, tenant: str, user_id: str, event_id: str) -> bool | None:
    """Log an undo of the event; return whether the event counted until now, None where it is not logged."""
    of_user = resolve_alias(db, tenant, user_id)
    undone = full_id(event_id, user_id, of_user)
    is_logged = "SELECT 1 FROM log WHERE tenant = ? AND user_id = ? AND event_id = ? AND kind = ?"
    if db.execute(is_logged, (tenant, of_user, undone, EVENT)).fetchone() is None:
        return None
    return log_event(db, tenant, Undo(of_user, undone, _now_us())) is not None


def merge(db: sqlite3.Connection, tenant: str, user_id: str, visitor: str) -> bool | MergeRefused:
    """Merge the visitor into the user; return whether that is new, or a refusal. A refusal changes nothing."""
    target = resolve_alias(db, tenant, user_id)
    try:
        if is_already_merged(target, visitor, resolve_alias(db, tenant, visitor)):
            return False
    except MergeRefused as refusal:
        return refusal
    events = [from_row(row) for row in db.execute(SELECT_VISITOR, (tenant, visitor))]
    if len(events) > MAX_MERGED:
        return MergeTooLarge(f"the visitor has more than {MAX_MERGED:,} events; nothing changed")
    for event in events:
        assert not isinstance(event, Merge)  # the visitor has no alias
        log_event(db, tenant, readdressed(event, target))
    log_event(db, tenant, Merge(visitor, target, _now_us()))
    db.execute("DELETE FROM states WHERE tenant = ? AND user_id = ?", (tenant, visitor))
    db.execute("UPDATE aliases SET target = ? WHERE tenant = ? AND target = ?", (target, tenant, visitor))
    db.execute("INSERT INTO aliases (tenant, user_id, target) VALUES (?, ?, ?)", (tenant, visitor, target))
    return True


def erase(db: sqlite3.Connection, tenant: str, user_id: str) -> None:
    """Delete logs, states and aliases of the user and of everybody who has become the user."""
    (through_seq,) = db.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'log'").fetchone()
    target = resolve_alias(db, tenant, user_id)
    aliases = db.execute("SELECT user_id FROM aliases WHERE tenant = ? AND target = ?", (tenant, target)).fetchall()
    for name in (*(alias for (alias,) in aliases), target):
        of_user = (tenant, name)
        if db.execute("DELETE FROM log WHERE tenant = ? AND user_id = ?", of_user).rowcount:
            erased = (tenant, digest(name), through_seq)
            db.execute("INSERT INTO erasures (tenant, user, through_seq) VALUES (?, ?, ?)", erased)
        db.execute("DELETE FROM states WHERE tenant = ? AND user_id = ?", of_user)
        db.execute("DELETE FROM aliases WHERE tenant = ? AND user_id = ?", of_user)


def _now_us() -> int:
    return time.time_ns() // 1_000
