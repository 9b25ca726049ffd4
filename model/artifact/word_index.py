"""Finds strings by the words of a search: in any order, by their beginnings and parts, and with one typo each.

A word is a run of letters and digits. A typo is a letter too many, one that is missing or another one, or two
neighbours in the wrong order. With a typo, a word of the search stands for the beginning of a word: it is being typed.
Numbers, and whatever else has a digit, are as they are.

A catalogue has few different words. So a search goes through these, and from them to the strings that have them.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import NamedTuple, Self

import numba
import numpy as np
from numpy.typing import NDArray

from model.artifact.growing_table import GrowingTable
from model.artifact.string_table import EACH_SUBSTRING, EACH_WORD_PREFIX, NO_MATCH, SUBSTRING, TYPO, StringTable

MAX_WORDS = 8  # of a search; those behind them only count in the search as a whole
MIN_LETTERS = 4  # of a word that may have a typo
WORD, NOT_A_DIGIT = re.compile(rb"[0-9A-Za-z\x80-\xff]+"), re.compile(rb"[^0-9]")  # in UTF-8
DIGIT = re.compile(rb"[0-9]")
INDEXED_AT_ONCE = 1 << 16  # strings

LETTERS, MIXED, DIGITS = range(3)  # kinds of words

Levels = NDArray[np.uint8]


class SearchWord(NamedTuple):
    """A word of a search.

    utf8           what it is
    has_digits     whether it has any digits
    has_letters    whether it has anything else
    may_have_typo  whether it is long enough for a typo, and has no digits
    """

    utf8: NDArray[np.uint8]
    has_digits: bool
    has_letters: bool
    may_have_typo: bool

    @classmethod
    def of(cls, utf8: bytes) -> Self:
        """Return the word."""
        has_digits, has_letters = DIGIT.search(utf8) is not None, NOT_A_DIGIT.search(utf8) is not None
        is_long = len(utf8.decode()) >= MIN_LETTERS
        return cls(np.frombuffer(utf8, np.uint8), has_digits, has_letters, is_long and not has_digits)


class Search(NamedTuple):
    """What is searched for, in folded case: the whole text, and its first words."""

    text: str
    words: tuple[SearchWord, ...]

    @classmethod
    def of(cls, query: str) -> Self:
        """Return the search for what somebody has typed."""
        text = query.strip().casefold()
        return cls(text, tuple(map(SearchWord.of, WORD.findall(text.encode())[:MAX_WORDS])))

    @property
    def may_have_typos(self) -> bool:
        """Whether any of the words may have a typo."""
        return any(word.may_have_typo for word in self.words)

    @property
    def is_word(self) -> bool:
        """Whether the text is a single word."""
        return len(self.words) == 1 and len(self.words[0].utf8) == len(self.text.encode())


class WordIndex:
    """The words of N strings, and the strings that have each of them. It is made by the first search.

    It takes four bytes for each word of a string, and for each different word its bytes and sixteen more, beside the
    strings in folded case.
    """

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings

    def match_levels(self, search: Search, *, with_typos: bool) -> Levels:
        """Tell how each string matches a search that is not empty, in any case: (N,), from EXACT to NO_MATCH."""
        strings = self._strings.folded
        if not search.words:
            return strings.match_levels_folded(search.text)
        levels = np.zeros(len(strings), np.uint8)
        for word in search.words:
            np.maximum(levels, self._levels_of(word, with_typos), out=levels)
        if search.is_word:  # where no word begins with it, it is a part of one
            levels[levels == EACH_SUBSTRING] = SUBSTRING
        # whatever contains the text has its words
        rows = np.flatnonzero((levels == EACH_WORD_PREFIX) | (levels == EACH_SUBSTRING))
        levels[rows] = np.minimum(levels[rows], strings.match_levels_folded(search.text, rows))
        return levels

    def _levels_of(self, word: SearchWord, with_typos: bool) -> Levels:
        words, levels = self._words, np.full(len(self._strings), NO_MATCH, np.uint8)
        first, last = words.with_digits if word.has_digits else 0, len(words.table)
        if word.has_letters:
            last = words.with_digits_alone
        of_words = np.full(last - first, NO_MATCH, np.uint8)
        ends = words.table.ends[first : last + 1]
        _match_words(words.table.buffer, ends, word.utf8, with_typos and word.may_have_typo, of_words)
        _spread(of_words, words.ends[first : last + 1], words.rows, levels)
        return levels

    @cached_property
    def _words(self) -> _Words:
        strings, table = self._strings.folded, GrowingTable(StringTable.of([]))
        numbers, owners = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
        for begin in range(0, len(strings), INDEXED_AT_ONCE):
            words, ends, rows = _split(strings.buffer, strings.ends[begin : begin + INDEXED_AT_ONCE + 1], begin)
            words.flags.writeable = False  # as all others that are added to such tables, for the same compiled loop
            numbers.append(table.add_joined(words, ends).astype(np.int32))
            owners.append(rows)
        return _Words.of(table.strings(), np.concatenate(numbers), np.concatenate(owners))


class _Words(NamedTuple):
    """The different words: those of letters alone, those with digits, and last those of digits alone.

    table              the words
    with_digits        the number of the first one with digits
    with_digits_alone  the number of the first one of digits alone
    rows               (M,)         of the strings that have each word, word by word
    ends               (words + 1,) of each word's rows
    """

    table: StringTable
    with_digits: int
    with_digits_alone: int
    rows: NDArray[np.int32]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, words: StringTable, numbers: NDArray[np.int32], owners: NDArray[np.int32]) -> Self:
        """Sort the words, which are numbered, and the rows (M,) of the strings in which they stand: numbers (M,)."""
        kinds = np.empty(len(words), np.uint8)
        _find_kinds(words.buffer, words.ends, kinds)
        order = np.argsort(kinds, kind="stable")
        renumbered = np.empty(len(order), np.int32)
        renumbered[order] = np.arange(len(order))
        old_ends = words.ends.astype(np.int64)
        begins, sizes = old_ends[:-1][order], (old_ends[1:] - old_ends[:-1])[order]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        places = np.repeat(begins - ends[:-1], sizes) + np.arange(ends[-1])
        sorted_numbers, rows = renumbered[numbers], np.empty(len(owners), np.int32)
        ends_of_rows = np.zeros(len(order) + 1, np.int64)
        np.cumsum(np.bincount(sorted_numbers, minlength=len(order)), out=ends_of_rows[1:])
        _sort(sorted_numbers, owners, ends_of_rows[:-1].copy(), rows)
        first, alone = np.searchsorted(kinds[order], [MIXED, DIGITS]).tolist()
        return cls(StringTable(words.buffer[places], ends.view(np.uint64)), first, alone, rows, ends_of_rows)


def match_levels(strings: StringTable, search: Search, *, with_typos: bool) -> Levels:
    """Do as `WordIndex` without an index, for strings that are case-folded already and change."""
    levels = strings.match_levels_folded(search.text)
    if not search.words or (search.is_word and not with_typos):
        return levels
    of_words = np.zeros(len(strings), np.uint8)
    # the rarest words first, as a string that lacks one is not looked at again
    for word in sorted(search.words, key=lambda word: (with_typos and word.may_have_typo, -len(word.utf8))):
        may_have_typo = with_typos and word.may_have_typo
        if not may_have_typo:
            rows = np.flatnonzero(of_words < NO_MATCH)
            is_missing = strings.match_levels_folded(word.utf8.tobytes().decode(), rows) == NO_MATCH
            of_words[rows[is_missing]] = NO_MATCH
        _raise_levels(strings.buffer, strings.ends, word.utf8, may_have_typo, of_words)
    return np.minimum(levels, of_words)


@numba.njit(nogil=True)
def _is_in_word(byte):  # type: ignore[no-untyped-def]
    return byte >= 0x80 or 0x30 <= byte <= 0x39 or 0x61 <= byte <= 0x7A or 0x41 <= byte <= 0x5A


@numba.njit(nogil=True)
def _kind(buffer, begin, end):  # type: ignore[no-untyped-def]
    digits = 0
    for place in range(begin, end):
        if 0x30 <= buffer[place] <= 0x39:
            digits += 1
    if digits == 0:
        return LETTERS
    return DIGITS if digits == end - begin else MIXED


@numba.njit(cache=True, nogil=True)
def _find_kinds(buffer, ends, kinds):  # type: ignore[no-untyped-def]
    for number in range(len(kinds)):
        kinds[number] = _kind(buffer, np.int64(ends[number]), np.int64(ends[number + 1]))


@numba.njit(nogil=True)
def _letter_end(buffer, place, end):  # type: ignore[no-untyped-def]
    """Return where the letter at this place ends."""
    if place < end:
        place += 1
        while place < end and buffer[place] & 0xC0 == 0x80:
            place += 1
    return place


@numba.njit(nogil=True)
def _stands_at(word, first, last, buffer, place, end):  # type: ignore[no-untyped-def]
    """Tell whether this part of the word stands at this place, before the end."""
    size, same = last - first, 0
    if size > end - place:
        return False
    while same < size and word[first + same] == buffer[place + same]:
        same += 1
    return same == size


@numba.njit(nogil=True)
def _has_typo(word, same, buffer, begin, end):  # type: ignore[no-untyped-def]
    """Tell whether the word is like the beginning of another one with one typo, which stands between these places.

    same  bytes at the beginning of both that are the same, fewer than the word has

    A typo before the first letter that differs would be the same as one there.
    """
    size = len(word)
    while same > 0 and word[same] & 0xC0 == 0x80:
        same -= 1  # to where the letter begins
    here = begin + same
    after, there = _letter_end(word, same, size), _letter_end(buffer, here, end)
    if _stands_at(word, after, size, buffer, there, end) or _stands_at(word, after, size, buffer, here, end):
        return True  # another letter, or one too many
    if _stands_at(word, same, size, buffer, there, end):
        return True  # one is missing
    second = _letter_end(word, after, size)
    return (
        second > after
        and _stands_at(word, after, second, buffer, here, end)
        and _stands_at(word, same, after, buffer, here + second - after, end)
        and _stands_at(word, second, size, buffer, here + second - same, end)
    )


@numba.njit(nogil=True)
def _level_in_word(word, may_have_typo, buffer, begin, end):  # type: ignore[no-untyped-def]
    """Tell how the word that stands between these places matches."""
    size, same = len(word), 0
    while same < size and same < end - begin and word[same] == buffer[begin + same]:
        same += 1
    if same == size:
        return EACH_WORD_PREFIX
    for place in range(begin + 1, end - size + 1):
        if _stands_at(word, 0, size, buffer, place, end):
            return EACH_SUBSTRING
    if may_have_typo and _has_typo(word, same, buffer, begin, end) and _kind(buffer, begin, end) == LETTERS:
        return TYPO
    return NO_MATCH


@numba.njit(cache=True, nogil=True)
def _match_words(buffer, ends, word, may_have_typo, levels):  # type: ignore[no-untyped-def]
    """Tell how each word matches."""
    for number in range(len(levels)):
        begin, end = np.int64(ends[number]), np.int64(ends[number + 1])
        levels[number] = _level_in_word(word, may_have_typo, buffer, begin, end)


@numba.njit(cache=True, nogil=True)
def _raise_levels(buffer, ends, word, may_have_typo, levels):  # type: ignore[no-untyped-def]
    """Raise each string's level to that at which its closest word matches."""
    for row in range(len(levels)):
        if levels[row] == NO_MATCH:
            continue
        level, place, end = NO_MATCH, np.int64(ends[row]), np.int64(ends[row + 1])
        while place < end and level > EACH_WORD_PREFIX:
            begin = place
            while place < end and _is_in_word(buffer[place]):
                place += 1
            if place > begin:
                level = min(level, _level_in_word(word, may_have_typo, buffer, begin, place))
            else:
                place += 1
        if level > levels[row]:
            levels[row] = level


