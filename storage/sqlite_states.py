"""The states' table in the embedded store: what is stored of users, brought up to date, and kept."""

import logging
import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from storage.corrections import LogFold
from storage.records import FoldedState
from storage.sqlite_batches import in_batches, rows_of
from storage.sqlite_log import NO_LIMIT, log_entries
from storage.state import Generation

DAY_S = 86_400

SELECT_STATES = """
SELECT asked.column1, (SELECT max(seq) FROM log WHERE tenant = ? AND user_id = asked.column1),
    states.through_seq, states.value
FROM ({rows}) AS asked
LEFT JOIN states ON states.tenant = ? AND states.user_id = asked.column1 AND states.generation = ?
"""

COUNT_LACKING = "SELECT count(*) FROM (SELECT 1 FROM log WHERE tenant = ? AND user_id = ? AND seq > ? LIMIT ?)"

# A state that somebody else has brought further meanwhile stays, and nothing is kept of a log that is gone.
KEEP_STATE = """
INSERT INTO states (tenant, user_id, generation, through_seq, value, written_day)
SELECT :tenant, :user_id, :generation, :through_seq, :value, :day
WHERE EXISTS (SELECT 1 FROM log WHERE seq = :through_seq AND tenant = :tenant AND user_id = :user_id)
ON CONFLICT (tenant, user_id, generation)
DO UPDATE SET through_seq = excluded.through_seq, value = excluded.value, written_day = excluded.written_day
WHERE excluded.through_seq >= states.through_seq
"""

# Of states that hold the newest entry of the log, by who holds the write lock.
REPLACE_STATES = """
INSERT INTO states (tenant, user_id, generation, through_seq, value, written_day) {rows}
ON CONFLICT (tenant, user_id, generation)
DO UPDATE SET through_seq = excluded.through_seq, value = excluded.value, written_day = excluded.written_day
"""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Current:
    """The fold of a user's log through `newest_seq` (0: no log), of which `folded_seq` was in the stored state."""

    value: bytes
    newest_seq: int
    folded_seq: int


@dataclass(slots=True)
class Stored:
    """What is stored of a user: the newest sequence number of the log, that of the state (0: none), and the state."""

    newest_seq: int
    through_seq: int
    value: bytes


def current(
    db: sqlite3.Connection, generation: Generation, tenant: str, user_ids: Iterable[str], max_missing: int | None = None
) -> dict[str, Current | None]:
    """The users as of now. What a stored state lacks is folded: all of it for a new generation or layout, the rest
    where a process that serves another generation has appended. None where that is more than `max_missing` entries.
    """
    return {
        user_id: Current(stored.value, stored.newest_seq, stored.through_seq)
        if stored.through_seq == stored.newest_seq
        else _caught_up(db, generation, tenant, user_id, stored, max_missing)
        for user_id, stored in stored_states(db, generation, tenant, user_ids).items()
    }


def _caught_up(
    db: sqlite3.Connection, generation: Generation, tenant: str, user_id: str, stored: Stored, max_missing: int | None
) -> Current | None:
    after, fold = stored.through_seq, LogFold(generation, generation.decode(stored.value))
    while after < stored.newest_seq:
        if max_missing is not None and _lacks_more(db, tenant, user_id, after, max_missing):
            return None
        for entry in log_entries(db, tenant, user_id, after, NO_LIMIT):
            if entry.seq > stored.newest_seq:  # logged since the first look
                break
            fold.take(entry.event)
        if not fold.is_spoiled:
            break
        after, fold = 0, fold.again()
    return Current(generation.encode(fold.state), stored.newest_seq, stored.through_seq)


def _lacks_more(db: sqlite3.Connection, tenant: str, user_id: str, after: int, than: int) -> bool:
    (lacking,) = db.execute(COUNT_LACKING, (tenant, user_id, after, than + 1)).fetchone()
    return bool(lacking > than)


def stored_states(
    db: sqlite3.Connection, generation: Generation, tenant: str, user_ids: Iterable[str]
) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for batch in in_batches([(user_id,) for user_id in dict.fromkeys(user_ids)], (64, 8, 1)):
        asked = [tenant, *(user_id for (user_id,) in batch), tenant, generation.tag]
        for user_id, newest_seq, through_seq, value in db.execute(SELECT_STATES.format(rows=rows_of(batch)), asked):
            if value is not None and not generation.fits(value):
                logger.warning("folding a state again from the log: it is of another layout")
            if value is None or not generation.fits(value):
                through_seq, value = 0, generation.encoded_empty
            found[user_id] = Stored(newest_seq or 0, through_seq, value)
    return found


def keep(db: sqlite3.Connection, generation: Generation, states: Sequence[FoldedState]) -> None:
    day = today()
    db.executemany(
        KEEP_STATE,
        [
            {
                "tenant": state.tenant,
                "user_id": state.user_id,
                "generation": generation.tag,
                "through_seq": state.through_seq,
                "value": state.value,
                "day": day,
            }
            for state in states
        ],
    )


def replace(db: sqlite3.Connection, generation: Generation, states: Sequence[FoldedState]) -> None:
    """Keep states that hold all of their users' logs. The caller holds the write lock."""
    day = today()
    rows = [(one.tenant, one.user_id, generation.tag, one.through_seq, one.value, day) for one in states]
    for batch in in_batches(rows, (16, 4, 1)):
        db.execute(REPLACE_STATES.format(rows=rows_of(batch)), [value for row in batch for value in row])


def today() -> int:
    return int(time.time() // DAY_S)
