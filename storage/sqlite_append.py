"""Appending to the embedded store: what many requests want is logged, folded and kept in a few statements."""

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

from storage import sqlite_corrections, sqlite_states
from storage.corrections import is_correction
from storage.fold import fold_encoded
from storage.records import AppendResult, FoldedState
from storage.sqlite_log import known_events, log_new
from storage.state import Generation
from storage.state_event import Event

DUPLICATE = AppendResult(duplicate=True)
# A state that lacks more entries of the log is folded apart, so that no writer waits for it.
FAR_BEHIND = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Append:
    """What a request wants to be appended, as work for a group; its result is answers, and whose states are behind."""

    generations: Sequence[Generation]
    tenant: str
    events: Sequence[Event]

    def __call__(self, db: sqlite3.Connection) -> "Result":
        (result,) = append(db, [self])
        return result

    def goes_with(self, other: object) -> bool:
        return isinstance(other, Append) and (self.generations, self.tenant) == (other.generations, other.tenant)


Result = tuple[list[AppendResult], list[tuple[str, Generation]]]
"""The answers, and whose states of which generations are far behind: those were left as they are."""


def append(db: sqlite3.Connection, appends: Sequence[Append]) -> list[Result]:
    """Log and fold the events of requests that go together, in order; all in the transaction that it is called in."""
    generations, tenant = appends[0].generations, appends[0].tenant
    posted = [event for one in appends for event in one.events]
    events = sqlite_corrections.as_logged(db, tenant, posted)
    known = known_events(db, tenant, events)
    is_new = []
    for event in events:
        is_new.append((event.user_id, event.event_id) not in known)
        known.add((event.user_id, event.event_id))
    new = list(compress(events, is_new))
    users = list(dict.fromkeys(event.user_id for event in new))
    before = [sqlite_states.current(db, generation, tenant, users, FAR_BEHIND) for generation in generations]
    through_seq = dict(zip((event.user_id for event in new), log_new(db, tenant, new), strict=True))
    corrected = {event.user_id for event in new if is_correction(event)}  # who next needs their states folds them
    behind: list[tuple[str, Generation]] = []
    late: list[bool] = []
    for generation, found in zip(generations, before, strict=True):
        values = {user_id: user.value for user_id, user in found.items() if user is not None}
        behind += [(user_id, generation) for user_id in users if user_id not in values]
        folded, late_here = _folded(generation, {u: v for u, v in values.items() if u not in corrected}, new)
        late = late or late_here
        states = [FoldedState(tenant, user_id, through_seq[user_id], value) for user_id, value in folded.items()]
        sqlite_states.replace(db, generation, states)
    answers = _answers(generations[0], events, is_new, late)
    return [([next(answers) for _ in one.events], behind if one is appends[0] else []) for one in appends]


def _folded(
    generation: Generation, values: dict[str, bytes], events: Sequence[Event]
) -> tuple[dict[str, bytes], list[bool]]:
    """The states of users with their events folded in, and which of the events were late."""
    places = {user_id: place for place, user_id in enumerate(values)}
    is_folded = [event.user_id in places for event in events]
    own = list(compress(events, is_folded))
    if not own:
        return {}, [False] * len(events)
    folded, late = fold_encoded(generation, list(values.values()), [places[event.user_id] for event in own], own)
    each = iter(late)
    return dict(zip(values, folded, strict=True)), [one and next(each) for one in is_folded]


def _answers(
    first: Generation, events: Sequence[Event], is_new: Sequence[bool], late: Sequence[bool]
) -> Iterator[AppendResult]:
    """One for each event; `late` says it of the new ones."""
    each = iter(late)
    for event, new in zip(events, is_new, strict=True):
        if not new:
            yield DUPLICATE
        else:
            is_known = is_correction(event) or first.knows_item_of(event)
            yield AppendResult(unknown_item=not is_known, late=next(each))
