"""The state that a visitor keeps, together with its newest events, in a fixed number of bytes.

One portable state, little-endian, without padding between its parts:

  event_count       u4        events folded
  recent_event_ids  u8[20]    as in a state
  record_size       u2        0 if the generation's record does not fit
  event_entries     u2
  record                      `storage.state.layout.CARRIED_FIELDS`, of the generation that folded it
  events                      the newest events, newest first, as many as fit
  zeros                       up to SIZE

An event is the length of its type (u1; 0 for the type of the event before), its type, the length of its item's id (u1;
for 255 bytes or more 255, followed by u2), the id, and its time in seconds (u4).

Only the generation that folded the record can read it. Other generations fold the events instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple, Self

import numpy as np

from storage.state.compiled_fold import Folded, fold_encoded
from storage.state.event import Event
from storage.state.generation import Generation
from storage.state.layout import CARRIED_FIELDS, ID_RING, MAX_TIME_S, State

VERSION = 1  # of this layout and that of a state; states of other versions cannot be opened
SIZE = 3_702  # less than 5,000 characters of base64 when sealed
HEAD = Struct(f"<I{8 * ID_RING}sHH")
TIME = Struct("<I")
LONG = Struct("<BH")
LONG_MARK = 255
VISITOR = "visitor"  # the user in events that are not logged


class CarriedEvent(NamedTuple):
    """The part of an event that a portable state keeps."""

    item_id: str
    type: str
    time_s: int


@dataclass(frozen=True, slots=True)
class PortableState:
    """The state of a visitor in one generation, and the newest events.

    tag          tag of the generation that folded the record
    record       the fields kept from its state; empty if they do not fit
    event_count  number of events folded, of which `events` are the newest
    event_ids    the ring of the hashes of their ids
    events       newest first
    """

    tag: bytes
    record: bytes
    event_count: int
    event_ids: bytes
    events: tuple[CarriedEvent, ...]

    @classmethod
    def empty(cls, generation: Generation) -> Self:
        """Return the state of a visitor without events."""
        return cls._of(generation, generation.empty(), ())

    @classmethod
    def _of(cls, generation: Generation, state: State, events: tuple[CarriedEvent, ...]) -> Self:
        record = np.zeros(1, generation.carried_dtype)[0]
        for name in CARRIED_FIELDS:
            record[name] = state[name]
        fits = HEAD.size + record.nbytes <= SIZE
        event_ids = state["recent_event_ids"].tobytes()
        return cls(generation.tag, record.tobytes() if fits else b"", int(state["event_count"]), event_ids, events)

    def state_in(self, generation: Generation) -> State:
        """Return the state for the generation: its own record, or else the fold of the kept events."""
        if self.tag == generation.tag and len(self.record) == generation.carried_dtype.itemsize:
            state = generation.empty()
            (record,) = np.frombuffer(self.record, generation.carried_dtype)
            for name in CARRIED_FIELDS:
                state[name] = record[name]
        else:
            events = [Event("", VISITOR, one.item_id, one.type, one.time_s * 1_000_000, None) for one in self.events]
            value = generation.encoded_empty
            if events:
                (value,) = fold_encoded(generation, [value], [0] * len(events), events[::-1]).states
            state = generation.decode(value)
        state["event_count"] = self.event_count
        state["recent_event_ids"] = np.frombuffer(self.event_ids, "<u8")
        return state

    def id_hashes(self) -> set[int]:
        """Return the hashes of the ids of the newest events."""
        return {*np.frombuffer(self.event_ids, "<u8").tolist()}

    def folded(self, generation: Generation, events: Sequence[Event], id_hashes: Sequence[int]) -> tuple[Self, Folded]:
        """Return the state after the events, which must not have been folded before, and the result of folding them."""
        value = generation.encode(self.state_in(generation))
        folded = fold_encoded(generation, [value], [0] * len(events), events, id_hashes)
        newest = tuple(
            CarriedEvent(event.item_id, event.type, min(max(event.timestamp_us // 1_000_000, 0), MAX_TIME_S))
            for event in reversed(events)
        )
        return self._of(generation, generation.decode(folded.states[0]), newest + self.events), folded

    def encode(self) -> bytes:
        """Return the state in SIZE bytes, with as many events as fit."""
        parts = [*_encoded_events(self.events, SIZE - HEAD.size - len(self.record))]
        head = HEAD.pack(self.event_count, self.event_ids, len(self.record), len(parts))
        return b"".join([head, self.record, *parts]).ljust(SIZE, b"\0")

    @classmethod
    def decode(cls, tag: bytes, value: bytes) -> Self:
        """Return the state that `encode` returned, for the generation with this tag."""
        event_count, event_ids, record_size, entries = HEAD.unpack_from(value)
        events_at = HEAD.size + record_size
        events = tuple(_decoded_events(value, events_at, entries))
        return cls(tag, value[HEAD.size : events_at], event_count, event_ids, events)


def _encoded_events(events: Iterable[CarriedEvent], room: int) -> Iterator[bytes]:
    kind_before = ""
    for item_id, kind, time_s in events:
        own_kind = b"" if kind == kind_before else kind.encode()
        kind_before, name = kind, item_id.encode()
        length = b"%c" % len(name) if len(name) < LONG_MARK else LONG.pack(LONG_MARK, len(name))
        entry = b"%c%b%b%b%b" % (len(own_kind), own_kind, length, name, TIME.pack(time_s))
        room -= len(entry)
        if room < 0:
            return
        yield entry


def _decoded_events(value: bytes, at: int, entries: int) -> Iterator[CarriedEvent]:
    kind = ""
    for _ in range(entries):
        kind_end = at + 1 + value[at]
        kind = value[at + 1 : kind_end].decode() or kind
        name_at, length = kind_end + 1, value[kind_end]
        if length == LONG_MARK:
            name_at, (_, length) = kind_end + LONG.size, LONG.unpack_from(value, kind_end)
        name_end = name_at + length
        (time_s,) = TIME.unpack_from(value, name_end)
        yield CarriedEvent(value[name_at:name_end].decode(), kind, time_s)
        at = name_end + TIME.size
