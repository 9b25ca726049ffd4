"""Re-ranking for diversity: each item of a list is selected given those before it.

Source: maximal marginal relevance, Carbonell and Goldstein, SIGIR 1998, with an item's score as its relevance and the
share of equal target codewords as the similarity of two items.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

WINDOW = 24  # number of best remaining items that compete for each position
LABEL_BITS = 32  # of a label's number; the limit of the label is in the bits above
BELOW_TOP = np.uint64(0x7F7F7F7F7F7F7F7F)  # of each byte, all bits but the top one
EACH_BYTE = np.uint64(0x0101010101010101)  # as a factor, it adds up all bytes in the top one
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio, for multiplicative hashing

TargetCodes = NDArray[np.uint8]
"""(n, B') target codes"""


class ItemLabels(NamedTuple):
    """Labels of n items, such as their categories: item i has those from ends[i] to ends[i + 1].

    labels  (M,)      int64
    ends    (n + 1,)  int64
    """

    labels: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def gathered(cls, labels: NDArray[np.int64], begins: NDArray[np.int64], sizes: NDArray[np.int64]) -> ItemLabels:
        """Return the labels of n items, of which item i has `sizes[i]` from `begins[i]` on."""
        ends = np.concatenate([[0], np.cumsum(sizes)])
        found = np.empty(ends[-1], np.int64)
        _gather(labels, begins, ends, found)
        return cls(found, ends)

    def followed_by(self, others: ItemLabels) -> ItemLabels:
        """Return the labels of these items and of others after them."""
        ends = np.concatenate([self.ends, others.ends[1:] + self.ends[-1]])
        return ItemLabels(np.concatenate([self.labels, others.labels]), ends)


def window(strength: float) -> int:
    """Return how many items compete for each position."""
    return WINDOW if strength else 1


class Candidates(NamedTuple):
    """The n best items of a ranking.

    scores   (n,)   descending
    codes    codes of these items; arbitrary if the diversity strength is 0
    labels   labels of these items, whose number in a list is limited
    are_all  whether the ranking has no further items
    """

    scores: NDArray[np.float32]
    codes: TargetCodes
    labels: ItemLabels
    are_all: bool


class Reserved(NamedTuple):
    """The codes and labels of the items that are already in a list."""

    codes: TargetCodes
    labels: ItemLabels


class Selected(NamedTuple):
    """The selected items of a list.

    places  positions of the selected candidates, in order
    left    the number of candidates that compete for the next position
    full    (F,)  labels of which the list may have no more items
    """

    places: NDArray[np.int64]
    left: int
    full: NDArray[np.int64]


NO_LABELS = ItemLabels(np.zeros(0, np.int64), np.zeros(1, np.int64))


def select_diverse(
    strength: float, count: int, candidates: Candidates, reserved: Reserved, most: NDArray[np.int64]
) -> Selected:
    """Select items for the positions of a list, one after another.

    The first `window` remaining items whose labels all have room compete for each position. The winner maximises
    (1 - strength) * score - strength * largest similarity to an item selected before.

    strength  how far the list may depart from the order of the scores: 0 to 1; 0 keeps the order
    most      (C,)  how many items of one label the list may have; `most[n]` is for the labels from n * 2^32 on
    returns   at most `count` items, and fewer if the selection depends on further items
    """
    scores, codes, labels, are_all = candidates
    selected = np.empty(count, np.int64)
    full = np.empty(len(labels.labels) + len(reserved.labels.labels), np.int64)
    items = scores, codes, *_as_compiled(labels), are_all
    listed = reserved.codes, *_as_compiled(reserved.labels)
    found, left, full_labels = _select(float(strength), window(strength), items, listed, most, selected, full)
    return Selected(selected[:found], left, full[:full_labels])


def _as_compiled(labels: ItemLabels) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.ascontiguousarray(labels.labels, np.int64), np.ascontiguousarray(labels.ends, np.int64)


@numba.njit(cache=True, nogil=True)
def _gather(labels, begins, ends, found):  # type: ignore[no-untyped-def]
    for item in range(len(begins)):
        for place in range(ends[item + 1] - ends[item]):
            found[ends[item] + place] = labels[begins[item] + place]


@numba.njit(nogil=True)
def _take_item(item, labels, ends, room):  # type: ignore[no-untyped-def]
    for place in range(ends[item], ends[item + 1]):
        room[labels[place]] -= 1


@numba.njit(nogil=True)
def _number(labels, ends, table, different, found):  # type: ignore[no-untyped-def]
    """Number the labels without gaps by a hash table with linear probing, without repetitions in an item.

    table      (2^n,)  1 + the number of the label that is kept there, 0 for none
    different  (M,)    the label of each number, of which `found` are known
    returns    the numbers, their ends, and how many labels are known now
    """
    numbers, new_ends, last_item = np.empty_like(labels), np.zeros_like(ends), np.zeros(len(different), np.int32)
    written, shift = 0, 64
    while 1 << (64 - shift) < len(table):
        shift -= 1
    for item in range(len(ends) - 1):
        for place in range(ends[item], ends[item + 1]):
            slot = np.int64((np.uint64(labels[place]) * GOLDEN) >> np.uint64(shift))
            while table[slot] and different[table[slot] - 1] != labels[place]:
                slot = (slot + 1) & (len(table) - 1)
            if not table[slot]:
                different[found] = labels[place]
                found += 1
                table[slot] = found
            number = table[slot] - 1
            if last_item[number] <= item:  # a catalogue may list a category twice
                last_item[number], numbers[written] = item + 1, number
                written += 1
        new_ends[item + 1] = written
    return numbers, new_ends, found


@numba.njit(cache=True, nogil=True)
def _select(strength, window, candidates, reserved, most, selected, full):  # type: ignore[no-untyped-def]
    scores, codes, labels, ends, are_all = candidates
    reserved_codes, reserved_labels, reserved_ends = reserved
    size = 4
    while size < 2 * len(full):
        size *= 2
    table = np.zeros(size, np.int32)  # the system provides only the pages that are touched
    reserved_labels, reserved_ends, known_labels = _number(reserved_labels, reserved_ends, table, full, 0)
    labels, ends, known_labels = _number(labels, ends, table, full, known_labels)
    room = np.empty(known_labels, np.int64)
    for number in range(known_labels):
        room[number] = most[full[number] >> LABEL_BITS]
    for item in range(len(reserved_ends) - 1):
        _take_item(item, reserved_labels, reserved_ends, room)
    words, reserved_words = _packed(codes), _packed(reserved_codes)
    padding, books = words.shape[1] * 8 - codes.shape[1], max(codes.shape[1], 1)  # without codes no items are similar
    count = len(scores)
    is_removed, similarity = np.zeros(count, np.bool_), np.zeros(count, np.float64)
    known, first, found, seen = 0, 0, 0, 0  # the similarities of the first `known` items are up to date
    while found < len(selected):
        best, best_value, seen, item = -1, 0.0, 0, first
        while item < count and seen < window:
            if not is_removed[item]:
                for place in range(ends[item], ends[item + 1]):
                    is_removed[item] |= room[labels[place]] <= 0
                if not is_removed[item]:
                    if item >= known:
                        known = item + 1
                        if strength > 0:
                            same = 0
                            for other in range(len(reserved_words)):
                                same = max(same, _equal_codes(words, item, reserved_words, other))
                            for place in range(found):
                                same = max(same, _equal_codes(words, item, words, selected[place]))
                            similarity[item] = max(0.0, (same - padding) / books)
                    value = (1 - strength) * scores[item] - strength * similarity[item]
                    if best < 0 or value > best_value:
                        best, best_value = item, value
                    seen += 1
            item += 1
        if best < 0 or (seen < window and not are_all):
            break
        selected[found] = best
        found += 1
        is_removed[best] = True
        _take_item(best, labels, ends, room)
        if strength > 0:
            for other in range(first, known):
                if not is_removed[other]:
                    same = _equal_codes(words, other, words, best)
                    similarity[other] = max(similarity[other], (same - padding) / books)
        while first < count and is_removed[first]:
            first += 1
    full_labels = 0
    for number in range(known_labels):
        if room[number] <= 0:
            full[full_labels] = full[number]
            full_labels += 1
    return found, seen, full_labels


@numba.njit(nogil=True)
def _packed(codes):  # type: ignore[no-untyped-def]
    """Pack the codes of each item into words of eight bytes, the last of which ends with zeros."""
    items, books = codes.shape
    words = np.zeros((items, -(-books // 8)), np.uint64)
    for item in range(items):
        for book in range(books):
            words[item, book // 8] |= np.uint64(codes[item, book]) << np.uint64(book % 8 * 8)
    return words


@numba.njit(nogil=True)
def _equal_codes(words, item, others, other):  # type: ignore[no-untyped-def]
    """Count the equal bytes of two items' words, those behind the last code included."""
    same = np.uint64(0)
    for word in range(words.shape[1]):
        different = words[item, word] ^ others[other, word]
        is_equal = ~(((different & BELOW_TOP) + BELOW_TOP) | different | BELOW_TOP)  # the top bit of each equal byte
        same += ((is_equal >> np.uint64(7)) * EACH_BYTE) >> np.uint64(56)
    return np.int64(same)


def compile_loops() -> None:
    """Compile the loops before the first request."""
    codes, labels = np.zeros((0, 1), np.uint8), np.zeros(0, np.int64)
    of_nothing = ItemLabels.gathered(labels, labels, labels)
    nothing = Candidates(np.zeros(0, np.float32), codes, of_nothing, True)
    select_diverse(0.5, 0, nothing, Reserved(codes, of_nothing), labels)
