"""The generation that defines the meaning of a state's bytes.

A state is a view of the log. Folding a user's events in log order from an empty state always yields the stored state,
so a state that is missing, or of another generation or layout, is simply folded again.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from storage.state.cold_codes import cold_row
from storage.state.event import IMPRESSION, Event
from storage.state.layout import (
    CARRIED_FIELDS,
    ID_RING,
    LAYOUT_VERSION,
    STEPPED_ITEMS,
    TAG_BYTES,
    UNLEARNED_BYTE,
    State,
    empty_state,
    state_dtype,
)
from storage.state.packed_state import (
    PACKED_MARK,
    PLAIN_MARK,
    SIZE_AT,
    WORD_BYTES,
    is_of_layout,
    is_packed,
    is_whole,
    pack,
    state_size,
    states_of,
    unpack,
    words_of,
)

# Bins are rescaled before exp(rate * age) exceeds e^40: times the largest weight this is 2e23, below float32's 3e38.
MAX_EXPONENT = 40.0
MAX_AGE = 1024
WEIGHT_RANGE = (1e-6, 1e6)
# A rescale drops values below this limit. It is less than 1e-14 of the row's newest entry, and products with exp(-40)
# cannot become (slow) denormals.
NEGLIGIBLE = np.float32(1e-20)


class StateError(Exception):
    """The value is not a state of this generation and layout; the user's log must be folded again."""


