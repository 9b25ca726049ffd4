"""The compiled fold of many users' events at once, used for a round of appends and for a rebuild.

`fold_event` in `storage.state_fold` defines the fold of one event. This module does the same to arrays, and tests hold
the two equal.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from storage.cold import COLD, MARK, cold_row, plain_type
from storage.state import MAX_TIME_S, NEGLIGIBLE, Generation
from storage.state_event import Event, event_hash

UNKNOWN = -1


class EventColumns(NamedTuple):
    """Q events as the fold reads them.

    rows           (Q,) int32    rows of the items in the generation's codes, -1 = unknown, from COLD on = cold
    cold_codes     (Q, B) uint8  codes that the events bring for cold items; (0, B) where none does
    weights        (Q,) float32  weights of their types, 0 = no step
    seen           (Q,) bool     whether their types count as seen
    timestamps_us  (Q,) int64
    id_times_s     (Q,) uint32   rounded up, 0 = none
    id_hashes      (Q,) uint64
    """

    rows: NDArray[np.int32]
    cold_codes: NDArray[np.uint8]
    weights: NDArray[np.float32]
    seen: NDArray[np.bool_]
    timestamps_us: NDArray[np.int64]
    id_times_s: NDArray[np.uint32]
    id_hashes: NDArray[np.uint64]

    @classmethod
    def of(
        cls, generation: Generation, events: Sequence[Event], id_hashes: Iterable[int] | None = None
    ) -> "EventColumns":
        """Make the columns of events. Their ids are hashed unless their hashes are given."""
        count = len(events)
        row_of = generation.item_index.get
        weights = {kind: max(0.0, weight) for kind, weight in generation.event_weights.items()}
        if id_hashes is None:
            id_hashes = (event_hash(event.event_id) for event in events)
        kinds = [event.type for event in events]
        rows = np.fromiter(map(row_of, (event.item_id for event in events), repeat(UNKNOWN)), np.int32, count)
        cold_codes = np.zeros((0, generation.codes.shape[1]), np.uint8)  # the one type that is compiled for
        if any(MARK in kind for kind in kinds):
            cold_codes = _cold_codes(generation, events, rows)
            kinds = [plain_type(kind) for kind in kinds]
        id_times_us = np.fromiter((event.id_time_us or 0 for event in events), np.int64, count)
        return cls(
            rows,
            cold_codes,
            np.fromiter((weights.get(kind, 0.0) for kind in kinds), np.float32, count),
            np.fromiter((kind not in generation.unseen_types for kind in kinds), np.bool_, count),
            np.fromiter((event.timestamp_us for event in events), np.int64, count),
            np.clip(-(-id_times_us // 1_000_000), 0, MAX_TIME_S).astype(np.uint32),
            np.fromiter(id_hashes, np.uint64, count),
        )


def _cold_codes(generation: Generation, events: Sequence[Event], rows: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return the codes (Q, B) that events bring for unknown items, and set the `rows` of these items."""
    found = np.zeros((len(events), generation.codes.shape[1]), np.uint8)
    for place in np.flatnonzero(rows == UNKNOWN).tolist():
        codes = generation.cold_codes(events[place])
        if codes is not None:
            found[place] = codes
            rows[place] = cold_row(events[place].item_id)
    return found


def fold_encoded(
    generation: Generation,
    values: Sequence[bytes],
    users: Sequence[int],
    events: Sequence[Event],
    id_hashes: Iterable[int] | None = None,
) -> tuple[list[bytes], list[bool]]:
    """Fold Q events into U encoded states, in order.

    values     (U,)  encoded states of the generation
    users      (Q,)  the user of each event, as an index of values
    id_hashes  (Q,)  hashes of the events' ids, where they are known
    returns    the states (U,), encoded, and whether each of the events (Q,) was late
    """
    size = generation.dtype.itemsize
    # One state more: numpy calls the columns of a single record contiguous, and numba would compile for these again.
    encoded = bytearray().join([*values, bytes(size)])
    states = np.frombuffer(encoded, generation.dtype)
    columns = EventColumns.of(generation, events, id_hashes)
    late = fold_many(generation, states, np.fromiter(users, np.int64, len(users)), columns)
    with memoryview(encoded) as folded:
        return [bytes(folded[size * user : size * (user + 1)]) for user in range(len(values))], late.tolist()


def compile_fold(generation: Generation) -> None:
    """Compile the fold, or read it from the cache, so that no request waits some seconds for it."""
    fold_encoded(generation, [generation.encoded_empty], [0], [Event("e", "u", "i", "click", 0, None)])


