"""Appending to the embedded store: the events of many requests are logged, folded and saved in a few statements."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice

from storage.records import AppendResult
from storage.sqlite.log import deduplicate, log_new_events
from storage.sqlite.states import current_states, replace
from storage.state.compiled_fold import fold_encoded
from storage.state.event import Event, Undo
from storage.state.generation import Generation

DUPLICATE = AppendResult(duplicate=True)
# A state that lacks more entries of the log than this is caught up in a thread of its own: no writer waits for it.
FAR_BEHIND = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Append:
    """The events of one request, as work for a group commit."""

    generations: Sequence[Generation]
    tenant: str
    events: Sequence[Event | Undo]

    def __call__(self, db: sqlite3.Connection) -> "Result":
        """Append these events alone."""
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
    events, is_new = deduplicate(db, tenant, [event for one in appends for event in one.events])
    new = list(compress(events, is_new))
    user_ids = [event.user_id for event in new]
    corrected = {event.user_id for event in new if isinstance(event, Undo)}  # their next read folds their states
    before = [current_states(db, generation, tenant, user_ids, FAR_BEHIND) for generation in generations]
    seqs = dict(zip(user_ids, log_new_events(db, tenant, new), strict=True))
    behind: list[tuple[str, Generation]] = []
    late: list[bool] = []
    for generation, states in zip(generations, before, strict=True):
        behind += [(user_id, generation) for user_id, state in states.items() if state is None]
        values = {u: state.value for u, state in states.items() if state is not None and u not in corrected}
        folded, late_here = _fold(generation, values, new)
        late = late or late_here
        replace(db, generation, tenant, folded, seqs)
    results = _results(generations[0], events, is_new, iter(late))
    return [(list(islice(results, len(one.events))), behind if one is appends[0] else []) for one in appends]


def _fold(
    generation: Generation, values: Mapping[str, bytes], events: Sequence[Event | Undo]
) -> tuple[dict[str, bytes], list[bool]]:
    """Fold the events into the states of these users; return the new states, and whether each event was late."""
    places = {user_id: place for place, user_id in enumerate(values)}
    own = [event for event in events if isinstance(event, Event) and event.user_id in places]
    is_folded = [event.user_id in places for event in events]  # no undo, whose user has no place
    if not own:
        return {}, is_folded
    folded, late = fold_encoded(generation, list(values.values()), [places[event.user_id] for event in own], own)
    late_of_own = iter(late)
    return dict(zip(values, folded, strict=True)), [one and next(late_of_own) for one in is_folded]


def _results(
    first: Generation, events: Sequence[Event | Undo], is_new: Sequence[bool], late: Iterator[bool]
) -> Iterator[AppendResult]:
    """The result of each event; `late` says of each new one whether it was late."""
    for event, new in zip(events, is_new, strict=True):
        if new:
            is_unknown = isinstance(event, Event) and not first.knows_item_of(event)
            yield AppendResult(unknown_item=is_unknown, late=next(late))
        else:
            yield DUPLICATE