@dataclass(frozen=True, eq=False)
class Generation:
    """How one generation folds events into states.

    tag            8 raw bytes, written into every state
    decay_rates    (R,) per step, >= 0; 0 is a plain count (which stops at 2**24 events of weight 1 in one bin)
    codewords      W, at most 256
    item_index     item id -> row of codes
    codes          (N, B) uint8, every code < W
    event_weights  event type -> weight; a missing type weighs 0, only positive weights step
    unseen_types   event types that do not mark their items as seen
    stepped_items  K, the number of a user's newest steps in a state
    id_ring        length of the ring of event ids; another length or K is another layout
    shares         (N, B, W) float32, >= 0: an item adds its shares of all codewords, not 1 to that of each code
    raises         ValueError when the values are inconsistent
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
        """The layout of a state."""
        return state_dtype(len(self.decay_rates), self.codes.shape[1], self.codewords, self.stepped_items, self.id_ring)

    @cached_property
    def step_weights(self) -> Mapping[str, float]:
        """The weights of the event types that step."""
        return {kind: weight for kind, weight in self.event_weights.items() if weight > 0}

    @cached_property
    def carried_dtype(self) -> np.dtype[np.void]:
        """The layout of the part of a state that a visitor keeps."""
        return np.dtype([(name, kind, self.dtype[name].shape) for name, kind in CARRIED_FIELDS.items()])

    def empty(self) -> State:
        """Return the state of a user without events."""
        return empty_state(self.dtype, self.tag)

    @cached_property
    def encoded_empty(self) -> bytes:
        """The encoded state of a user without events."""
        return self.encode(self.empty())

    def cold_codes(self, event: Event) -> NDArray[np.uint8] | None:
        """Return the codes (B,) in the event for an item that the generation has not learned; None if none fit."""
        for tag, own in event.codes:
            if tag == self.tag and len(own) == self.codes.shape[1]:
                row = np.frombuffer(own, np.uint8)
                return row if int(row.max(initial=0)) < self.codewords else None
        return None

    def knows_item_of(self, event: Event) -> bool:
        """Return whether the event's item has codes; an impression needs none."""
        return event.type == IMPRESSION or event.item_id in self.item_index or self.cold_codes(event) is not None

    def state_row(self, item_id: str) -> int:
        """Return the row that refers to a shown item in a state, whether the item is known or not."""
        row = self.item_index.get(item_id)
        return cold_row(item_id) if row is None else row

    def encode(self, state: State) -> bytes:
        """Return the state as bytes: packed, at most ``dtype.itemsize`` of them."""
        (value,) = self.encode_many(np.array([state]))
        return value

    def encode_many(self, states: NDArray[np.void]) -> list[bytes]:
        """Return the encoded form of each of (Q,) states."""
        return pack(words_of(states), self._empty_words, self.dtype.itemsize)

    @cached_property
    def _empty_words(self) -> NDArray[np.uint32]:
        words: NDArray[np.uint32] = words_of(np.array([self.empty()]))[0]
        return words

    def fits(self, value: bytes) -> bool:
        """Return whether `decode` accepts the value."""
        return self._is_own(value) and is_whole(value)

    def _is_own(self, value: bytes) -> bool:
        if value[TAG_BYTES] != self.tag:
            return False
        if value[:1] == PACKED_MARK:
            return value[SIZE_AT] == self._size_word
        return value[:1] == PLAIN_MARK and len(value) == self.dtype.itemsize

    @cached_property
    def _size_word(self) -> bytes:
        return self.dtype.itemsize.to_bytes(WORD_BYTES, "little")

    def extends(self, other: "Generation") -> bool:
        """Return whether this generation folds events as the other one does, except on items that the other lacks.

        The items of the other one have the same rows and codes here. So both fold the same state for users without
        events on other items.
        """
        known = len(other.codes)
        return (
            self.dtype == other.dtype
            and self.decay_rates == other.decay_rates
            and self.step_weights == other.step_weights
            and set(self.unseen_types) == set(other.unseen_types)
            and np.array_equal(self.codes[:known], other.codes)
            and _same_shares(self.shares, other.shares)
            and all(self.item_index.get(item_id) == row for item_id, row in other.item_index.items())
        )

    def carried_over(self, other: "Generation", value: bytes) -> bytes | None:
        """Convert a state of a generation that this one extends to this one; return None if it must be folded."""
        if not other.fits(value) or value[UNLEARNED_BYTE]:
            return None
        return value[: TAG_BYTES.start] + self.tag + value[TAG_BYTES.stop :]

    def remembers(self, value: bytes, id_hash: int) -> bool:
        """Return whether the ring of an encoded state contains the hash of an event's id."""
        # almost no id is in the ring, and nearly all values say so themselves: a packed state lacks only words of zeros
        own = id_hash.to_bytes(8, "little")
        may_be_there = own in value or (is_packed(value) and bytes(4) in (own[:4], own[4:]))
        return may_be_there and id_hash in self.decode(value)["recent_event_ids"]

    def decode(self, value: bytes) -> State:
        """Return a mutable copy of an encoded state.

        raises  StateError  when the value has another size, layout version or generation
        """
        state: State = self.decode_many([value])[0]
        return state

    def decode_many(self, values: Sequence[bytes]) -> NDArray[np.void]:
        """Return Q encoded states as one (Q,) array; raise StateError as `decode` does."""
        for value in values:
            if not self._is_own(value):
                raise StateError(self._difference(value))
        try:
            words = unpack(values, self._empty_words)
        except ValueError as exc:
            raise StateError(str(exc)) from exc
        return states_of(words, self.dtype)

    def histograms(self, states: NDArray[np.void]) -> NDArray[np.float32]:
        """Return the true histograms (Q, R, B, W) of (Q,) states."""
        decay = self.decay((states["n"] - states["anchor"]).astype(np.float64))  # (Q, R)
        histograms: NDArray[np.float32] = states["bins"] * decay[:, :, None, None]
        return histograms

    def _difference(self, value: bytes) -> str:
        if not is_of_layout(value):
            return f"the state does not begin with layout version {LAYOUT_VERSION}"
        if value[TAG_BYTES] != self.tag:
            return f"the state belongs to generation {value[TAG_BYTES].hex()}, not {self.tag.hex()}"
        return f"a state of this generation has {self.dtype.itemsize} bytes, not {state_size(value)}"

    def decay(self, age: float | NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the remaining weights (..., R) of an event after (...) steps."""
        return np.exp(-np.multiply.outer(age, self.decay_rates)).astype(np.float32)

    @cached_property
    def growth(self) -> NDArray[np.float32]:
        """The weights (ages, R) of a new event, exp(rate * age), at ages that need no rescaling."""
        fastest = max(self.decay_rates)
        ages = min(MAX_AGE, int(MAX_EXPONENT / fastest) + 1) if fastest > 0 else MAX_AGE
        return np.exp(np.multiply.outer(np.arange(ages), self.decay_rates)).astype(np.float32)

    @cached_property
    def growth_of_rows(self) -> NDArray[np.float32]:
        """The same weights (ages, R * B), one per row of W codewords in the bins."""
        return np.repeat(self.growth, self.codes.shape[1], axis=1)

    @cached_property
    def first_cells(self) -> NDArray[np.intp]:
        """The offsets (R, B) of each row of W codewords in the flattened bins."""
        rows = len(self.decay_rates), self.codes.shape[1]
        return np.arange(rows[0] * rows[1]).reshape(rows) * self.codewords


def _same_shares(longer: NDArray[np.float32] | None, shares: NDArray[np.float32] | None) -> bool:
    if longer is None or shares is None:
        return longer is shares
    return np.array_equal(longer[: len(shares)], shares)
