"""What a user's state is: its bytes, and the fold that makes it from the user's events.

A state is a view of the log. Folding a user's events in log order from an empty state always gives the stored
state, so a state that is missing, of another generation or of another layout is simply folded again.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from hashlib import blake2b
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage.cold import MARK, codes_in, cold_row, plain_type

# One state, little-endian, without padding (R rates, B codebooks, W codewords):
#
#   version            u1        layout; always the first byte, so that any layout can be told from any other
#   reserved           u1[3]     zero
#   last_item          i4        row of the last item in the generation's codes, -1 = none yet; storage/cold.py: others
#   generation         u1[8]     tag of the generation that folds this state (not S8, which strips trailing zeros)
#   n                  u8        steps so far
#   anchor             u8        the step at which bins were last on the scale of the true histogram
#   last_timestamp_us  i8        of the last item, INT64_MIN = none yet
#   event_count        u8        events folded, each pushed its id;     newest in slot (event_count - 1) % 20
#   item_count         u8        of these on known items and seen, each pushed;  newest in slot (item_count - 1) % 24
#   recent_event_ids   u8[20]    ring of 64-bit hashes of event ids, 0 = empty
#   bins               f4[R,B,W] true histogram * exp(rate_r * (n - anchor))
#   recent_items       i4[24]    ring of rows of the codes that were seen, -1 = empty
#   stepped_items      i4[K]     rows of the newest items that stepped, newest first, -1 = none; the first is last_item
#   recent_id_times_s  u4[20]    ring, beside recent_event_ids: their id-times in seconds, rounded up
#   low_water_s        u4        the newest id-time evicted from that ring
#   last_codes         u1[B]     codes of the last item, 0 while there is none
#
# 3,496 bytes at R = 3, B = 8, W = 32, K = 5, whatever the length of the history.
LAYOUT_VERSION = 3
TAG_BYTES = slice(8, 16)
ITEM_RING = 24
STEPPED_ITEMS = 5
ID_RING = 20

# Bins are rescaled before exp(rate * age) passes e^40: times the largest weight that is 2e23, far from float32's 3e38.
MAX_EXPONENT = 40.0
MAX_AGE = 1024
WEIGHT_RANGE = (1e-6, 1e6)
# What a rescale leaves below this is dropped. It is under 1e-14 of its row's newest entry, and no product
# with exp(-40) can become a (slow) denormal afterwards.
NEGLIGIBLE = np.float32(1e-20)

MAX_TIME_S = 2**32 - 1
NO_TIMESTAMP = np.iinfo(np.int64).min

State: TypeAlias = np.void
"""One mutable record of ``Generation.dtype``; fields by name, ``state["n"]``."""

_UUID7 = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE)


class StateError(Exception):
    """A value is no state of this generation and layout. The way out is to fold the user's log again."""


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


class Effect(Enum):
    """What folding an event did to a state."""

    STEPPED = "stepped"
    STEPPED_LATE = "stepped, but an item with a newer timestamp stays the last one"
    WEIGHTLESS = "no step, its type has no positive weight"
    UNKNOWN_ITEM = "no step, the generation has no codes for its item"


