"""The table of states in the embedded store: reading states, folding their missing entries, and saving them."""

import logging
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from storage.records import DAY_S, FoldedState
from storage.sqlite import log
from storage.sqlite.batches import execute_in_batches, rows_with_blobs
from storage.sqlite.log import NEWEST, NO_LIMIT, PageReader, add_seen, log_entries
from storage.state.corrections import EventFilter, LogFold, ReadState, SeenItems
from storage.state.generation import Generation, StateError
from storage.state.layout import idle_times_s

DROPPED_AT_ONCE = 1000  # states removed in one transaction, so that no writer waits long
READ_AT_ONCE = 256  # states, about 1 MB
SHORT_LOG = 128  # entries; reading them takes as long as the switch to the thread that reads them

SELECT_STATES = """
SELECT json_group_array(json_array(
    batch.column1, coalesce(aliases.target, batch.column1),
    (SELECT max(seq) FROM log WHERE tenant = ? AND user_id = coalesce(aliases.target, batch.column1)),
    states.through_seq, length(CAST(states.value AS BLOB))
)), CAST(group_concat(states.value, '') AS BLOB)
FROM ({rows}) AS batch
LEFT JOIN aliases ON aliases.tenant = ? AND aliases.user_id = batch.column1
LEFT JOIN states ON states.tenant = ? AND states.user_id = coalesce(aliases.target, batch.column1)
    AND states.generation = ?
"""

COUNT_MISSING = "SELECT count(*) FROM (SELECT 1 FROM log WHERE tenant = ? AND user_id = ? AND seq > ? LIMIT ?)"

# Keeps a newer state that another process has saved meanwhile, and saves no state of a log that is gone.
SAVE_STATES = """
INSERT INTO states (tenant, user_id, generation, through_seq, value, written_day)
SELECT * FROM ({rows}) AS batch
WHERE EXISTS (SELECT 1 FROM log WHERE seq = batch.column4 AND tenant = batch.column1 AND user_id = batch.column2)
ON CONFLICT (tenant, user_id, generation)
DO UPDATE SET through_seq = excluded.through_seq, value = excluded.value,
    written_day = max(excluded.written_day, states.written_day)
WHERE excluded.through_seq >= states.through_seq
"""

REDATE = """
UPDATE states SET written_day = ? WHERE rowid IN (SELECT rowid FROM states WHERE written_day > ? LIMIT ?)
"""

SELECT_SAVED = """
SELECT rowid, user_id, through_seq, value FROM states
WHERE rowid > ? AND tenant = ? AND generation = ? ORDER BY rowid LIMIT ?
"""

DROP_GENERATION = """
DELETE FROM states
WHERE rowid IN (SELECT rowid FROM states WHERE rowid > ? AND tenant = ? AND generation = ? ORDER BY rowid LIMIT ?)
RETURNING rowid
"""

# Only for states that hold the newest entry of the log, and under the write lock.
REPLACE_STATES = """
INSERT INTO states (tenant, user_id, generation, through_seq, value, written_day) {rows}
ON CONFLICT (tenant, user_id, generation)
DO UPDATE SET through_seq = excluded.through_seq, value = excluded.value, written_day = excluded.written_day
"""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StoredState:
    """A stored state.

    user_id      the user of that id, or the one that they were merged into
    newest_seq   the newest sequence number of the user's log; 0: no log
    through_seq  that of the last entry in the state; 0: none
    """

    user_id: str
    newest_seq: int
    through_seq: int
    value: bytes


@dataclass(slots=True)
class CurrentState:
    """The fold of a user's whole log; its value is None if the stored state lacks too many entries to fold them now."""

    stored: StoredState
    value: bytes | None


def current_states(
    db: sqlite3.Connection, generation: Generation, tenant: str, user_ids: Iterable[str], max_missing: int | None = None
) -> dict[str, CurrentState]:
    """Return the users' states as of now; those that lack more than `max_missing` entries are not folded.

    The missing entries of the others are folded: the whole log for a new generation or layout, or the rest
    of the log if a process that serves another generation has appended.
    """
    states: dict[str, CurrentState] = {}
    for user_id, stored in stored_states(db, generation, tenant, user_ids).items():
        is_current = stored.through_seq == stored.newest_seq
        value = stored.value if is_current else _caught_up(db, generation, tenant, stored, max_missing)
        states[user_id] = CurrentState(stored, value)
    return states


def complete_states(
    db: sqlite3.Connection, generation: Generation, tenant: str, user_ids: Sequence[str]
) -> list[bytes | None] | None:
    """Return the users' states as of now, None for users without a log; None if any state lacks entries of its log."""
    states: dict[str, bytes | None] = {}
    for user_id, _, newest_seq, through_seq, value in _stored_rows(db, generation, tenant, user_ids):
        if newest_seq is not None and (through_seq != newest_seq or not generation.fits(value)):
            return None
        states[user_id] = None if newest_seq is None else value
    return [states[user_id] for user_id in user_ids]


def _caught_up(
    db: sqlite3.Connection, generation: Generation, tenant: str, stored: StoredState, max_missing: int | None
) -> bytes | None:
    after, fold = stored.through_seq, LogFold(generation, stored.value)
    while after < stored.newest_seq:
        if max_missing is not None and _misses_more(db, tenant, stored.user_id, after, max_missing):
            return None
        entries = log_entries(db, tenant, stored.user_id, after, NO_LIMIT)
        # others may have been logged since newest_seq was read
        fold.apply([entry.record for entry in entries if entry.seq <= stored.newest_seq])
        if not fold.must_restart:
            break
        after, fold = 0, fold.restarted()
    return fold.value


