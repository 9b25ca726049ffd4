"""The compiled fold of many users' events at once, used for a round of appends and for a rebuild.

`fold_event` in `storage.state_fold` defines the fold of one event. This module does the same to arrays, and tests hold
the two equal.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

import numba
import numpy as np
from numpy.typing import NDArray

from storage.cold import COLD, MARK, cold_row, plain_type
from storage.state import MAX_TIME_S, NEGLIGIBLE, Generation
from storage.state_event import Event, event_hash

UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class EventColumns:
    """Q events as the fold sees them.

    rows           (Q,) int32    of the items in the generation's codes, -1 = unknown, from COLD on = with cold codes
    cold_codes     (Q, B) uint8  codes that events bring themselves; (0, B) where none does
    weights        (Q,) float32  of their types, 0 = no step
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
        """The columns of events, whose ids are hashed here unless their hashes are given."""
        count = len(events)
        row_of = generation.item_index.get
        weights = {kind: max(0.0, weight) for kind, weight in generation.event_weights.items()}
        if id_hashes is None:
            id_hashes = (event_hash(event.event_id) for event in events)
        kinds = [event.type for event in events]
        rows = np.fromiter(map(row_of, (event.item_id for event in events), repeat(UNKNOWN)), np.int32, count)
        cold_codes = np.zeros((0, generation.codes.shape[1]), np.uint8)  # of the one type that is compiled
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
    """The codes that events bring for unknown items, (Q, B); in `rows` these items then have what stands for them."""
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
    users      (Q,)  whose event it is: an index of values
    id_hashes  (Q,)  of the events' ids, where they are known
    returns    the states (U,), encoded, and whether each of the events (Q,) was late
    """
    size = generation.dtype.itemsize
    # One more: numpy calls the columns of a single record contiguous, and numba would compile everything once more.
    encoded = bytearray().join([*values, bytes(size)])
    states = np.frombuffer(encoded, generation.dtype)
    columns = EventColumns.of(generation, events, id_hashes)
    late = fold_many(generation, states, np.fromiter(users, np.int64, len(users)), columns)
    with memoryview(encoded) as folded:
        return [bytes(folded[size * user : size * (user + 1)]) for user in range(len(values))], late.tolist()


def compile_fold(generation: Generation) -> None:
    """Some seconds, unless it was compiled before and is read back; so that no request has to wait for it."""
    fold_encoded(generation, [generation.encoded_empty], [0], [Event("e", "u", "i", "click", 0, None)])


def fold_many(
    generation: Generation, states: NDArray[np.void], users: NDArray[np.int64], events: EventColumns
) -> NDArray[np.bool_]:
    """Fold Q events into the states of their users, in place and in order.

    states   (U,)  records of ``generation.dtype``
    users    (Q,)  whose event it is: an index of states
    returns  (Q,)  whether it stepped and came late
    """
    rates = np.asarray(generation.decay_rates, np.float64)
    growth = generation.growth[:, :: generation.codes.shape[1]]  # (ages, R)
    shares = np.empty((0, 0, 0), np.float32) if generation.shares is None else generation.shares
    late = np.zeros(len(users), np.bool_)
    _fold_many(
        late,
        users,
        events.rows,
        events.cold_codes,
        events.weights,
        events.seen,
        events.timestamps_us,
        events.id_times_s,
        events.id_hashes,
        generation.codes,
        shares,
        rates,
        np.ascontiguousarray(growth),
        NEGLIGIBLE,
        states["n"],
        states["anchor"],
        states["bins"],
        states["event_count"],
        states["recent_event_ids"],
        states["recent_id_times_s"],
        states["low_water_s"],
        states["item_count"],
        states["recent_items"],
        states["stepped_items"],
        states["last_item"],
        states["last_timestamp_us"],
        states["last_codes"],
    )
    return late


@numba.njit(cache=True)
def _fold_many(  # type: ignore[no-untyped-def]
    late,
    users,
    rows,
    cold_codes,
    weights,
    seen,
    timestamps_us,
    id_times_s,
    id_hashes,
    codes,
    shares,
    rates,
    growth,
    negligible,
    n,
    anchor,
    bins,
    event_count,
    recent_event_ids,
    recent_id_times_s,
    low_water_s,
    item_count,
    recent_items,
    stepped_items,
    last_item,
    last_timestamp_us,
    last_codes,
):
    ages, books = len(growth), codes.shape[1]
    for event in range(len(users)):
        user = users[event]

        slot = event_count[user] % recent_event_ids.shape[1]
        if recent_id_times_s[user, slot] > low_water_s[user]:
            low_water_s[user] = recent_id_times_s[user, slot]
        recent_id_times_s[user, slot] = id_times_s[event]
        recent_event_ids[user, slot] = id_hashes[event]
        event_count[user] += 1

        row = rows[event]
        if row < 0:
            continue
        weight = weights[event]
        if seen[event]:
            recent_items[user, item_count[user] % recent_items.shape[1]] = row
            item_count[user] += 1
        if weight <= 0:
            continue
        n[user] += 1
        age = n[user] - anchor[user]
        if age >= ages:
            for rate in range(len(rates)):
                decay = np.float32(math.exp(-float(age) * rates[rate]))
                for book in range(books):
                    for word in range(bins.shape[3]):
                        scaled = bins[user, rate, book, word] * decay
                        bins[user, rate, book, word] = scaled if scaled >= negligible else np.float32(0)
            anchor[user] = n[user]
            age = np.uint64(0)
        is_cold = row >= COLD
        for rate in range(len(rates)):
            step = weight * growth[age, rate]
            for book in range(books):
                if len(shares) and not is_cold:
                    for word in range(bins.shape[3]):
                        bins[user, rate, book, word] += step * shares[row, book, word]
                    continue
                word = cold_codes[event, book] if is_cold else codes[row, book]
                bins[user, rate, book, word] += step

        late[event] = timestamps_us[event] < last_timestamp_us[user]
        first = 1 if late[event] else 0
        for place in range(stepped_items.shape[1] - 1, first, -1):
            stepped_items[user, place] = stepped_items[user, place - 1]
        if first < stepped_items.shape[1]:
            stepped_items[user, first] = row
        if not late[event]:
            last_item[user] = row
            last_timestamp_us[user] = timestamps_us[event]
            for book in range(books):
                last_codes[user, book] = cold_codes[event, book] if is_cold else codes[row, book]
