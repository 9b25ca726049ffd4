"""Packed states: lossless, canonical, and checked for damage."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.state.fold import fold_event
from storage.state.generation import Generation, StateError
from storage.state.layout import State
from tests.storage.oracles.random_events import click, make_generation

HEAD_BYTES = 16
GENERATIONS = [make_generation(codebooks=books) for books in (1, 2, 3, 4)]  # the last word of most is not whole


@st.composite
def states(draw: st.DrawFn) -> tuple[Generation, State]:
    """Any content after the first 16 bytes: zeros, words of the empty state and others."""
    generation = draw(st.sampled_from(GENERATIONS))
    content = bytearray(generation.empty().tobytes())
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    for at in range(HEAD_BYTES, len(content)):
        if random.random() < share:
            content[at] = random.choice([0, 255, int(random.integers(256))])
    return generation, np.frombuffer(content, generation.dtype)[0]


def changed_words(generation: Generation, state: State) -> int:
    content, empty = state.tobytes(), generation.empty().tobytes()
    starts = range(HEAD_BYTES, len(content), 4)
    return sum(content[start : start + 4] != empty[start : start + 4] for start in starts)


@given(states())
@settings(max_examples=200)
def test_a_state_round_trips_packed_or_not(one: tuple[Generation, State]) -> None:
    generation, state = one
    plain, value = state.tobytes(), generation.encode(state)
    assert len(value) <= len(plain)
    assert generation.fits(value)
    assert generation.fits(plain)
    for form in (value, plain):
        assert generation.decode(form).tobytes() == plain
        assert generation.encode(generation.decode(form)) == value
    mixed = generation.decode_many([plain, value, generation.encoded_empty, value])
    assert [one.tobytes() for one in mixed] == [plain, plain, generation.empty().tobytes(), plain]
    assert generation.encode_many(mixed) == [value, value, generation.encoded_empty, value]


@given(states())
@settings(max_examples=100)
def test_a_packed_state_has_a_bit_per_word_and_the_changed_words(
    one: tuple[Generation, State],
) -> None:
    generation, state = one
    words = -(-(generation.dtype.itemsize - HEAD_BYTES) // 4)
    packed = HEAD_BYTES + 4 + 4 * -(-words // 32) + 4 * changed_words(generation, state)
    assert len(generation.encode(state)) == min(packed, generation.dtype.itemsize)


def test_a_new_user_s_state_is_small() -> None:
    generation = make_generation(rates=(0.05, 0.25, 0.8), codebooks=8)
    state = generation.empty()
    lengths = [len(generation.encode(state))]
    for number in range(5):
        fold_event(generation, state, click(f"e{number}", item=number))
        lengths.append(len(generation.encode(state)))
    assert lengths == sorted(lengths)
    assert lengths[-1] < generation.dtype.itemsize / 2


def mark_word_beyond_the_last(value: bytes) -> bytes:
    words = -(-(int.from_bytes(value[16:20], "little") - HEAD_BYTES) // 4)
    end = 20 + 4 * -(-words // 32)
    assert words % 32
    return value[: end - 1] + bytes([value[end - 1] | 128]) + value[end:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: value[:-1],
        lambda value: value[:-4],
        lambda value: value + bytes(4),
        lambda value: value[:24],
        lambda value: value[:16] + (1).to_bytes(4, "little") + value[20:],
        lambda value: value[:20] + bytes([value[20] ^ 1]) + value[21:],
        lambda value: value[:20] + b"\xff" * (len(value) - 20),
        mark_word_beyond_the_last,
    ],
)
def test_damage_is_detected(damage: Callable[[bytes], bytes]) -> None:
    generation = make_generation()
    state = generation.empty()
    fold_event(generation, state, click("a", item=1))
    value = damage(generation.encode(state))
    assert not generation.fits(value)
    with pytest.raises(StateError):
        generation.decode_many([generation.encoded_empty, value, generation.encoded_empty])


@pytest.mark.parametrize("id_hash", [7, 7 << 32, 2**64 - 1, 1 << 31, 0x0123456789ABCDEF])
def test_an_id_with_a_half_zero_hash_is_remembered(id_hash: int) -> None:
    generation = make_generation()
    state = generation.empty()
    assert not generation.remembers(generation.encode(state), id_hash)
    state["recent_event_ids"][3] = id_hash
    for value in (generation.encode(state), state.tobytes()):
        assert generation.remembers(value, id_hash)
        assert not generation.remembers(value, id_hash ^ 2)
