"""What a log records, events and their corrections, and the hashes and times that stand for an event's id."""

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

_UUID7 = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE)


# Logged ids have no space, so these are the id of no event.
UNDO_ID = "undo {}"
MERGE_ID = "merge {}"
# The log's own ids alone have spaces and slashes: in what comes from outside, control characters stand for them.
_AS_LOGGED = str.maketrans(" /", "\x1e\x1f")
_AS_POSTED = str.maketrans("\x1e\x1f", " /")

IMPRESSION = "impression"
"""The type of events that say what a user was shown. Such an event steps in no generation, and makes nothing seen."""

CodesByTag: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""Codes (B,) uint8 of one item for generations, each after its generation's tag of 8 bytes."""


@dataclass(frozen=True, slots=True)
class Event:
    """One user-item interaction, as it is logged and folded.

    event_id  as `logged_id` returns it
    item_id   empty for an impression
    codes     of an item that a model has not learned, for the generations that were served when the event was logged
    items     of an impression, the ids of all items that were shown; empty for all other events
    order_id  of the order that a purchase belongs to
    """

    event_id: str
    user_id: str
    item_id: str
    type: str
    timestamp_us: int
    id_time_us: int | None  # never the server's default time: it would differ on a resend
    value: float | None = None
    recommendation_id: str | None = None
    codes: CodesByTag = ()
    items: tuple[str, ...] = ()
    order_id: str | None = None

    @property
    def entry_id(self) -> str:
        """The id of the entry within the user's log."""
        return self.event_id

    @property
    def item_ids(self) -> tuple[str, ...]:
        """The ids of the items that the event is about: one, but of an impression all that were shown."""
        return self.items or (self.item_id,)


@dataclass(frozen=True, slots=True)
class Undo:
    """The correction that the user's event with this id no longer counts, at any position in the log."""

    user_id: str
    event_id: str
    timestamp_us: int

    @property
    def entry_id(self) -> str:
        """The id of the entry within the user's log."""
        return UNDO_ID.format(self.event_id)


@dataclass(frozen=True, slots=True)
class Merge:
    """The last entry of a log: its user has become the target, whose log has copies of the entries before it."""

    user_id: str
    target: str
    timestamp_us: int

    @property
    def entry_id(self) -> str:
        """The id of the entry within the user's log."""
        return MERGE_ID.format(self.target)


LogRecord: TypeAlias = Event | Undo | Merge
"""What one entry of a log records."""


def logged_id(posted_id: str) -> str:
    """Return the id as it stands in a log, of an event or of whom it was posted for."""
    return posted_id.translate(_AS_LOGGED) if " " in posted_id or "/" in posted_id else posted_id


def posted_id(logged_id: str) -> str:
    """Return the id that `logged_id` was given."""
    return logged_id.translate(_AS_POSTED)


def id_time_us(event_id: str, client_timestamp_us: int | None) -> int | None:
    """Return the time of an event id in microseconds: the UUIDv7's own, else the client's timestamp, else None."""
    time_us = uuid7_time_us(event_id)
    return client_timestamp_us if time_us is None else time_us


def uuid7_time_us(event_id: str) -> int | None:
    """Return when a UUIDv7 was made, in microseconds; None for any other id."""
    uuid7 = _UUID7.fullmatch(event_id)
    return int(uuid7[1] + uuid7[2], 16) * 1000 if uuid7 else None


def digest(name: str) -> bytes:
    """Return 128 bits of BLAKE2b, as a replacement for a name that is secret or too long."""
    return blake2b(name.encode(), digest_size=16).digest()


def event_hash(event_id: str) -> int:
    """Return 64 bits of BLAKE2b, never 0, which marks an empty slot of a state's ring of ids."""
    return int.from_bytes(blake2b(event_id.encode(), digest_size=8).digest(), "little") or 1
