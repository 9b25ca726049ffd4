"""The records of a log, events and their corrections, and the hashes and times derived from event ids."""

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

_UUID7 = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE)


# Logged ids contain no space, so these are not the id of any event.
UNDO_ID = "undo {}"
MERGE_ID = "merge {}"
# Only the log's own ids contain spaces and slashes; in posted ids, control characters replace them.
_AS_LOGGED = str.maketrans(" /", "\x1e\x1f")
_AS_POSTED = str.maketrans("\x1e\x1f", " /")

IMPRESSION = "impression"
"""The type of events that record what a user was shown. Such events do not step, and do not mark items as seen."""

CodesByTag: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""Codes (B,) uint8 of one item for several generations, each after the generation's tag of 8 bytes."""


@dataclass(frozen=True, slots=True)
class Event:
    """One user-item interaction, as it is logged and folded.

    event_id  as returned by `logged_id`
    item_id   empty for an impression
    codes     codes of an unlearned item, for the generations that were served when the event was logged
    items     the ids of all items that an impression has shown; empty for all other events
    order_id  the id of the order that a purchase belongs to
    """

    event_id: str
    user_id: str
    item_id: str
    type: str
    timestamp_us: int
    id_time_us: int | None  # never the server's default time, which would differ for a resend
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
        """The ids of the items that the event refers to: one, or all items that an impression has shown."""
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
    """The last entry of a log: its user was merged into the target, whose log has copies of the entries before it."""

    user_id: str
    target: str
    timestamp_us: int

    @property
    def entry_id(self) -> str:
        """The id of the entry within the user's log."""
        return MERGE_ID.format(self.target)


LogRecord: TypeAlias = Event | Undo | Merge
"""The content of one log entry."""


def logged_id(posted_id: str) -> str:
    """Return the id as it is logged, for the id of an event or of the user for whom it was posted."""
    return posted_id.translate(_AS_LOGGED) if " " in posted_id or "/" in posted_id else posted_id


def posted_id(logged_id: str) -> str:
    """Return the id that was passed to `logged_id`."""
    return logged_id.translate(_AS_POSTED)


def id_time_us(event_id: str, client_timestamp_us: int | None) -> int | None:
    """Return the time of an event id in microseconds: that of a UUIDv7, else the client's timestamp, else None."""
    time_us = uuid7_time_us(event_id)
    return client_timestamp_us if time_us is None else time_us


def uuid7_time_us(event_id: str) -> int | None:
    """Return the creation time of a UUIDv7 in microseconds; None for any other id."""
    uuid7 = _UUID7.fullmatch(event_id)
    return int(uuid7[1] + uuid7[2], 16) * 1000 if uuid7 else None


def digest(name: str) -> bytes:
    """Return 128 bits of BLAKE2b, to replace a name that is secret or too long."""
    return blake2b(name.encode(), digest_size=16).digest()


def event_hash(event_id: str) -> int:
    """Return 64 bits of BLAKE2b; never 0, which marks an empty slot in a state's ring of ids."""
    return int.from_bytes(blake2b(event_id.encode(), digest_size=8).digest(), "little") or 1
