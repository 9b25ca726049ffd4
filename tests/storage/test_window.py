"""The newest items of many states at once are those of each state alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.state import Event, stepped_items
from storage.window import windows
from tests.storage.catalogue import logs, make_generation


@given(st.lists(logs(), max_size=4), st.sampled_from([1, 3, 24, 40]), st.sampled_from([3, 8]))
def test_windows_are_the_stepped_items_of_each_state(
    of_users: Sequence[Sequence[Event]], length: int, codebooks: int
) -> None:
    """With three codebooks every second state lies at an odd address."""
    generation = make_generation(codebooks=codebooks)
    states = [generation.empty() for _ in of_users]
    for state, log in zip(states, of_users, strict=True):
        for event in log:
            generation.apply(state, event)
    stored = generation.decode_many([generation.encode(state) for state in states])
    found = windows(stored, length)
    assert found.shape == (len(states), length)
    assert found.dtype == np.int64
    assert found.tolist() == [stepped_items(state, length).tolist() for state in states]


@pytest.mark.parametrize("dislikes", [1, 24, 30])
def test_a_ring_full_of_what_did_not_step_is_an_empty_window(dislikes: int) -> None:
    generation = make_generation()
    state = generation.empty()
    for number, kind in enumerate(["click", *["dislike"] * dislikes]):
        generation.apply(state, Event(f"e{number}", "u", "item3", kind, number, None))
    stored = generation.decode_many([generation.encode(state)])
    assert windows(stored, 3).tolist() == [[3 if dislikes < 24 else -1, -1, -1]]
