"""Appending to the embedded store: the events of many requests are logged, folded and saved in a few statements."""

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

from storage import sqlite_corrections, sqlite_states
from storage.corrections import is_correction
from storage.fold import fold_encoded
from storage.records import AppendResult, FoldedState
from storage.sqlite_log import log_new_events, logged_ids
from storage.state import Generation
from storage.state_event import Event

DUPLICATE = AppendResult(duplicate=True)
# A state that lacks more entries of the log than this is caught up in a thread of its own: no writer waits for it.
FAR_BEHIND = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Append:
    """The events of one request, as work for a group commit."""

    generations: Sequence[Generation]
    tenant: str
    events: Sequence[Event]

    def __call__(self, db: sqlite3.Connection) -> "Result":
        (result,) = append_all(db, [self])
        return result

    def combines_with(self, other: object) -> bool:
        """Whether both can be appended in the same few statements."""
        return isinstance(other, Append) and (self.generations, self.tenant) == (other.generations, other.tenant)


Result = tuple[list[AppendResult], list[tuple[str, Generation]]]
"""A result for each event; and the users and generations whose states are far behind, which were left as they are."""


def append_all(db: sqlite3.Connection, appends: Sequence[Append]) -> list[Result]:
    """Log and fold the events of requests that combine, in order, in the caller's transaction."""
    generations, tenant = appends[0].generations, appends[0].tenant
    posted = [event for one in appends for event in one.events]
    events = sqlite_corrections.readdress_all(db, tenant, posted)
    logged = logged_ids(db, tenant, events)
    is_new = []
    for event in events:
        is_new.append((event.user_id, event.event_id) not in logged)
        logged.add((event.user_id, event.event_id))
    new = list(compress(events, is_new))
    users = list(dict.fromkeys(event.user_id for event in new))
    before = [sqlite_states.current_states(db, generation, tenant, users, FAR_BEHIND) for generation in generations]
    through_seq = dict(zip((event.user_id for event in new), log_new_events(db, tenant, new), strict=True))
    corrected = {event.user_id for event in new if is_correction(event)}  # their next read folds their states
    behind: list[tuple[str, Generation]] = []
    late: list[bool] = []
    for generation, found in zip(generations, before, strict=True):
        values = {user_id: user.value for user_id, user in found.items() if user is not None}
        behind += [(user_id, generation) for user_id in users if user_id not in values]
        folded, late_here = _folded(generation, {u: v for u, v in values.items() if u not in corrected}, new)
        late = late or late_here
        states = [FoldedState(tenant, user_id, through_seq[user_id], value) for user_id, value in folded.items()]
        sqlite_states.replace(db, generation, states)
    results = _results(generations[0], events, is_new, late)
    return [([next(results) for _ in one.events], behind if one is appends[0] else []) for one in appends]


def _folded(
    generation: Generation, values: dict[str, bytes], events: Sequence[Event]
) -> tuple[dict[str, bytes], list[bool]]:
    """Fold the events into the states of the users; return the new states, and whether each event was late."""
    places = {user_id: place for place, user_id in enumerate(values)}
    is_folded = [event.user_id in places for event in events]
    own = list(compress(events, is_folded))
    if not own:
        return {}, [False] * len(events)
    folded, late = fold_encoded(generation, list(values.values()), [places[event.user_id] for event in own], own)
    each = iter(late)
    return dict(zip(values, folded, strict=True)), [one and next(each) for one in is_folded]


def _results(
    first: Generation, events: Sequence[Event], is_new: Sequence[bool], late: Sequence[bool]
) -> Iterator[AppendResult]:
    """The result of each event; `late` has a flag for each new one."""
    each = iter(late)
    for event, new in zip(events, is_new, strict=True):
        if not new:
            yield DUPLICATE
        else:
            is_known = is_correction(event) or first.knows_item_of(event)
            yield AppendResult(unknown_item=not is_known, late=next(each))
