"""The portable state: the state of the same events, in a constant number of bytes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.state.event import Event, event_hash
from storage.state.fold import fold_event
from storage.state.generation import Generation
from storage.state.layout import CARRIED_FIELDS, State
from storage.state.portable_state import SIZE, PortableState
from tests.storage.oracles.random_events import START_US, logs, make_generation

ONE = make_generation()
OTHER = make_generation(tag=b"gen two\0", seed=5)
LARGE = replace(ONE, tag=b"gen big\0", codewords=256)
CARRIED = (*CARRIED_FIELDS, "event_count", "recent_event_ids")


def visit(number: int, item: int) -> Event:
    return Event(f"e{number}", "u", f"item{item}", "click", START_US + number * 1_000_000, None)


def carried(generation: Generation, events: list[Event], per_request: int = 3) -> PortableState:
    """The state after requests of some events each, sealed and opened in between."""
    state = PortableState.empty(generation)
    for first in range(0, len(events), per_request):
        some = events[first : first + per_request]
        state, _ = state.folded(generation, some, [event_hash(event.event_id) for event in some])
        value = state.encode()
        assert len(value) == SIZE
        state = PortableState.decode(generation.tag, value)
    return state


def folded(generation: Generation, events: list[Event]) -> State:
    state = generation.empty()
    for event in events:
        fold_event(generation, state, event)
    return state


def assert_same(one: State, other: State) -> None:
    for name in CARRIED:
        assert np.array_equal(one[name], other[name]), name


@given(logs(), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_a_portable_state_is_the_fold_of_its_events(events: list[Event], per_request: int) -> None:
    assert_same(carried(ONE, events, per_request).state_in(ONE), folded(ONE, events))


@pytest.mark.parametrize("generation", [OTHER, LARGE, make_generation(tag=b"gen two\0", codebooks=4, rates=(0.1,))])
def test_another_generation_folds_the_carried_events(generation: Generation) -> None:
    events = [visit(number, number * 7 % 12) for number in range(12)]
    state = carried(ONE, events)
    assert len(state.events) == len(events)
    assert_same(state.state_in(generation), folded(generation, events))


def test_a_portable_state_carries_the_newest_events_that_fit() -> None:
    events = [replace(visit(number, 0), item_id=f"item-{number:03}") for number in range(200)]
    state = carried(ONE, events)
    assert 20 <= len(state.events) < 30
    assert [one.item_id for one in state.events] == [event.item_id for event in events[: -len(state.events) - 1 : -1]]
    assert state.event_count == 200
    assert_same(state.state_in(ONE), folded(ONE, events))


@pytest.mark.parametrize("item_id", ["i" * 128, "ä" * 127, "ä" * 127 + "i", "ä" * 128, "\U0001f375" * 128])
def test_a_portable_state_carries_any_item_ids(item_id: str) -> None:
    events = [visit(0, 0), replace(visit(1, 0), item_id=item_id), visit(2, 0)]
    state = carried(LARGE, events)  # all that is carried is events
    assert [one.item_id for one in state.events] == [event.item_id for event in events[::-1]]
    no_room = carried(ONE, [replace(one, item_id="\U0001f375" * 128) for one in events])
    assert (no_room.events, no_room.event_count) == ((), 3)


def test_a_generation_with_too_large_states_uses_the_events() -> None:
    events = [visit(number, number % 12) for number in range(200)]
    state = carried(LARGE, events)
    assert not state.record
    assert_same(state.state_in(LARGE), folded(LARGE, events))