class _StateColumns(NamedTuple):
    """The fields of U states that the fold changes, as views of their records."""

    n: NDArray[np.uint64]
    anchor: NDArray[np.uint64]
    bins: NDArray[np.float32]
    event_count: NDArray[np.uint64]
    recent_event_ids: NDArray[np.uint64]
    recent_id_times_s: NDArray[np.uint32]
    low_water_s: NDArray[np.uint32]
    item_count: NDArray[np.uint64]
    recent_items: NDArray[np.int32]
    stepped_items: NDArray[np.int32]
    last_item: NDArray[np.int32]
    last_timestamp_us: NDArray[np.int64]
    last_codes: NDArray[np.uint8]


class _ItemColumns(NamedTuple):
    """What a generation knows of its items, and how older steps decay.

    codes   (N, B)
    shares  (N, B, W), or empty where the generation has none
    rates   (R,)
    growth  (ages, R)
    """

    codes: NDArray[np.uint8]
    shares: NDArray[np.float32]
    rates: NDArray[np.float64]
    growth: NDArray[np.float32]


def fold_many(
    generation: Generation, states: NDArray[np.void], users: NDArray[np.int64], events: EventColumns
) -> NDArray[np.bool_]:
    """Fold Q events into the states of their users, in place and in order.

    states   (U,)  records of ``generation.dtype``
    users    (Q,)  the user of each event, as an index of states
    returns  (Q,)  whether the event stepped and came late
    """
    late = np.zeros(len(users), np.bool_)
    items = _ItemColumns(
        generation.codes,
        np.empty((0, 0, 0), np.float32) if generation.shares is None else generation.shares,
        np.asarray(generation.decay_rates, np.float64),
        np.ascontiguousarray(generation.growth[:, :: generation.codes.shape[1]]),
    )
    _fold_many(late, users, events, items, _StateColumns(*(states[name] for name in _StateColumns._fields)))
    return late


@numba.njit(cache=True)
def _fold_many(late, users, events, items, states):  # type: ignore[no-untyped-def]
    for event in range(len(users)):
        user, row = users[event], events.rows[event]
        _push_id(states, user, events.id_hashes[event], events.id_times_s[event])
        if row < 0:
            continue
        if events.seen[event]:
            _push_item(states, user, row)
        weight = events.weights[event]
        if weight <= 0:
            continue
        growth = items.growth[_next_age(states, user, items)]
        is_cold = row >= COLD
        codes = events.cold_codes[event] if is_cold else items.codes[row]
        if len(items.shares) and not is_cold:
            _add_shares(states.bins[user], items.shares[row], weight, growth)
        else:
            _add_codes(states.bins[user], codes, weight, growth)
        late[event] = events.timestamps_us[event] < states.last_timestamp_us[user]
        _insert(states.stepped_items[user], row, 1 if late[event] else 0)
        if not late[event]:
            states.last_item[user] = row
            states.last_timestamp_us[user] = events.timestamps_us[event]
            states.last_codes[user] = codes


@numba.njit
def _push_id(states, user, id_hash, id_time_s):  # type: ignore[no-untyped-def]
    slot = states.event_count[user] % states.recent_event_ids.shape[1]
    if states.recent_id_times_s[user, slot] > states.low_water_s[user]:
        states.low_water_s[user] = states.recent_id_times_s[user, slot]
    states.recent_id_times_s[user, slot] = id_time_s
    states.recent_event_ids[user, slot] = id_hash
    states.event_count[user] += 1


@numba.njit
def _push_item(states, user, row):  # type: ignore[no-untyped-def]
    states.recent_items[user, states.item_count[user] % states.recent_items.shape[1]] = row
    states.item_count[user] += 1


@numba.njit
def _next_age(states, user, items):  # type: ignore[no-untyped-def]
    """Count a step, rescale the bins where it is due, and return the age at which the step is added."""
    states.n[user] += 1
    age = states.n[user] - states.anchor[user]
    if age < len(items.growth):
        return age
    bins = states.bins[user]
    for rate in range(len(items.rates)):
        decay = np.float32(math.exp(-float(age) * items.rates[rate]))
        for book in range(bins.shape[1]):
            for word in range(bins.shape[2]):
                scaled = bins[rate, book, word] * decay
                bins[rate, book, word] = scaled if scaled >= NEGLIGIBLE else np.float32(0)
    states.anchor[user] = states.n[user]
    return np.uint64(0)


@numba.njit
def _add_codes(bins, codes, weight, growth):  # type: ignore[no-untyped-def]
    for rate in range(len(growth)):
        step = weight * growth[rate]
        for book in range(len(codes)):
            bins[rate, book, codes[book]] += step


@numba.njit
def _add_shares(bins, shares, weight, growth):  # type: ignore[no-untyped-def]
    for rate in range(len(growth)):
        step = weight * growth[rate]
        for book in range(shares.shape[0]):
            for word in range(shares.shape[1]):
                bins[rate, book, word] += step * shares[book, word]


@numba.njit
def _insert(newest_first, item, place):  # type: ignore[no-untyped-def]
    for later in range(len(newest_first) - 1, place, -1):
        newest_first[later] = newest_first[later - 1]
    if place < len(newest_first):
        newest_first[place] = item