@numba.njit(cache=True, nogil=True)
def _spread(of_words, ends, rows, levels):  # type: ignore[no-untyped-def]
    """Lower each string's level to that of its closest word."""
    for number in range(len(of_words)):
        level = of_words[number]
        if level < NO_MATCH:
            for place in range(ends[number], ends[number + 1]):
                if level < levels[rows[place]]:
                    levels[rows[place]] = level


@numba.njit(cache=True, nogil=True)
def _split(buffer, ends, first_row):  # type: ignore[no-untyped-def]
    """Return the words of strings one behind the other, their ends, and the rows of their strings."""
    begin, end = np.int64(ends[0]), np.int64(ends[-1])
    words, word_ends = np.empty(end - begin, np.uint8), np.zeros((end - begin) // 2 + len(ends) + 1, np.int64)
    rows = np.empty(len(word_ends), np.int32)
    count, used = 0, 0
    for row in range(len(ends) - 1):
        before = used
        for place in range(np.int64(ends[row]), np.int64(ends[row + 1])):
            if _is_in_word(buffer[place]):
                words[used] = buffer[place]
                used += 1
            elif used > before:
                rows[count] = first_row + row
                count += 1
                word_ends[count] = used
                before = used
        if used > before:
            rows[count] = first_row + row
            count += 1
            word_ends[count] = used
    return words[:used], word_ends[: count + 1], rows[:count]


@numba.njit(cache=True, nogil=True)
def _sort(numbers, owners, free, rows):  # type: ignore[no-untyped-def]
    """Put each word's rows where the first free place for them is."""
    for place in range(len(numbers)):
        number = numbers[place]
        rows[free[number]] = owners[place]
        free[number] += 1
