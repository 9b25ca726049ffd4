"""The compiled fold of many users equals `fold_event` one event at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from storage.state.compiled_fold import EventColumns, fold_encoded, fold_many
from storage.state.event import Event
from storage.state.fold import Effect, fold_event
from storage.state.generation import Generation
from tests.storage.oracles.naive_fold import assert_state_is
from tests.storage.oracles.naive_fold import fold as naive_fold
from tests.storage.oracles.random_events import (
    KNOWN_ITEMS,
    START_US,
    WEIGHTS,
    logs,
    make_generation,
    of_type,
)

GENERATION = make_generation(id_ring=4)
SOFT = make_generation(id_ring=4, soft=True)
either = st.sampled_from([GENERATION, SOFT])


def folded(generation: Generation, logs: Sequence[Sequence[Event]], page: int = 7) -> NDArray[np.void]:
    """States of the users, folded in pages of interleaved events."""
    states = np.repeat(np.array([generation.empty()]), len(logs))
    longest = max(map(len, logs), default=0)
    turns = [(user, log[turn]) for turn in range(longest) for user, log in enumerate(logs) if turn < len(log)]
    for start in range(0, len(turns), page):
        users, events = zip(*turns[start : start + page], strict=True)
        fold_many(generation, states, np.array(users), EventColumns.from_events(generation, events))
    return states


def stepped(generation: Generation, log: Sequence[Event]) -> np.void:
    state = generation.empty()
    for event in log:
        fold_event(generation, state, event)
    return state


def assert_equal(generation: Generation, states: NDArray[np.void], logs: Sequence[Sequence[Event]]) -> None:
    for state, log in zip(states, logs, strict=True):
        expected = stepped(generation, log)
        for name in generation.dtype.names or ():
            if name != "bins":
                np.testing.assert_array_equal(state[name], expected[name], name)
        np.testing.assert_allclose(state["bins"], expected["bins"], rtol=1e-6)


@given(either, st.lists(logs(), min_size=1, max_size=4), st.integers(1, 50))
def test_any_events_fold_like_single_events(generation: Generation, of_users: list[list[Event]], page: int) -> None:
    assert_equal(generation, folded(generation, of_users, page), of_users)


@given(either, st.lists(logs(8), min_size=1, max_size=3), st.lists(logs(8), min_size=3, max_size=3))
def test_encoded_states_continue_and_late_and_unknown_events_are_reported(
    generation: Generation, before: list[list[Event]], of_users: list[list[Event]]
) -> None:
    states = [stepped(generation, log) for log in before]
    turns = [(user, event) for user, log in enumerate(of_users[: len(states)]) for event in log]
    users, events = [user for user, _ in turns], [event for _, event in turns]
    folded = fold_encoded(generation, [generation.encode(state) for state in states], users, events)
    effects = [fold_event(generation, states[user], event) for user, event in turns]
    assert folded.late == [effect is Effect.STEPPED_LATE for effect in effects]
    assert folded.unknown == [effect is Effect.UNKNOWN_ITEM for effect in effects]
    assert folded.states == [generation.encode(state) for state in states]


@pytest.mark.parametrize(
    ("rates", "soft"),
    [((0.0, 0.05, 0.8), False), ((3.0, 0.001), False), ((100.0, 0.1), False), ((0.0,), False), ((3.0, 0.001), True)],
    ids=str,
)
def test_long_histories_equal_single_events_and_the_oracle(rates: tuple[float, ...], soft: bool) -> None:
    """2,500 steps rescale a state at least twice, and every few steps at fast rates."""
    generation = make_generation(rates=rates, soft=soft)
    rng = np.random.default_rng(0)
    of_users = [
        [
            of_type(kind, Event(f"e{number}", "u", f"item{rng.integers(KNOWN_ITEMS + 1)}", "", START_US + number, None))
            for number, kind in enumerate(rng.choice(list(WEIGHTS), length))
        ]
        for length in (5000, 3)
    ]
    states = folded(generation, of_users, page=1000)
    assert_equal(generation, states, of_users)
    for state, log in zip(states, of_users, strict=True):
        assert_state_is(generation.encode(state), naive_fold(generation, log))


def test_extreme_times_are_clipped_like_single_events() -> None:
    times = (-(2**62), -1, 0, 1, 999_999, 1_000_000, 1_000_001, 2**62, None)
    log = [
        Event(f"e{number}", "u", "item1", "click", time or 0, time)
        for number, time in enumerate([*times, *reversed(times), *times])
    ]
    assert_equal(GENERATION, folded(GENERATION, [log]), [log])
