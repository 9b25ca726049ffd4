"""Undo, merge and erasure in the embedded store: each step runs as a whole in the caller's transaction."""

import sqlite3
import time

from storage.errors import MergeRefused, MergeTooLarge, StorageBusy
from storage.records import MAX_MERGED
from storage.sqlite.append import BEING_ERASED
from storage.sqlite.items.tenant_values import KEYS_SEEN
from storage.sqlite.log import ERASED, log_event, log_length, resolve_alias
from storage.state.corrections import full_id, is_already_merged
from storage.state.event import Merge, Undo, digest, logged_id
from storage.state.record_encoding import COLUMNS, EVENT

OTHER_COLUMNS = ", ".join(column for column in COLUMNS if column not in ("user_id", "event_id"))

# Does what `readdressed` in storage/state/corrections.py does, in one statement, during which other threads run.
COPY_LOG = f"""
INSERT INTO log (tenant, user_id, event_id, {OTHER_COLUMNS})
SELECT tenant, :target, iif(instr(event_id, '/'), event_id, :posted_for || '/' || event_id), {OTHER_COLUMNS}
FROM log WHERE tenant = :tenant AND user_id = :visitor ORDER BY seq
ON CONFLICT DO NOTHING
"""  # noqa: S608, the columns are constants

MARK_ERASED = """
INSERT INTO aliases (tenant, user_id, target) VALUES (?, ?, ?)
ON CONFLICT (tenant, user_id) DO UPDATE SET target = excluded.target
"""

# The user's values stay, and those of the visitor that are missing are added.
MERGE_PROPERTIES = """
INSERT INTO user_properties (tenant, user_id, properties)
SELECT tenant, :target, properties FROM user_properties WHERE tenant = :tenant AND user_id = :visitor
ON CONFLICT DO UPDATE SET properties = json_patch(excluded.properties, properties)
"""

DELETE_SOME = "DELETE FROM log WHERE seq IN (SELECT seq FROM log WHERE tenant = ? AND user_id = ? LIMIT ?)"

# The tables with a tenant's values, except those of users and the audit log, and their keys behind the tenant.
TENANT_TABLES = {
    "item_vectors": "item_id",
    "item_codes": "item_id, generation",
    "items": "item_id",
    "trends": "item_id",
    "visitors": "item_id",
    "order_counts": "name",
    "tallies": "name",
    "scenarios": "number",
    "generations": "tag",
}
DELETE_VALUES = [
    f"DELETE FROM {table} WHERE tenant = ? AND ({key}) IN (SELECT {key} FROM {table} WHERE tenant = ? LIMIT ?)"  # noqa: S608
    for table, key in TENANT_TABLES.items()
]

ERASED_AT_ONCE = 250  # log entries or values; other writers wait for some milliseconds


def undo_event(db: sqlite3.Connection, tenant: str, user_id: str, event_id: str) -> bool | None:
    """Log an undo of the event; return whether the event counted until now, None if it is not logged."""
    of_user = resolve_alias(db, tenant, user_id)
    undone = full_id(event_id, user_id, of_user)
    is_logged = "SELECT 1 FROM log WHERE tenant = ? AND user_id = ? AND event_id = ? AND kind = ?"
    if db.execute(is_logged, (tenant, of_user, undone, EVENT)).fetchone() is None:
        return None
    return log_event(db, tenant, Undo(of_user, undone, _now_us())) is not None


def merge(db: sqlite3.Connection, tenant: str, user_id: str, visitor: str) -> bool | MergeRefused:
    """Merge the visitor into the user; return whether that is new, or a refusal. A refusal changes nothing."""
    target, visitors_target = resolve_alias(db, tenant, user_id), resolve_alias(db, tenant, visitor)
    if ERASED in (target, visitors_target):
        raise StorageBusy(BEING_ERASED)
    try:
        if is_already_merged(target, visitor, visitors_target):
            return False
    except MergeRefused as refusal:
        return refusal
    if log_length(db, tenant, visitor, MAX_MERGED + 1) > MAX_MERGED:
        return MergeTooLarge(f"the visitor has more than {MAX_MERGED:,} events; nothing changed")
    given = {"tenant": tenant, "visitor": visitor, "target": target, "posted_for": logged_id(visitor)}
    for copy in (COPY_LOG, MERGE_PROPERTIES):
        db.execute(copy, given)
    log_event(db, tenant, Merge(visitor, target, _now_us()))
    _delete_states_and_properties(db, tenant, visitor)
    db.execute("UPDATE aliases SET target = ? WHERE tenant = ? AND target = ?", (target, tenant, visitor))
    db.execute("INSERT INTO aliases (tenant, user_id, target) VALUES (?, ?, ?)", (tenant, visitor, target))
    return True


def begin_erasure(db: sqlite3.Connection, tenant: str, user_id: str) -> None:
    """Hide the logs of the user and of everybody who was merged into the user, and delete their states and properties.

    From then on, until `erase_some` has deleted the logs, nobody can read them or append to them.
    """
    target = resolve_alias(db, tenant, user_id)
    if target == ERASED:
        return
    (through_seq,) = db.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'log'").fetchone()
    aliases = db.execute("SELECT user_id FROM aliases WHERE tenant = ? AND target = ?", (tenant, target)).fetchall()
    for name in (*(alias for (alias,) in aliases), target):
        if db.execute("SELECT 1 FROM log WHERE tenant = ? AND user_id = ? LIMIT 1", (tenant, name)).fetchone():
            erased = (tenant, digest(name), through_seq)
            db.execute("INSERT INTO erasures (tenant, user, through_seq) VALUES (?, ?, ?)", erased)
        _delete_states_and_properties(db, tenant, name)
        db.execute(MARK_ERASED, (tenant, name, ERASED))


def erase_some(db: sqlite3.Connection, tenant: str) -> bool:
    """Delete some entries of the tenant's users who are being erased; return whether any are left."""
    left = ERASED_AT_ONCE
    while left > 0:
        found = db.execute("SELECT user_id FROM aliases WHERE tenant = ? AND target = ? LIMIT 1", (tenant, ERASED))
        row = found.fetchone()
        if row is None:
            return False
        (user_id,) = row
        deleted = db.execute(DELETE_SOME, (tenant, user_id, left)).rowcount
        if deleted < left:
            # a reader that had read the log before may have saved a state
            _delete_states_and_properties(db, tenant, user_id)
            db.execute("DELETE FROM aliases WHERE tenant = ? AND user_id = ?", (tenant, user_id))
        left -= max(1, deleted)
    return True


def erase_values(db: sqlite3.Connection, tenant: str) -> bool:
    """Delete some of the tenant's items, scenarios, counts and generations; return whether any may be left."""
    left = ERASED_AT_ONCE
    for statement in DELETE_VALUES:
        left -= db.execute(statement, (tenant, tenant, left)).rowcount
        if left <= 0:
            return True
    db.execute("DELETE FROM notes WHERE tenant = ? AND name != ?", (tenant, KEYS_SEEN))  # which the audit log needs
    return False


def _delete_states_and_properties(db: sqlite3.Connection, tenant: str, user_id: str) -> None:
    db.execute("DELETE FROM states WHERE tenant = ? AND user_id = ?", (tenant, user_id))
    db.execute("DELETE FROM user_properties WHERE tenant = ? AND user_id = ?", (tenant, user_id))


def _now_us() -> int:
    return time.time_ns() // 1_000
