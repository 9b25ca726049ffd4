"""Entries of the log that correct it, undo and merge, and what they mean for the fold.

They have the fields of an event. No client can post one: ids and types from outside have no "!", space or slash.

  undo   id "!undo ID"    item ID     type "!undo"   the event of that id no longer counts, wherever it stands
  into   id "!into USER"  item USER   type "!into"   the user has become that other one: the last entry of a log, and
                                                      copies of those before it stand in the other's

An event that was posted as VISITOR, before or after VISITOR became another user, has the id "VISITOR/ID" in the other's
log. So the ids of different users stay apart, and copying an event twice is a resend, which changes nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Self

from storage.errors import MergeRefused
from storage.state.event import Event
from storage.state.fold import fold_event
from storage.state.generation import Generation
from storage.state.layout import State

UNDO = "!undo"
INTO = "!into"


def undo(user_id: str, event_id: str, now_us: int) -> Event:
    """Return the entry that undoes the user's event of that id."""
    return Event(f"{UNDO} {event_id}", user_id, event_id, UNDO, now_us, None)


def into(user_id: str, target: str, now_us: int) -> Event:
    """Return the entry that merges the user into the target."""
    return Event(f"{INTO} {target}", user_id, target, INTO, now_us, None)


def is_correction(event: Event) -> bool:
    """Return whether the entry is an undo or a merge, and no event."""
    return event.type in (UNDO, INTO)


def posted_as(event: Event) -> tuple[str, str]:
    """Return the user and the id that an event, or the event that an undo takes back, was posted with."""
    event_id = event.item_id if event.type == UNDO else event.event_id
    user_id, slash, posted_id = event_id.partition("/")
    return (user_id, posted_id) if slash else (event.user_id, event_id)


def full_id(event_id: str, posted_for: str, user_id: str) -> str:
    """Return the id of an event in the log of a user whom `posted_for` has become, or is."""
    return event_id if posted_for == user_id or "/" in event_id else f"{posted_for}/{event_id}"


def readdressed(event: Event, user_id: str) -> Event:
    """Return the event, or undo, as it stands in the log of the user whom its own user has become."""
    if event.type == UNDO:
        undone = full_id(event.item_id, event.user_id, user_id)
        return replace(event, user_id=user_id, event_id=f"{UNDO} {undone}", item_id=undone)
    return replace(event, user_id=user_id, event_id=full_id(event.event_id, event.user_id, user_id))


def effective_events(events: Iterable[Event]) -> Iterator[Event]:
    """Return the events of a whole log that no undo takes back."""
    events = list(events)
    undone = {event.item_id for event in events if event.type == UNDO}
    return (event for event in events if not is_correction(event) and event.event_id not in undone)


def is_already_merged(target: str, visitor: str, visitors_target: str) -> bool:
    """Return whether the visitor was merged into that user before.

    target           the user whom the user has become, or the user
    visitors_target  the same of the visitor
    raises           MergeRefused when the visitor cannot become the user
    """
    if visitor == target:
        raise MergeRefused("the user is the visitor, or has become the visitor; nothing changed")
    if visitors_target not in (visitor, target):
        raise MergeRefused("the visitor has become another user before; nothing changed")
    return visitors_target == target


class LogFold:
    """Folds a user's entries into a state, in log order.

    Nothing can be taken out of bins that decay. So after an undo of an event that may be folded already, the fold must
    restart, and only collects further undos. `restarted` begins another fold, at the log's first entry, without them.
    """

    def __init__(self, generation: Generation, state: State, undone: Iterable[str] = ()) -> None:
        self.state = state
        self.must_restart = False
        self._generation = generation
        self._undone = set(undone)

    def apply(self, event: Event) -> None:
        """Fold the log's next entry."""
        if event.type == UNDO:
            self.must_restart |= event.item_id not in self._undone
            self._undone.add(event.item_id)
        elif event.type != INTO and event.event_id not in self._undone and not self.must_restart:
            fold_event(self._generation, self.state, event)

    def restarted(self) -> Self:
        """Return a fold from the empty state that leaves out every undone event that was met."""
        return type(self)(self._generation, self._generation.empty(), self._undone)
