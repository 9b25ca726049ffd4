"""The bytes of a user's state, of which docs/reference/byte-formats.md says what others may rely on."""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

# One state, little-endian, without padding (R rates, B codebooks, W codewords):
#
#   version            u1        layout; always the first byte, so that any layout can be told from any other
#   has_unlearned      u1        1 if an event was on, or showed, an item that the generation has not learned; else 0
#   reserved           u1[2]     zero
#   last_item          i4        row of the last item in the generation's codes, -1 = none yet; others: cold_codes.py
#   generation         u1[8]     tag of the generation that folds this state (not S8, which strips trailing zeros)
#   n                  u8        steps so far
#   anchor             u8        the step at which bins were last on the scale of the true histogram
#   last_timestamp_us  i8        of the last item, INT64_MIN = none yet
#   event_count        u8        events folded, each pushed its id;     newest in slot (event_count - 1) % 20
#   item_count         u8        known and seen items that were not in their ring;  newest in slot (item_count - 1) % 24
#   recent_event_ids   u8[20]    ring of 64-bit hashes of event ids, 0 = empty
#   bins               f4[R,B,W] true histogram * exp(rate_r * (n - anchor))
#   recent_items       i4[24]    ring of rows of the codes that were seen, each once, -1 = empty
#   stepped_items      i4[K]     rows of the newest items that stepped, newest first, -1 = none; the first is last_item
#   recent_id_times_s  u4[20]    ring, beside recent_event_ids: their id-times in seconds, rounded up
#   low_water_s        u4        the newest id-time evicted from that ring
#   last_codes         u1[B]     codes of the last item, 0 while there is none
#   shown_items        i4[56]    rows of items that were shown and not chosen since, -1 = empty; others: cold_codes.py
#   shown_times_s      u4[56]    beside: when each was shown last, in seconds, at least 1; 0 = empty
#   shown_counts       u1[56]    beside: how many impressions have each, at most 255
#
# 4,000 bytes at R = 3, B = 8, W = 32, K = 5, whatever the length of the history.
LAYOUT_VERSION = 5
UNLEARNED_BYTE = 1
TAG_BYTES = slice(8, 16)
ITEM_RING = 24
STEPPED_ITEMS = 5
ID_RING = 20
SHOWN_RING = 56
MAX_SHOWN_COUNT = 255

MAX_TIME_S = 2**32 - 1
NO_TIMESTAMP = np.iinfo(np.int64).min

# The fields of a state that a visitor keeps, in this order, without padding, counts as u4. The ids and their count
# precede them in `storage.state.portable_state`, which every generation reads; id times are only needed for the log.
CARRIED_FIELDS = {
    "n": "<u4",
    "anchor": "<u4",
    "item_count": "<u4",
    "last_timestamp_us": "<i8",
    "last_item": "<i4",
    "bins": "<f4",
    "recent_items": "<i4",
    "stepped_items": "<i4",
    "last_codes": "u1",
}

State: TypeAlias = np.void
"""One mutable record of ``state_dtype``; fields by name, ``state["n"]``."""


def state_dtype(rates: int, codebooks: int, codewords: int, stepped_items: int, id_ring: int) -> np.dtype[np.void]:
    """Return the layout of a state."""
    return np.dtype(
        [
            ("version", "u1"),
            ("has_unlearned", "u1"),
            ("reserved", "u1", (2,)),
            ("last_item", "<i4"),
            ("generation", "u1", (8,)),
            ("n", "<u8"),
            ("anchor", "<u8"),
            ("last_timestamp_us", "<i8"),
            ("event_count", "<u8"),
            ("item_count", "<u8"),
            ("recent_event_ids", "<u8", (id_ring,)),
            ("bins", "<f4", (rates, codebooks, codewords)),
            ("recent_items", "<i4", (ITEM_RING,)),
            ("stepped_items", "<i4", (stepped_items,)),
            ("recent_id_times_s", "<u4", (id_ring,)),
            ("low_water_s", "<u4"),
            ("last_codes", "u1", (codebooks,)),
            ("shown_items", "<i4", (SHOWN_RING,)),
            ("shown_times_s", "<u4", (SHOWN_RING,)),
            ("shown_counts", "u1", (SHOWN_RING,)),
        ]
    )


def empty_state(dtype: np.dtype[np.void], tag: bytes) -> State:
    """Return the state of a user without events, for the generation with this tag."""
    state: State = np.zeros(1, dtype)[0]
    state["version"] = LAYOUT_VERSION
    state["generation"] = np.frombuffer(tag, np.uint8)
    state["last_item"] = -1
    state["last_timestamp_us"] = NO_TIMESTAMP
    state["recent_items"] = -1
    state["stepped_items"] = -1
    state["shown_items"] = -1
    return state


def recent_items(state: State) -> NDArray[np.int32]:
    """Return the rows (at most 24,) of the newest seen items of the state, newest first."""
    ring: NDArray[np.int32] = state["recent_items"]
    next_slot = int(state["item_count"]) % len(ring)
    newest_first = np.concatenate((ring[:next_slot][::-1], ring[next_slot:][::-1]))
    return newest_first[newest_first >= 0]


def idle_times_s(states: NDArray[np.void], now_s: float) -> list[int]:
    """Return how long ago the last event of each state (Q,) was, as its items and ids tell; 0 if they do not."""
    last_s = np.maximum(states["last_timestamp_us"] // 1_000_000, states["recent_id_times_s"].max(axis=1))
    idle_s: list[int] = np.where(last_s > 0, np.maximum(int(now_s) - last_s, 0), 0).tolist()
    return idle_s


class ShownItems(NamedTuple):
    """The items in a state that were shown and not chosen since: at most 56, newest first.

    items    (S,)  int32
    times_s  (S,)  uint32, when each was last shown
    counts   (S,)  uint8, number of impressions
    """

    items: NDArray[np.int32]
    times_s: NDArray[np.uint32]
    counts: NDArray[np.uint8]


def shown_items(state: State) -> ShownItems:
    """Return the shown items in the state."""
    times_s = state["shown_times_s"]
    newest_first = np.argsort(-times_s.astype(np.int64), kind="stable")[: np.count_nonzero(times_s)]
    return ShownItems(state["shown_items"][newest_first], times_s[newest_first], state["shown_counts"][newest_first])
