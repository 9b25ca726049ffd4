"""The fold of one event into one state, in numpy: the definition of a state's meaning.

The compiled fold of many events (`storage.state.compiled_fold`) is equivalent, and tests verify that both agree.
"""

from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.state.cold_codes import cold_row
from storage.state.event import IMPRESSION, Event, event_hash
from storage.state.generation import NEGLIGIBLE, Generation
from storage.state.layout import ITEM_RING, MAX_SHOWN_COUNT, MAX_TIME_S, State


class Effect(Enum):
    """The effect of folding an event into a state."""

    STEPPED = "stepped"
    STEPPED_LATE = "stepped, but an item with a newer timestamp stays the last one"
    WEIGHTLESS = "no step, its type has no positive weight"
    UNKNOWN_ITEM = "no step, the generation has no codes for its item"
    SHOWN = "no step, it says what was shown"


def fold_event(generation: Generation, state: State, event: Event) -> Effect:
    """Fold the event into the state, in place. The caller must ensure that it was not folded before."""
    _push_id(state, event)
    if event.type == IMPRESSION:
        for item_id in event.items:
            state["has_unlearned"] |= item_id not in generation.item_index
            _show(state, generation.state_row(item_id), event.timestamp_us)
        return Effect.SHOWN
    item = generation.item_index.get(event.item_id)
    state["has_unlearned"] |= item is None
    codes = generation.cold_codes(event) if item is None else generation.codes[item]
    if codes is None:
        return Effect.UNKNOWN_ITEM
    shares = None if item is None or generation.shares is None else generation.shares[item]
    item = cold_row(event.item_id) if item is None else item
    weight = generation.event_weights.get(event.type, 0.0)
    if event.type not in generation.unseen_types:
        _push_item(state, item)
    if weight <= 0:
        return Effect.WEIGHTLESS
    late = event.timestamp_us < state["last_timestamp_us"]
    _step(generation, state, codes, shares, weight)
    _choose(state, item)
    _insert(state["stepped_items"], item, place=int(late))  # a late item is inserted after the last one
    if late:
        return Effect.STEPPED_LATE
    state["last_item"] = item
    state["last_codes"] = codes
    state["last_timestamp_us"] = event.timestamp_us
    return Effect.STEPPED


def _push_id(state: State, event: Event) -> None:
    count = int(state["event_count"])
    times_s: NDArray[Any] = state["recent_id_times_s"]
    slot = count % len(times_s)
    evicted_s = int(times_s[slot])
    if evicted_s > int(state["low_water_s"]):
        state["low_water_s"] = evicted_s
    # An id without time needs no mark: it is always looked up once the ring has evicted anything.
    times_s[slot] = 0 if event.id_time_us is None else rounded_up_s(event.id_time_us)
    state["recent_event_ids"][slot] = event_hash(event.event_id)
    state["event_count"] = count + 1


def _push_item(state: State, item: int) -> None:
    """Make the item the newest one; it has one place, or a few items that are used again and again would take all."""
    ring, count = state["recent_items"], int(state["item_count"])
    newest_first = (count - 1 - np.arange(ITEM_RING)) % ITEM_RING  # slots
    if len(ages := np.flatnonzero(ring[newest_first] == item)):
        moved = newest_first[: ages[0] + 1]
        ring[moved] = np.append(item, ring[moved[:-1]])
        return
    ring[count % ITEM_RING] = item
    state["item_count"] = count + 1


def _show(state: State, item: int, time_us: int) -> None:
    """Count the item as shown once more; a new item replaces the one that was last shown the longest time ago."""
    items, times_s, counts = state["shown_items"], state["shown_times_s"], state["shown_counts"]
    slots = np.flatnonzero(items == item)
    slot = int(slots[0]) if len(slots) else int(np.argmin(times_s))
    if not len(slots):
        items[slot], times_s[slot], counts[slot] = item, 0, 0
    time_s = min(max(time_us // 1_000_000, 1), MAX_TIME_S)
    times_s[slot] = max(int(times_s[slot]), time_s)
    counts[slot] = min(int(counts[slot]) + 1, MAX_SHOWN_COUNT)


def _choose(state: State, item: int) -> None:
    """Remove the item from the shown ones."""
    slots = state["shown_items"] == item
    for name, empty in (("shown_items", -1), ("shown_times_s", 0), ("shown_counts", 0)):
        state[name][slots] = empty


def _step(
    generation: Generation, state: State, codes: NDArray[np.uint8], shares: NDArray[np.float32] | None, weight: float
) -> None:
    """Add the item to the bins.

    Instead of decaying the bins, the new event gets a larger weight: the scale of a row has no effect.
    """
    n = int(state["n"]) + 1
    age = n - int(state["anchor"])
    bins = state["bins"]
    if age >= len(generation.growth):
        bins *= generation.decay(age)[:, None, None]
        bins[bins < NEGLIGIBLE] = 0
        state["anchor"] = n
        age = 0
    state["n"] = n
    added = weight * generation.growth_of_rows[age]  # (R * B,)
    if shares is not None:
        bins += added.reshape(-1, len(codes), 1) * shares
        return
    cells = (generation.first_cells + codes).reshape(-1)  # (R * B,)
    bins.reshape(-1)[cells] += added


def _insert(newest_first: NDArray[np.int32], item: int, place: int) -> None:
    newest_first[place + 1 :] = newest_first[place:-1].copy()
    newest_first[place : place + 1] = item


def rounded_up_s(time_us: int) -> int:
    """Round up, so that comparing rounded times can only err towards a look-up; clipping to 32 bits does too."""
    return min(max(-(-time_us // 1_000_000), 0), MAX_TIME_S)
