"""What an event is, and the hashes and times that stand for its id."""

import re
from dataclasses import dataclass, fields
from hashlib import blake2b
from operator import attrgetter

_UUID7 = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Event:
    """One user-item interaction, as it is logged and folded."""

    event_id: str
    user_id: str
    item_id: str
    type: str
    timestamp_us: int
    id_time_us: int | None  # never the server's default time: it would differ on a resend
    value: float | None = None
    recommendation_id: str | None = None


event_fields = attrgetter(*(field.name for field in fields(Event)))
"""The fields of an event, in the order in which ``Event(*fields)`` takes them back."""


def id_time_us(event_id: str, client_timestamp_us: int | None) -> int | None:
    """Return the time of an event id in microseconds: the UUIDv7's own, else the client's timestamp, else None."""
    time_us = uuid7_time_us(event_id)
    return client_timestamp_us if time_us is None else time_us


def uuid7_time_us(event_id: str) -> int | None:
    """Return when a UUIDv7 was made, in microseconds; None for any other id."""
    uuid7 = _UUID7.fullmatch(event_id)
    return int(uuid7[1] + uuid7[2], 16) * 1000 if uuid7 else None


def digest(name: str) -> bytes:
    """Return 128 bits of BLAKE2b, which stand for a name that must not be stored, or takes too much room."""
    return blake2b(name.encode(), digest_size=16).digest()


def event_hash(event_id: str) -> int:
    """Return 64 bits of BLAKE2b, never 0, which marks an empty slot of a state's ring of ids."""
    return int.from_bytes(blake2b(event_id.encode(), digest_size=8).digest(), "little") or 1
