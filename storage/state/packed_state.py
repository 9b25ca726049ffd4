"""Packed states: what a store keeps of a state, without the words that are as in the state of a user without events.

Few events touch few codewords, so most of a newcomer's state is as it was at first. A packed state consists of words of
4 bytes, little-endian:

    head     4 words  the first 16 bytes of the state, where 128 is added to the layout version
    size     1 word   the bytes of the state
    changed  G words  a bit for each further word of the state, the lowest first: whether the empty state has another
    words             those that the empty state has otherwise, in order; the last word of a state ends in zeros

A state that is not shorter when packed is kept as it is. So every state has one encoded form, and all forms begin with
the layout version, the mark of unlearned items and the tag of the generation.
"""

from collections.abc import Sequence
from itertools import accumulate

import numba
import numpy as np
from numpy.typing import NDArray

from storage.state.layout import LAYOUT_VERSION

WORD_BYTES = 4
WORD_BITS = 32
HEAD_WORDS = 4
MAP_AT = HEAD_WORDS + 1
SIZE_AT = slice(WORD_BYTES * HEAD_WORDS, WORD_BYTES * MAP_AT)
PACKED = 128  # added to the layout version, which is less
PLAIN_MARK, PACKED_MARK = bytes([LAYOUT_VERSION]), bytes([LAYOUT_VERSION | PACKED])  # first bytes of the present layout


def is_of_layout(value: bytes) -> bool:
    """Return whether an encoded state, packed or not, has the present layout."""
    return value[:1] in (PLAIN_MARK, PACKED_MARK)


def is_packed(value: bytes) -> bool:
    """Return whether the value is in packed form; an empty one is not."""
    return value[:1] >= b"\x80"


def state_size(value: bytes) -> int:
    """Return how many bytes the state in an encoded value has, if that is whole."""
    return int.from_bytes(value[SIZE_AT], "little") if is_packed(value) else len(value)


def is_whole(value: bytes) -> bool:
    """Return whether an encoded value has as many words as it says."""
    if not is_packed(value):
        return True
    further = -(-state_size(value) // WORD_BYTES) - HEAD_WORDS
    words_at = WORD_BYTES * (MAP_AT - (-further // WORD_BITS))
    changed = int.from_bytes(value[WORD_BYTES * MAP_AT : words_at], "little")
    return changed.bit_length() <= further and len(value) == words_at + WORD_BYTES * changed.bit_count()


def words_of(states: NDArray[np.void]) -> NDArray[np.uint32]:
    """Return the words (U, W) of (U,) states, of which a last one that is not whole is filled with zeros."""
    count, size = len(states), states.itemsize
    states = np.ascontiguousarray(states)
    if size % WORD_BYTES == 0:
        return states.view(np.uint32).reshape(count, size // WORD_BYTES)
    content = states.view(np.uint8).reshape(count, size)
    return np.pad(content, ((0, 0), (0, -size % WORD_BYTES))).view(np.uint32)


def states_of(words: NDArray[np.uint32], dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """Return the (U,) states with these words (U, W), in the same memory."""
    states: NDArray[np.void]
    if dtype.itemsize % WORD_BYTES == 0:
        states = np.ndarray(len(words), dtype, words)  # a view takes longer
    else:
        states = words.view(np.uint8)[:, : dtype.itemsize].view(dtype)[:, 0]
    return states


def pack(states: NDArray[np.uint32], empty: NDArray[np.uint32], size: int) -> list[bytes]:
    """Return the encoded forms of U states of `size` bytes, by their words (U, W) and those of the empty state (W,)."""
    count, words = states.shape
    most = words + MAP_AT - (HEAD_WORDS - words) // WORD_BITS
    packed = np.empty(count * most, np.uint32)
    lengths = np.empty(count, np.int64)
    _pack(states, empty, size, packed.reshape(count, most), lengths)
    joined = packed.view(np.uint8).data
    starts = range(0, WORD_BYTES * len(packed), WORD_BYTES * most)
    return [bytes(joined[start : start + length]) for start, length in zip(starts, lengths.tolist(), strict=True)]


def unpack(values: Sequence[bytes], empty: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the words (U, W) of the states in U encoded values, of as many words as the empty state.

    raises  ValueError  when a value is not whole
    """
    states = np.empty((len(values), len(empty)), np.uint32)
    values = [value if is_packed(value) else value + bytes(-len(value) % WORD_BYTES) for value in values]
    ends = np.array([*accumulate(map(len, values))], np.int64)
    joined = b"".join(values)
    if len(joined) % WORD_BYTES or not _unpack(np.frombuffer(joined, "<u4"), ends, empty, states):
        raise ValueError("a state has another number of words than it says")
    return states


@numba.njit(cache=True)
def _pack(states, empty, size, packed, lengths):  # type: ignore[no-untyped-def]
    words = len(empty)
    groups = -(-(words - HEAD_WORDS) // WORD_BITS)
    for user in range(len(states)):
        state, out = states[user], packed[user]
        place = MAP_AT + groups
        for group in range(groups):
            first = HEAD_WORDS + WORD_BITS * group
            changed = np.uint32(0)
            for bit in range(min(WORD_BITS, words - first)):
                word = state[first + bit]
                differs = np.uint32(word != empty[first + bit])
                out[place] = word  # overwritten by the next one unless it differs
                place += int(differs)
                changed |= differs << np.uint32(bit)
            out[MAP_AT + group] = changed
        if WORD_BYTES * place < size:
            out[:HEAD_WORDS] = state[:HEAD_WORDS]
            out[0] |= np.uint32(PACKED)
            out[HEAD_WORDS] = size
            lengths[user] = WORD_BYTES * place
        else:
            out[:words] = state
            lengths[user] = size


@numba.njit(cache=True)
def _unpack(joined, ends, empty, states):  # type: ignore[no-untyped-def]
    words = len(empty)
    groups = -(-(words - HEAD_WORDS) // WORD_BITS)
    start = 0
    for user in range(len(ends)):
        state, end = states[user], ends[user] // WORD_BYTES
        place = start + (MAP_AT + groups if joined[start] & PACKED else words)
        if place > end or ends[user] % WORD_BYTES:
            return False
        if joined[start] & PACKED == 0:
            state[:] = joined[start:place]
        else:
            state[:HEAD_WORDS] = joined[start : start + HEAD_WORDS]
            state[0] -= np.uint32(PACKED)
            for group in range(groups):
                first = HEAD_WORDS + WORD_BITS * group
                changed = joined[start + MAP_AT + group]
                for bit in range(min(WORD_BITS, words - first)):
                    differs = (changed >> np.uint32(bit)) & np.uint32(1)
                    if place + differs > end:
                        return False
                    state[first + bit] = joined[place] if differs else empty[first + bit]
                    place += differs
                if words - first < WORD_BITS and changed >> np.uint32(words - first):
                    return False
        if place != end:
            return False
        start = end
    return True
