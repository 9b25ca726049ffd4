"""The compiled fold of many users' events at once, used for a round of appends and for a rebuild.

`fold_event` in `storage.state.fold` defines the fold of one event. This module implements the same fold on arrays, and
tests verify that both agree.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from storage.state.cold_codes import FIRST_COLD_ROW, cold_row
from storage.state.event import IMPRESSION, Event, event_hash
from storage.state.fold import rounded_up_s
from storage.state.generation import NEGLIGIBLE, Generation
from storage.state.layout import MAX_SHOWN_COUNT, MAX_TIME_S

UNKNOWN = -1
SHOWN = -2
NO_SHARES = np.empty((0, 0, 0), np.float32)
NO_IMPRESSIONS = np.zeros(0, np.int32), np.zeros(0, np.int64)
FOLDED_FIELDS = (
    "has_unlearned",
    "n",
    "anchor",
    "bins",
    "event_count",
    "recent_event_ids",
    "recent_id_times_s",
    "low_water_s",
    "item_count",
    "recent_items",
    "stepped_items",
    "last_item",
    "last_timestamp_us",
    "last_codes",
    "shown_items",
    "shown_times_s",
    "shown_counts",
)


class EventColumns(NamedTuple):
    """Q events in the format of the compiled fold.

    rows           (Q,) int32    rows of the items in the generation's codes, -1 = unknown, >= FIRST_COLD_ROW = cold,
                                 -2 = an impression
    cold_codes     (Q, B) uint8  codes for cold items in the events; (0, B) if there are none
    weights        (Q,) float32  weights of their types, 0 = no step
    seen           (Q,) bool     whether their types count as seen
    timestamps_us  (Q,) int64
    id_times_s     (Q,) uint32   rounded up, 0 = none
    id_hashes      (Q,) uint64
    shown_rows     (M,) int32    rows of the items of all impressions, in order
    shown_ends     (Q,) int64    end of each event's items in shown_rows; (0,) if there is no impression
    """

    rows: NDArray[np.int32]
    cold_codes: NDArray[np.uint8]
    weights: NDArray[np.float32]
    seen: NDArray[np.bool_]
    timestamps_us: NDArray[np.int64]
    id_times_s: NDArray[np.uint32]
    id_hashes: NDArray[np.uint64]
    shown_rows: NDArray[np.int32]
    shown_ends: NDArray[np.int64]

    @classmethod
    def from_events(
        cls, generation: Generation, events: Sequence[Event], id_hashes: Sequence[int] | None = None
    ) -> "EventColumns":
        """Return the columns of events. Their ids are hashed unless the hashes are given."""
        row_of, weight_of, unseen = generation.item_index.get, generation.step_weights.get, generation.unseen_types
        kinds = [event.type for event in events]
        rows = np.array([row_of(event.item_id, UNKNOWN) for event in events], np.int32)
        cold_codes = np.zeros((0, generation.codes.shape[1]), np.uint8)  # the only compiled type
        if any(event.codes for event in events):
            cold_codes = _cold_codes(generation, events, rows)
        shown_rows, shown_ends = NO_IMPRESSIONS if IMPRESSION not in kinds else _shown(generation, events, rows)
        return cls(
            rows,
            cold_codes,
            np.array([weight_of(kind, 0.0) for kind in kinds], np.float32),
            np.array([kind not in unseen for kind in kinds], np.bool_),
            np.array([event.timestamp_us for event in events], np.int64),
            np.array([rounded_up_s(time_us) if (time_us := event.id_time_us) else 0 for event in events], np.uint32),
            np.array([event_hash(event.event_id) for event in events] if id_hashes is None else id_hashes, np.uint64),
            shown_rows,
            shown_ends,
        )


class Folded(NamedTuple):
    """The result of folding Q events into U encoded states.

    states   (U,)  encoded
    late     (Q,)  whether the event stepped late
    unknown  (Q,)  whether the event's item has no codes
    """

    states: list[bytes]
    late: list[bool]
    unknown: list[bool]


def _shown(
    generation: Generation, events: Sequence[Event], rows: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the rows of all items shown in impressions and each event's end, and set the `rows` of impressions."""
    shown: list[int] = []
    ends = np.zeros(len(events), np.int64)
    for place, event in enumerate(events):
        if event.type == IMPRESSION:
            rows[place] = SHOWN
            shown += map(generation.state_row, event.items)
        ends[place] = len(shown)
    return np.array(shown, np.int32), ends


