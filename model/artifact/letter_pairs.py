"""Finds texts in strings by rare pairs of neighbouring letters, such as those of ids and numbers."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

COUNTED_AT_ONCE = 1 << 20  # bytes
FEW_SHARE = 1 / 8  # of all strings: a more frequent pair is no help
NOWHERE: NDArray[np.int64] = np.zeros(0, np.int64)

Occurrences: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]


class LetterPairs:
    """The count of each pair of neighbouring bytes in the buffer of N strings, including pairs across two strings.

    buffer  (bytes,)  uint8, UTF-8, the concatenated strings
    ends    (N + 1,)  string n is between ends[n] and ends[n + 1]
    """

    def __init__(self, buffer: NDArray[np.uint8], ends: NDArray[np.unsignedinteger]) -> None:
        self._buffer, self._ends = buffer, ends
        counts = np.zeros(1 << 16, np.int64)
        for begin in range(0, len(buffer), COUNTED_AT_ONCE):
            part = buffer[begin : begin + COUNTED_AT_ONCE + 1].astype(np.uint16)
            counts += np.bincount(part[:-1] << 8 | part[1:], minlength=len(counts))
        self._counts = counts.reshape(256, 256)

    def occurrences(self, text: bytes) -> Occurrences | None:
        """Return the string's row, and the position in the string, of each occurrence of the text.

        None if scanning each string is faster: for a single letter, and if each pair is frequent.
        """
        letters, buffer, ends = np.frombuffer(text, np.uint8), self._buffer, self._ends
        if not len(letters) or len(buffer) < 2:
            return None
        counts = self._counts_of(letters)
        rarest, size = int(counts.argmin()), max(len(buffer) - len(text) + 1, 0)
        if not counts[rarest]:
            return NOWHERE, NOWHERE
        if len(letters) == 1 or counts[rarest] > FEW_SHARE * (len(ends) - 1):
            return None
        # comparing the whole buffer with one letter is faster than comparing some strings with several letters
        are_there = buffer[rarest : rarest + size] == letters[rarest]
        are_there &= buffer[rarest + 1 : rarest + 1 + size] == letters[rarest + 1]
        places = np.flatnonzero(are_there)
        for place in range(len(letters)):
            places = places[buffer[places + place] == letters[place]]
        rows = np.searchsorted(ends, places.astype(ends.dtype), side="right") - 1
        are_within = places + len(text) <= ends[rows + 1].astype(np.int64)
        rows, places = rows[are_within], places[are_within]
        return rows, places - ends[rows].astype(np.int64)

    def _counts_of(self, letters: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return the count of each pair of a text; for a single letter, the count of the pairs that have it."""
        if len(letters) > 1:
            return self._counts[letters[:-1], letters[1:]]
        counts: NDArray[np.int64] = self._counts[letters].sum(axis=1) + self._counts[:, letters].sum(axis=0)
        return counts