@dataclass(frozen=True, eq=False)
class Generation:
    """How one generation folds events into states.

    tag            8 raw bytes, written into every state
    decay_rates    (R,) per step, >= 0; 0 counts plainly (and stops at 2**24 events of weight 1 in one bin)
    codewords      W, at most 256
    item_index     item id -> row of codes
    codes          (N, B) uint8, every code < W
    event_weights  event type -> weight; a missing type weighs 0, only positive weights step
    unseen_types   event types whose items do not count as seen
    stepped_items  K, how many of a user's newest steps a state names
    id_ring        length of the ring of event ids; another length or K is another layout
    shares         (N, B, W) float32, >= 0: an item adds its shares of all codewords, not 1 to that of each code
    raises         ValueError when these do not fit together
    """

    tag: bytes
    decay_rates: tuple[float, ...]
    codewords: int
    item_index: Mapping[str, int]
    codes: NDArray[np.uint8]
    event_weights: Mapping[str, float]
    unseen_types: Collection[str] = ()
    stepped_items: int = STEPPED_ITEMS
    id_ring: int = ID_RING
    shares: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        if len(self.tag) != 8:
            raise ValueError(f"a generation's tag is 8 bytes, not {len(self.tag)}")
        if not self.decay_rates or not all(0 <= rate < np.inf for rate in self.decay_rates):
            raise ValueError(f"decay rates must be finite and not negative: {self.decay_rates}")
        if self.codes.dtype != np.uint8 or self.codes.ndim != 2 or not 1 <= self.codewords <= 256:
            raise ValueError("codes must be an (N, B) array of uint8, with at most 256 codewords")
        if np.any(self.codes >= self.codewords):
            raise ValueError(f"a code is not below the number of codewords, {self.codewords}")
        if self.shares is not None and (
            self.shares.dtype != np.float32 or self.shares.shape != (*self.codes.shape, self.codewords)
        ):
            raise ValueError("shares of codes must be an (N, B, W) array of float32")
        low, high = WEIGHT_RANGE
        for event_type, weight in self.event_weights.items():
            if not (weight <= 0 or low <= weight <= high):
                raise ValueError(f"weight of {event_type!r} is {weight}; positive ones lie in [{low}, {high}]")

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        """Of one state. ``np.frombuffer(b"".join(values), dtype)`` reads Q encoded states as one (Q,) array."""
        codebooks = self.codes.shape[1]
        fields: list[tuple[str, str, tuple[int, ...]]] = [
            ("version", "u1", ()),
            ("reserved", "u1", (3,)),
            ("last_item", "<i4", ()),
            ("generation", "u1", (8,)),
            ("n", "<u8", ()),
            ("anchor", "<u8", ()),
            ("last_timestamp_us", "<i8", ()),
            ("event_count", "<u8", ()),
            ("item_count", "<u8", ()),
            ("recent_event_ids", "<u8", (self.id_ring,)),
            ("bins", "<f4", (len(self.decay_rates), codebooks, self.codewords)),
            ("recent_items", "<i4", (ITEM_RING,)),
            ("stepped_items", "<i4", (self.stepped_items,)),
            ("recent_id_times_s", "<u4", (self.id_ring,)),
            ("low_water_s", "<u4", ()),
            ("last_codes", "u1", (codebooks,)),
        ]
        return np.dtype(fields)

    def empty(self) -> State:
        """The state of a user without events."""
        state: State = np.zeros(1, self.dtype)[0]
        state["version"] = LAYOUT_VERSION
        state["generation"] = np.frombuffer(self.tag, np.uint8)
        state["last_item"] = -1
        state["last_timestamp_us"] = NO_TIMESTAMP
        state["recent_items"] = -1
        state["stepped_items"] = -1
        return state

    @cached_property
    def encoded_empty(self) -> bytes:
        return self.encode(self.empty())

    def apply(self, state: State, event: Event) -> Effect:
        """Fold the event into the state, in place. The caller has made sure that it was not folded before."""
        _push_id(state, event)
        kind, item = plain_type(event.type), self.item_index.get(event.item_id)
        codes = self.cold_codes(event) if item is None else self.codes[item]
        if codes is None:
            return Effect.UNKNOWN_ITEM
        shares = None if item is None or self.shares is None else self.shares[item]
        item = cold_row(event.item_id) if item is None else item
        weight = self.event_weights.get(kind, 0.0)
        if kind not in self.unseen_types:
            _push_item(state, item)
        if weight <= 0:
            return Effect.WEIGHTLESS
        late = event.timestamp_us < state["last_timestamp_us"]
        self._step(state, codes, shares, weight)
        _insert(state["stepped_items"], item, place=int(late))  # behind the last item, which stays the last one
        if late:
            return Effect.STEPPED_LATE
        state["last_item"] = item
        state["last_codes"] = codes
        state["last_timestamp_us"] = event.timestamp_us
        return Effect.STEPPED

    def cold_codes(self, event: Event) -> NDArray[np.uint8] | None:
        """The codes (B,) that the event brings for an item that the generation has not learned, if it does."""
        if MARK not in event.type:
            return None
        return codes_in(event.type, self.tag, self.codes.shape[1], self.codewords)

    def knows_item_of(self, event: Event) -> bool:
        """Whether the event's item has codes."""
        return event.item_id in self.item_index or self.cold_codes(event) is not None

    def encode(self, state: State) -> bytes:
        """The state as bytes, always ``dtype.itemsize`` of them."""
        return state.tobytes()

    def fits(self, value: bytes) -> bool:
        """Whether `decode` takes the value."""
        return len(value) == self.dtype.itemsize and value[0] == LAYOUT_VERSION and value[TAG_BYTES] == self.tag

    def remembers(self, value: bytes, id_hash: int) -> bool:
        """Whether the ring of an encoded state has the event's id."""
        ring = value[self._id_ring_bytes]
        # almost no id is there, and to say so takes no array
        return id_hash.to_bytes(8, "little") in ring and id_hash in np.frombuffer(ring, "<u8")

    @cached_property
    def _id_ring_bytes(self) -> slice:
        assert self.dtype.fields is not None
        ring, start = self.dtype.fields["recent_event_ids"][:2]
        return slice(start, start + ring.itemsize)

    def decode(self, value: bytes) -> State:
        """A mutable copy of an encoded state.

        raises  StateError  when the value has another size, layout version or generation
        """
        self._check(value)
        state: State = np.frombuffer(bytearray(value), self.dtype)[0]
        return state

    def decode_many(self, values: Sequence[bytes]) -> NDArray[np.void]:
        """Q encoded states as one read-only (Q,) array; StateError as for `decode`."""
        for value in values:
            self._check(value)
        return np.frombuffer(b"".join(values), self.dtype)

    def histograms(self, states: NDArray[np.void]) -> NDArray[np.float32]:
        """The true histograms of (Q,) states: (Q, R, B, W) float32."""
        decay = self._decay((states["n"] - states["anchor"]).astype(np.float64))  # (Q, R)
        histograms: NDArray[np.float32] = states["bins"] * decay[:, :, None, None]
        return histograms

    def _check(self, value: bytes) -> None:
        if len(value) != self.dtype.itemsize:
            raise StateError(f"a state of this generation has {self.dtype.itemsize} bytes, not {len(value)}")
        if value[0] != LAYOUT_VERSION:
            raise StateError(f"the state has layout version {value[0]}, not {LAYOUT_VERSION}")
        if value[TAG_BYTES] != self.tag:
            raise StateError(f"the state belongs to generation {value[TAG_BYTES].hex()}, not {self.tag.hex()}")

    def _step(self, state: State, codes: NDArray[np.uint8], shares: NDArray[np.float32] | None, weight: float) -> None:
        """Instead of decaying what is there, let the new event weigh more: the scale of a row does not matter."""
        n = int(state["n"]) + 1
        age = n - int(state["anchor"])
        bins = state["bins"]
        if age >= len(self.growth):
            self._rescale(bins, age)
            state["anchor"] = n
            age = 0
        state["n"] = n
        if shares is not None:
            bins += (weight * self.growth[age]).reshape(-1, len(codes), 1) * shares
            return
        cells = (self._first_cells + codes).reshape(-1)  # (R * B,)
        bins.reshape(-1)[cells] += weight * self.growth[age]

    def _rescale(self, bins: NDArray[np.float32], age: int) -> None:
        bins *= self._decay(age)[:, None, None]
        bins[bins < NEGLIGIBLE] = 0

    def _decay(self, age: float | NDArray[np.float64]) -> NDArray[np.float32]:
        """(...) steps -> (..., R)"""
        return np.exp(-np.multiply.outer(age, self.decay_rates)).astype(np.float32)

    @cached_property
    def growth(self) -> NDArray[np.float32]:
        """(ages, R * B): exp(rate * age) for every bin of a step, at the ages that need no rescaling."""
        fastest = max(self.decay_rates)
        ages = min(MAX_AGE, int(MAX_EXPONENT / fastest) + 1) if fastest > 0 else MAX_AGE
        growth = np.exp(np.multiply.outer(np.arange(ages), self.decay_rates)).astype(np.float32)
        return np.repeat(growth, self.codes.shape[1], axis=1)

    @cached_property
    def _first_cells(self) -> NDArray[np.intp]:
        """(R, B): where each row of W codewords begins in the flattened bins."""
        rows = len(self.decay_rates), self.codes.shape[1]
        return np.arange(rows[0] * rows[1]).reshape(rows) * self.codewords