def _cold_codes(generation: Generation, events: Sequence[Event], rows: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return the codes (Q, B) in events for unknown items, and set the `rows` of these items."""
    codes_of_events = np.zeros((len(events), generation.codes.shape[1]), np.uint8)
    for place in np.flatnonzero(rows == UNKNOWN).tolist():
        codes = generation.cold_codes(events[place])
        if codes is not None:
            codes_of_events[place] = codes
            rows[place] = cold_row(events[place].item_id)
    return codes_of_events


def fold_encoded(
    generation: Generation,
    values: Sequence[bytes],
    users: Sequence[int],
    events: Sequence[Event],
    id_hashes: Sequence[int] | None = None,
) -> Folded:
    """Fold Q events into U encoded states, in order.

    values     (U,)  encoded states of the generation
    users      (Q,)  the user of each event, as an index of values
    id_hashes  (Q,)  hashes of the events' ids, if known
    """
    # One extra state: numpy calls the columns of a single record contiguous, and numba would compile again for these.
    states = generation.decode_many([*values, generation.encoded_empty])
    columns = EventColumns.from_events(generation, events, id_hashes)
    late = fold_many(generation, states, np.fromiter(users, np.int64, len(users)), columns)
    return Folded(generation.encode_many(states[:-1]), late.tolist(), (columns.rows == UNKNOWN).tolist())


def compile_fold(generation: Generation) -> None:
    """Compile the fold, or load it from the cache, so that no request waits for seconds."""
    fold_encoded(generation, [generation.encoded_empty], [0], [Event("e", "u", "i", "click", 0, None)])


def fold_many(
    generation: Generation, states: NDArray[np.void], users: NDArray[np.int64], events: EventColumns
) -> NDArray[np.bool_]:
    """Fold Q events into the states of their users, in place and in order.

    states   (U,)  records of ``generation.dtype``
    users    (Q,)  the user of each event, as an index of states
    returns  (Q,)  whether the event stepped late
    """
    late = np.zeros(len(users), np.bool_)
    shares = NO_SHARES if generation.shares is None else generation.shares
    items = generation.codes, shares, np.array(generation.decay_rates, np.float64), generation.growth
    _fold_many(late, users, tuple(events), items, tuple(map(states.__getitem__, FOLDED_FIELDS)))
    return late


@numba.njit(cache=True)
def _fold_many(late, users, events, items, states):  # type: ignore[no-untyped-def]
    # numba counts a reference whenever an array is taken from a tuple or passed on, which the loop avoids.
    rows, cold_codes, weights, seen, timestamps_us, id_times_s, id_hashes, shown_rows, shown_ends = events
    codes, shares, rates, growth = items
    unlearned, n, anchor, bins, event_count, ids, times_s, low_water_s = states[:8]
    item_count, recent, stepped, last, last_us, last_codes, shown, shown_s, shown_counts = states[8:]
    for event in range(len(users)):
        user = users[event]

        slot = event_count[user] % ids.shape[1]
        if times_s[user, slot] > low_water_s[user]:
            low_water_s[user] = times_s[user, slot]
        times_s[user, slot] = id_times_s[event]
        ids[user, slot] = id_hashes[event]
        event_count[user] += 1

        row, weight = rows[event], weights[event]
        unlearned[user] |= row == UNKNOWN or row >= FIRST_COLD_ROW
        if row == SHOWN:
            first = shown_ends[event - 1] if event else 0
            for place in range(first, shown_ends[event]):
                _show(unlearned, shown, shown_s, shown_counts, user, shown_rows[place], timestamps_us[event])
        if row < 0:
            continue
        if seen[event]:
            _push_item(recent, item_count, user, row)
        if weight <= 0:
            continue
        n[user] += 1
        age = n[user] - anchor[user]
        if age >= len(growth):
            _rescale(bins, user, age, rates)
            anchor[user] = n[user]
            age = np.uint64(0)
        is_cold = row >= FIRST_COLD_ROW
        if len(shares) and not is_cold:
            _add_shares(bins, user, shares, row, weight, growth, age)
        else:
            for rate in range(len(rates)):
                step = weight * growth[age, rate]
                for book in range(codes.shape[1]):
                    word = cold_codes[event, book] if is_cold else codes[row, book]
                    bins[user, rate, book, word] += step

        for slot in range(shown.shape[1]):
            if shown[user, slot] == row:
                shown[user, slot], shown_s[user, slot], shown_counts[user, slot] = -1, 0, 0

        late[event] = timestamps_us[event] < last_us[user]
        first = 1 if late[event] else 0
        for place in range(stepped.shape[1] - 1, first, -1):
            stepped[user, place] = stepped[user, place - 1]
        if first < stepped.shape[1]:
            stepped[user, first] = row
        if not late[event]:
            last[user] = row
            last_us[user] = timestamps_us[event]
            for book in range(codes.shape[1]):
                last_codes[user, book] = cold_codes[event, book] if is_cold else codes[row, book]


@numba.njit
def _push_item(recent, item_count, user, row):  # type: ignore[no-untyped-def]
    size = recent.shape[1]
    after_newest = np.int64(item_count[user] % size) + size
    age = 1
    while age <= size and recent[user, (after_newest - age) % size] != row:
        age += 1
    if age > size:
        recent[user, after_newest % size] = row
        item_count[user] += 1
        return
    for newer in range(age, 1, -1):
        recent[user, (after_newest - newer) % size] = recent[user, (after_newest - newer + 1) % size]
    recent[user, (after_newest - 1) % size] = row


@numba.njit
def _show(unlearned, shown, shown_s, shown_counts, user, row, time_us):  # type: ignore[no-untyped-def]
    unlearned[user] |= row >= FIRST_COLD_ROW
    time_s = min(max(time_us // 1_000_000, 1), MAX_TIME_S)
    oldest = 0
    for slot in range(shown.shape[1]):
        if shown[user, slot] == row:
            shown_s[user, slot] = max(np.int64(shown_s[user, slot]), time_s)
            shown_counts[user, slot] = min(np.int64(shown_counts[user, slot]) + 1, MAX_SHOWN_COUNT)
            return
        if shown_s[user, slot] < shown_s[user, oldest]:
            oldest = slot
    shown[user, oldest], shown_s[user, oldest], shown_counts[user, oldest] = row, time_s, 1


@numba.njit
def _rescale(bins, user, age, rates):  # type: ignore[no-untyped-def]
    for rate in range(len(rates)):
        decay = np.float32(math.exp(-float(age) * rates[rate]))
        for book in range(bins.shape[2]):
            for word in range(bins.shape[3]):
                scaled = bins[user, rate, book, word] * decay
                bins[user, rate, book, word] = scaled if scaled >= NEGLIGIBLE else np.float32(0)


@numba.njit
def _add_shares(bins, user, shares, row, weight, growth, age):  # type: ignore[no-untyped-def]
    for rate in range(growth.shape[1]):
        step = weight * growth[age, rate]
        for book in range(shares.shape[1]):
            for word in range(shares.shape[2]):
                bins[user, rate, book, word] += step * shares[row, book, word]
