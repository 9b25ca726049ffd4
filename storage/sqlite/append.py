"""Appending to the embedded store: the events of many requests are logged, folded and saved in a few statements."""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from operator import not_

from storage.errors import StorageBusy
from storage.records import DUPLICATE, NEW, AppendResult
from storage.sqlite.batches import execute_in_batches
from storage.sqlite.log import ERASED, RECORD_COLUMNS
from storage.sqlite.states import current_states, replace
from storage.state.compiled_fold import Folded, fold_encoded
from storage.state.corrections import readdressed
from storage.state.event import Event, Undo
from storage.state.generation import Generation
from storage.state.record_encoding import EVENT, UNDO, to_row

BEING_ERASED = "the user is being erased; try again later"
# A state that lacks more log entries than this catches up in a separate thread, so that no writer waits for it.
MAX_MISSING_ENTRIES = 1000

# OR FAIL, because SQLite copies every page before a statement changes it if it may have to undo that statement alone.
# Here a row that fails ends the whole transaction.
INSERT_EVENTS = f"INSERT OR FAIL INTO log (seq, tenant, {RECORD_COLUMNS}) {{rows}}"

SELECT_KNOWN = """
SELECT batch.column1, batch.column2, batch.column3 FROM ({rows}) AS batch
CROSS JOIN log ON log.tenant = ? AND log.user_id = batch.column1 AND log.event_id = batch.column2
    AND log.kind = batch.column3
"""


@dataclass(frozen=True, slots=True, eq=False)
class Append:
    """The events of one request, as work for a group commit."""

    generations: Sequence[Generation]
    tenant: str
    events: Sequence[Event | Undo]

    def __call__(self, db: sqlite3.Connection) -> "Result":
        """Append these events alone."""
        (result,) = append_all(db, [self])
        if isinstance(result, StorageBusy):
            raise result
        return result

    def combines_with(self, other: object) -> bool:
        """Whether both can be appended in the same few statements."""
        return isinstance(other, Append) and (self.generations, self.tenant) == (other.generations, other.tenant)


Result = tuple[list[AppendResult], list[tuple[str, Generation]]]
"""A result for each event; and the users and generations whose states are far behind, and were not changed."""


def append_all(db: sqlite3.Connection, appends: Sequence[Append]) -> list[Result | StorageBusy]:
    """Log and fold the events of requests that combine, in order, in the caller's transaction.

    A request about a user who is being erased is refused; the others are not.
    """
    generations, tenant = appends[0].generations, appends[0].tenant
    posted = [event for one in appends for event in one.events]
    user_ids = [event.user_id for event in posted]
    before = [current_states(db, generation, tenant, user_ids, MAX_MISSING_ENTRIES) for generation in generations]
    owners = {user_id: state.stored.user_id for user_id, state in before[0].items()}
    if ERASED in owners.values():
        return _append_others(db, appends, {user_id for user_id, owner in owners.items() if owner == ERASED})
    events, is_new = _deduplicate(db, tenant, posted, owners)
    new = list(compress(events, is_new))
    corrected = {event.user_id for event in new if isinstance(event, Undo)}  # their next read folds their states
    seqs = dict(zip([event.user_id for event in new], _log(db, tenant, new), strict=True))
    to_fold = seqs.keys() - corrected
    behind: list[tuple[str, Generation]] = []
    outcomes: list[AppendResult] = []
    for generation, states in zip(generations, before, strict=True):
        values: dict[str, bytes] = {}
        for user_id, state in states.items():
            if state.value is None:
                behind.append((owners[user_id], generation))
            elif owners[user_id] in to_fold:
                values[owners[user_id]] = state.value
        folded, outcomes_here = _fold(generation, values, new)
        outcomes = outcomes or outcomes_here  # those of the first generation
        replace(db, generation, tenant, folded, seqs)
    outcome = iter(outcomes)
    results = (next(outcome) if one else DUPLICATE for one in is_new)
    answers: list[Result | StorageBusy] = []
    for one in appends:
        answers.append((list(islice(results, len(one.events))), behind))
        behind = []  # only in the first answer
    return answers


def _append_others(db: sqlite3.Connection, appends: Sequence[Append], erased: set[str]) -> list[Result | StorageBusy]:
    is_refused = [not erased.isdisjoint(event.user_id for event in one.events) for one in appends]
    others = list(compress(appends, map(not_, is_refused)))
    results = iter(append_all(db, others) if others else [])
    return [StorageBusy(BEING_ERASED) if refused else next(results) for refused in is_refused]


def _deduplicate(
    db: sqlite3.Connection, tenant: str, posted: Sequence[Event | Undo], owners: Mapping[str, str]
) -> tuple[list[Event | Undo], list[bool]]:
    """Return the events, readdressed to the users that theirs were merged into, and whether each is new in that log.

    Of events with the same id, only the first is new.
    """
    events = [
        event if owners[event.user_id] == event.user_id else readdressed(event, owners[event.user_id])
        for event in posted
    ]
    keys = [(event.user_id, event.event_id, UNDO if isinstance(event, Undo) else EVENT) for event in events]
    logged = set(execute_in_batches(db, SELECT_KNOWN, keys, after=[tenant]))
    is_new = []
    for key in keys:
        is_new.append(key not in logged)
        logged.add(key)
    return events, is_new


def _log(db: sqlite3.Connection, tenant: str, events: Sequence[Event | Undo]) -> range:
    """Log events that the log does not have; return their sequence numbers. The caller holds the write lock."""
    (last,) = db.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'log'").fetchone()
    seqs = range(last + 1, last + 1 + len(events))
    rows = [(seq, tenant, *to_row(event)) for seq, event in zip(seqs, events, strict=True)]
    execute_in_batches(db, INSERT_EVENTS, rows)
    return seqs


def _fold(
    generation: Generation, values: Mapping[str, bytes], events: Sequence[Event | Undo]
) -> tuple[dict[str, bytes], list[AppendResult]]:
    """Fold the events into the states of these users; return the new states, and the outcome of each event."""
    places = {user_id: place for place, user_id in enumerate(values)}
    own = [event for event in events if isinstance(event, Event) and event.user_id in places]
    folded, late, unknown = Folded([], [], [])
    if own:
        users = [places[event.user_id] for event in own]
        folded, late, unknown = fold_encoded(generation, list(values.values()), users, own)
    outcome = map(NEW.__getitem__, zip(unknown, late, strict=True))
    return dict(zip(values, folded, strict=True)), [
        next(outcome) if event.user_id in places else AppendResult.unfolded(generation, event)
        for event in events  # no undo has a place
    ]
