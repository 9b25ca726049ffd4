"""Undo and merge: their effect on the entries of a user's log, and on the fold.

If VISITOR is merged into another user, events posted as VISITOR, before or after the merge, have the id "VISITOR/ID" in
that user's log. So ids of different users never collide, and copying an event twice is a resend, which has no effect.
Neither VISITOR nor ID contains a slash; see `logged_id`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import NamedTuple, Self

from storage.errors import MergeRefused
from storage.state.compiled_fold import fold_encoded
from storage.state.event import IMPRESSION, Event, LogRecord, Merge, Undo, logged_id, posted_id
from storage.state.generation import Generation


def posted_as(record: Event | Undo) -> tuple[str, str]:
    """Return the user and the id with which an event, or the event that an undo cancels, was posted."""
    user_id, slash, event_id = record.event_id.partition("/")
    return (posted_id(user_id), posted_id(event_id)) if slash else (record.user_id, posted_id(user_id))


def full_id(event_id: str, posted_for: str, user_id: str) -> str:
    """Return the id of an event in the log of `user_id`, which is `posted_for` or the user it was merged into."""
    return event_id if posted_for == user_id or "/" in event_id else f"{logged_id(posted_for)}/{event_id}"


def readdressed(record: Event | Undo, user_id: str) -> Event | Undo:
    """Return the event, or undo, as it is stored in the log of the user that its own user was merged into."""
    return replace(record, user_id=user_id, event_id=full_id(record.event_id, record.user_id, user_id))


def effective_events(records: Iterable[LogRecord]) -> Iterator[Event]:
    """Return the events of a whole log that are not undone."""
    records = list(records)
    undone = {record.event_id for record in records if isinstance(record, Undo)}
    return (record for record in records if isinstance(record, Event) and record.event_id not in undone)


SeenEntry = tuple[str | None, str | None, str, int, Sequence[str] | None]
"""The id, the item, the type, the time and the items of an event; for an undo the id of the undone event; for a merge
no id."""


def seen_entry(record: LogRecord) -> SeenEntry:
    """Return the part of an entry that `SeenItems` reads."""
    match record:
        case Event():
            return record.event_id, record.item_id, record.type, record.timestamp_us, record.items
        case Undo():
            return record.event_id, None, "", record.timestamp_us, None
        case Merge():
            return None, None, "", record.timestamp_us, None


class ReadState(NamedTuple):
    """A user's encoded state when it was read, folded from the whole log; None without a log."""

    value: bytes | None


class EventFilter(NamedTuple):
    """The events of a log that mark their items as seen, and those that exclude them.

    unseen_types  types that do not mark items as seen
    since_us      types that exclude items, each with the earliest time at which they do
    timed_types   types whose times are collected
    state_of      the generation whose state is returned if it comes with a short log; None for no state
    """

    unseen_types: Collection[str] = ()
    since_us: Mapping[str, float] = MappingProxyType({})
    timed_types: Collection[str] = ()
    state_of: Generation | None = None


EVERY_EVENT = EventFilter()


class SeenItems:
    """The items of a user's newest events that are not undone, collected from the newest log entry backwards.

    An undo follows its event, so it is read first. The log is in the order of arrival, not of event times, so an old
    event does not imply that earlier entries are old.

    events       the filter of events
    item_ids     the seen items
    left_out     the excluded items
    timed_items  the item of each event of the timed types, the newest entry first
    times_us     when each of them happened
    is_complete  whether the log has no entries before the newest `limit` ones
    state        the user's state, if it was requested and took no other read; else None
    """

    def __init__(self, events: EventFilter, limit: int) -> None:
        self.item_ids: set[str] = set()
        self.left_out: set[str] = set()
        self.timed_items: list[str] = []  # no objects that the garbage collector would have to look at
        self.times_us: list[int] = []
        self.is_complete = True
        self.state: ReadState | None = None
        self.events = events
        self._undone: set[str | None] = set()
        self._room = limit

    def add(self, entries: Iterable[SeenEntry]) -> None:
        """Add the log's next older entries."""
        unseen_types, since_us, timed_types, _ = self.events
        for event_id, item_id, event_type, time_us, items in entries:
            if not self._room:
                self.is_complete = False
                return
            self._room -= 1
            if item_id is None:
                self._undone.add(event_id)
            elif event_id not in self._undone:
                if event_type == IMPRESSION:
                    if items and time_us >= since_us.get(event_type, inf):
                        self.left_out.update(items)
                    continue
                if event_type not in unseen_types:
                    self.item_ids.add(item_id)
                if time_us >= since_us.get(event_type, inf):
                    self.left_out.add(item_id)
                if event_type in timed_types:
                    self.timed_items.append(item_id)
                    self.times_us.append(time_us)


def is_already_merged(target: str, visitor: str, visitors_target: str) -> bool:
    """Return whether the visitor was merged into that user before.

    target           the user that the user was merged into, or the user
    visitors_target  the same for the visitor
    raises           MergeRefused when the visitor cannot be merged into the user
    """
    if visitor == target:
        raise MergeRefused("the user is the visitor, or was merged into the visitor; nothing changed")
    if visitors_target not in (visitor, target):
        raise MergeRefused("the visitor was already merged into another user; nothing changed")
    return visitors_target == target


class LogFold:
    """Folds a user's entries into an encoded state, in log order.

    Events cannot be removed from decaying bins. So after the undo of an event that may already be folded, the fold must
    restart, and only collects further undos. `restarted` begins another fold at the log's first entry, without them.
    """

    def __init__(self, generation: Generation, value: bytes, undone: Iterable[str] = ()) -> None:
        self.value = value
        self.must_restart = False
        self._generation = generation
        self._undone = set(undone)

    def apply(self, records: Sequence[LogRecord]) -> None:
        """Fold the log's next entries; larger batches are faster."""
        undone = {record.event_id for record in records if isinstance(record, Undo)}
        self.must_restart |= not undone <= self._undone
        self._undone |= undone
        if self.must_restart:
            return
        # the state of a merged user is never read
        events = [record for record in records if isinstance(record, Event) and record.event_id not in self._undone]
        if events:
            (self.value,) = fold_encoded(self._generation, [self.value], [0] * len(events), events).states

    def restarted(self) -> Self:
        """Return a fold from the empty state that skips every undone event found so far."""
        return type(self)(self._generation, self._generation.encoded_empty, self._undone)