def recent_items(state: State) -> NDArray[np.int32]:
    """Rows of the newest items of the state, newest first, repeats included: (at most 24,) int32."""
    ring: NDArray[np.int32] = state["recent_items"]
    next_slot = int(state["item_count"]) % len(ring)
    newest_first = np.concatenate((ring[:next_slot][::-1], ring[next_slot:][::-1]))
    return newest_first[newest_first >= 0]


def id_time_us(event_id: str, client_timestamp_us: int | None) -> int | None:
    """The time an event id is known by, in microseconds: the UUIDv7's own, else the client's timestamp, else none."""
    time_us = uuid7_time_us(event_id)
    return client_timestamp_us if time_us is None else time_us


def uuid7_time_us(event_id: str) -> int | None:
    """When a UUIDv7 was made, in microseconds; None for any other id."""
    uuid7 = _UUID7.fullmatch(event_id)
    return int(uuid7[1] + uuid7[2], 16) * 1000 if uuid7 else None


def digest(name: str) -> bytes:
    """128 bits of BLAKE2b, which stand for a name where it must not be kept, or takes too much room."""
    return blake2b(name.encode(), digest_size=16).digest()


def event_hash(event_id: str) -> int:
    """64 bits of BLAKE2b, never 0 (an empty slot of the ring)."""
    return int.from_bytes(blake2b(event_id.encode(), digest_size=8).digest(), "little") or 1


def _push_id(state: State, event: Event) -> None:
    count = int(state["event_count"])
    times_s: NDArray[Any] = state["recent_id_times_s"]
    slot = count % len(times_s)
    evicted_s = int(times_s[slot])
    if evicted_s > int(state["low_water_s"]):
        state["low_water_s"] = evicted_s
    # An id without time needs no mark: without time it is looked up whenever the ring has evicted anything.
    times_s[slot] = 0 if event.id_time_us is None else _rounded_up_s(event.id_time_us)
    state["recent_event_ids"][slot] = event_hash(event.event_id)
    state["event_count"] = count + 1


def _push_item(state: State, item: int) -> None:
    count = int(state["item_count"])
    state["recent_items"][count % ITEM_RING] = item
    state["item_count"] = count + 1


def _insert(newest_first: NDArray[np.int32], item: int, place: int) -> None:
    newest_first[place + 1 :] = newest_first[place:-1].copy()
    newest_first[place : place + 1] = item


def _rounded_up_s(time_us: int) -> int:
    """Monotone, so comparing rounded times can only err towards looking up; so does clipping to 32 bits."""
    return min(max(-(-time_us // 1_000_000), 0), MAX_TIME_S)