def _misses_more(db: sqlite3.Connection, tenant: str, user_id: str, after: int, than: int) -> bool:
    (missing,) = db.execute(COUNT_MISSING, (tenant, user_id, after, than + 1)).fetchone()
    return bool(missing > than)


def stored_states(
    db: sqlite3.Connection, generation: Generation, tenant: str, user_ids: Iterable[str]
) -> dict[str, StoredState]:
    """Return the stored state of each user; the empty state if there is none or it is unreadable."""
    states: dict[str, StoredState] = {}
    for user_id, target, newest_seq, through_seq, value in _stored_rows(db, generation, tenant, user_ids):
        if value is None or not generation.fits(value):
            if value is not None:
                logger.warning("folding a state again from the log, because it has another layout")
            through_seq, value = 0, generation.encoded_empty
        states[user_id] = StoredState(target, newest_seq or 0, through_seq, value)
    return states


def _stored_rows(db: sqlite3.Connection, generation: Generation, tenant: str, user_ids: Iterable[str]) -> list[Any]:
    rows = [(user_id,) for user_id in dict.fromkeys(user_ids)]
    return rows_with_blobs(
        execute_in_batches(db, SELECT_STATES, rows, before=[tenant], after=[tenant, tenant, generation.tag])
    )


async def read_seen_items(reader: PageReader, tenant: str, user_id: str, events: EventFilter, limit: int) -> SeenItems:
    """Return the items as `log.read_seen_items` does; for a short log with the state, in one read."""
    if events.state_of is not None:
        short = partial(_seen_of_short_log, tenant=tenant, user_id=user_id, events=events, limit=limit)
        if (found := reader.read_now(short)) is None:
            found = await reader.read(short)
        if (seen := found[0]) is not None:
            return seen
    return await log.read_seen_items(reader, tenant, user_id, events, limit)


def _seen_of_short_log(
    db: sqlite3.Connection, tenant: str, user_id: str, events: EventFilter, limit: int
) -> tuple[SeenItems | None]:
    """Return the items of a log of at most SHORT_LOG entries, or of any log if `limit` is no larger; else of None.

    A state that lacks entries of its log is left out: `current_states` folds them.
    """
    assert events.state_of is not None
    (stored,) = stored_states(db, events.state_of, tenant, [user_id]).values()
    seen, count = SeenItems(events, limit), min(limit, SHORT_LOG) + 1
    if len(add_seen(db, tenant, stored.user_id, NEWEST, count, seen)) == count and count <= limit:
        return (None,)
    if stored.through_seq == stored.newest_seq:
        seen.state = ReadState(stored.value if stored.newest_seq else None)
    return (seen,)


def save(db: sqlite3.Connection, generation: Generation, states: Sequence[FoldedState]) -> None:
    """Save these states for users who read them, except those of users who have a newer state or no log any more."""
    _save(db, generation, states, [today()] * len(states))


def save_rebuilt(db: sqlite3.Connection, generation: Generation, states: Sequence[FoldedState]) -> None:
    """Save as `save` does, but dated by the states' last events, so that a rebuild makes no idle user a new one.

    States of another version's layout are dated today, as those that are read.
    """
    try:
        decoded = generation.decode_many([one.value for one in states])
    except StateError:
        save(db, generation, states)
    else:
        _save(db, generation, states, [today() - one // DAY_S for one in idle_times_s(decoded, time.time())])


def _save(
    db: sqlite3.Connection, generation: Generation, states: Sequence[FoldedState], written_days: Sequence[int]
) -> None:
    rows = [
        (one.tenant, one.user_id, generation.tag, one.through_seq, one.value, day)
        for one, day in zip(states, written_days, strict=True)
    ]
    execute_in_batches(db, SAVE_STATES, rows)


def replace(
    db: sqlite3.Connection, generation: Generation, tenant: str, values: Mapping[str, bytes], seqs: Mapping[str, int]
) -> None:
    """Save the users' states, which hold their whole logs, through `seqs`. The caller holds the write lock."""
    day = today()
    rows = [(tenant, user_id, generation.tag, seqs[user_id], value, day) for user_id, value in values.items()]
    execute_in_batches(db, REPLACE_STATES, rows, sizes=(16, 4, 1))


def saved_states(
    db: sqlite3.Connection, tenant: str, tag: bytes, after_row: int
) -> tuple[list[FoldedState], int | None]:
    """Return some of the tenant's states of the generation that follow that row, and the last row; None at the end."""
    rows = db.execute(SELECT_SAVED, (after_row, tenant, tag, READ_AT_ONCE)).fetchall()
    states = [FoldedState(tenant, user_id, through_seq, value) for _, user_id, through_seq, value in rows]
    return states, rows[-1][0] if rows else None


def drop_generation(db: sqlite3.Connection, tenant: str, tag: bytes, after_row: int) -> list[int]:
    """Remove some of the tenant's states of the generation that follow that row; return their rows, none at the end."""
    return [row for (row,) in db.execute(DROP_GENERATION, (after_row, tenant, tag, DROPPED_AT_ONCE))]


def drop_idle(db: sqlite3.Connection, before_day: int) -> int:
    """Remove some states whose users have been idle since that day; return how many.

    States that a clock that was ahead has dated in the future get today's date.
    """
    db.execute(REDATE, (today(), today(), DROPPED_AT_ONCE))
    sql = "DELETE FROM states WHERE rowid IN (SELECT rowid FROM states WHERE written_day < ? LIMIT ?)"
    return db.execute(sql, (before_day, DROPPED_AT_ONCE)).rowcount


def today() -> int:
    """Return the number of today, in days since 1970."""
    return int(time.time() // DAY_S)
