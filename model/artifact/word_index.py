"""Finds strings by the words of a search: in any order, by their beginnings and parts, and with one typo each.

A word is a run of letters and digits. A typo is an extra, a missing or a wrong letter, or two neighbouring letters in
the wrong order. A word of the search with a typo matches the beginning of a word, because users search while they type.
Words with digits cannot have typos.

A catalogue has few distinct words. So a search scans these, and then the places where they occur. Each place has the
word's position in its string, so that a search for one word does not read the strings. It also has the word's turn, its
number among the string's words, so that a search for several words reads only strings that have them in sequence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from model.artifact.growing_table import GrowingTable
from model.artifact.string_table import (
    EACH_SUBSTRING,
    EACH_WORD_PREFIX,
    EXACT,
    NO_MATCH,
    StringIndex,
    StringTable,
)
from model.artifact.word_matching import (
    ANY_TURN,
    AT_BEGINNING,
    DIGITS,
    FIRST_LETTER,
    LAST_LETTER,
    MIXED,
    PLACE_BITS,
    STAND_MASK,
    add_letters,
    add_word,
    fill_by_level,
    find_kinds,
    find_letter,
    match_words,
    raise_levels,
    sort,
    split,
    spread,
    spread_alone,
)
from model.content.folding import fold

MAX_WORDS = 8  # of a search; further words only count in the search as a whole
MIN_LETTERS = 4  # of a word that may have a typo
WORD, NOT_A_DIGIT = re.compile(rb"[0-9A-Za-z\x80-\xff]+"), re.compile(rb"[^0-9]")  # in UTF-8
DIGIT = re.compile(rb"[0-9]")
INDEXED_AT_ONCE = 1 << 16  # strings
MAX_UNINDEXED = 1_000  # of the newest strings that were added; scanning them takes 0.1 ms

Levels = NDArray[np.uint8]


class SearchWord(NamedTuple):
    """A word of a search.

    utf8           its bytes
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
        """Return the word of these case-folded bytes."""
        has_digits, has_letters = DIGIT.search(utf8) is not None, NOT_A_DIGIT.search(utf8) is not None
        is_long = len(utf8.decode()) >= MIN_LETTERS
        return cls(np.frombuffer(utf8, np.uint8), has_digits, has_letters, is_long and not has_digits)

    @property
    def letter(self) -> int | None:
        """The number of the letter, from 0 (a) to 25 (z), if the word has only this letter; None for other words."""
        if len(self.utf8) > 1 or not FIRST_LETTER <= self.utf8[0] <= LAST_LETTER:
            return None
        return int(self.utf8[0]) - FIRST_LETTER


class Search(NamedTuple):
    """A case-folded query: the whole text and its first words."""

    text: str
    words: tuple[SearchWord, ...]

    @classmethod
    def of(cls, query: str) -> Self:
        """Return the search for a query text."""
        text = fold(query).strip()
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
    """The words of N strings, at most 2 ** 26, and the places of each word. The first search builds the index.

    It takes four bytes for each word of a string and for each string, and sixteen bytes and its letters for each
    distinct word, in addition to the case-folded strings.
    """

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings

    def match_levels(self, search: Search, *, with_typos: bool) -> Levels:
        """Return how each string matches a non-empty search, ignoring case: (N,), from EXACT to NO_MATCH."""
        return self._words.match_levels(self._strings.folded, search, with_typos=with_typos)

    @cached_property
    def _words(self) -> _Words:
        return _Words.of(self._strings.folded)


class GrowingWordIndex:
    """The words of a growing list of strings: an index for each part of the list, except the newest strings.

    A part has at least twice as many strings as the next one. So there are few parts, and a string is indexed again
    only each time that the list has grown by half.
    """

    def __init__(self) -> None:
        self._parts: tuple[_Part, ...] = ()

    def match_levels(self, strings: StringTable, search: Search, *, with_typos: bool) -> Levels:
        """Return how each string matches, like `WordIndex`.

        strings  case-folded: those of the previous call, followed by new ones
        """
        end, found = 0, []
        for part in self._parts_of(strings):
            found.append(part.words.match_levels(_slice(strings, end, part.end), search, with_typos=with_typos))
            end = part.end
        newest = _slice(strings, end, len(strings))
        return np.concatenate([*found, match_levels(newest, search, with_typos=with_typos)])

    def _parts_of(self, strings: StringTable) -> tuple[_Part, ...]:
        """Return the parts up to the newest strings. If these are many, they become a part."""
        parts, end = self._parts, len(strings)
        while parts and parts[-1].end > end:
            parts = parts[:-1]  # another thread knows of more strings
        if end - _end_of(parts) < MAX_UNINDEXED:
            return parts
        while parts and parts[-1].end - _end_of(parts[:-1]) < 2 * (end - parts[-1].end):
            parts = parts[:-1]
        self._parts = (*parts, _Part(end, _Words.of(_slice(strings, _end_of(parts), end))))
        return self._parts


class _Part(NamedTuple):
    """Strings that were indexed together: the end of their range, and their words."""

    end: int
    words: _Words


def _end_of(parts: Sequence[_Part]) -> int:
    return parts[-1].end if parts else 0


def _slice(strings: StringTable, begin: int, end: int) -> StringTable:
    return StringTable(strings.buffer, strings.ends[begin : end + 1])


class _Words(NamedTuple):
    """The distinct words: first those of letters only, then those of letters and digits, last those of digits only.

    table              the words
    with_digits        the number of the first one with digits
    with_digits_alone  the number of the first one of digits only
    places             (M,)         the places of each word, word by word, encoded as in `word_matching`
    ends               (words + 1,) of each word's places
    letters            (N,)         uint32, which letters from a to z the words of each string have
    """

    table: StringTable
    with_digits: int
    with_digits_alone: int
    places: NDArray[np.int32]
    ends: NDArray[np.int64]
    letters: NDArray[np.uint32]

    @classmethod
    def of(cls, strings: StringTable) -> Self:
        """Index the words of case-folded strings."""
        table, buffer = GrowingTable(StringTable.of([])), strings.buffer.view()
        buffer.flags.writeable = False  # like all others, so that the same compiled loop takes it
        numbers, places = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
        for begin in range(0, len(strings), INDEXED_AT_ONCE):
            ends_of_strings = strings.ends[begin : begin + INDEXED_AT_ONCE + 1].astype(np.int64)
            words, ends, of_words = split(buffer, ends_of_strings, begin)
            words.flags.writeable = False
            numbers.append(table.add_joined(words, ends).astype(np.int32))
            places.append(of_words)
        return cls._sorted(table.strings(), np.concatenate(numbers), np.concatenate(places), len(strings))

    @classmethod
    def _sorted(cls, words: StringTable, numbers: NDArray[np.int32], places: NDArray[np.int32], strings: int) -> Self:
        """Sort the words by kind, and the places (M,) by word; `numbers` (M,) has the word at each place."""
        letters_of_strings = np.zeros(strings, np.uint32)
        add_letters(words.buffer, words.ends, numbers, places, letters_of_strings)
        kinds = np.empty(len(words), np.uint8)
        find_kinds(words.buffer, words.ends, kinds)
        order = np.argsort(kinds, kind="stable")
        renumbered = np.empty(len(order), np.int32)
        renumbered[order] = np.arange(len(order))
        old_ends = words.ends.astype(np.int64)
        begins, sizes = old_ends[:-1][order], (old_ends[1:] - old_ends[:-1])[order]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        letters = np.repeat(begins - ends[:-1], sizes) + np.arange(ends[-1])
        sorted_numbers, sorted_places = renumbered[numbers], np.empty(len(places), np.int32)
        ends_of_places = np.zeros(len(order) + 1, np.int64)
        np.cumsum(np.bincount(sorted_numbers, minlength=len(order)), out=ends_of_places[1:])
        sort(sorted_numbers, places, ends_of_places[:-1].copy(), sorted_places)
        first, alone = np.searchsorted(kinds[order], [MIXED, DIGITS]).tolist()
        table = StringTable(words.buffer[letters], ends.view(np.uint64))
        return cls(table, first, alone, sorted_places, ends_of_places, letters_of_strings)

    def match_levels(self, strings: StringTable, search: Search, *, with_typos: bool) -> Levels:
        """Return how each of the index's case-folded strings matches."""
        if not search.words:
            return strings.match_levels_folded(search.text)
        if search.is_word:
            return self._levels_of_word(strings, search.words[0], with_typos)
        levels, reached = np.zeros(len(strings), np.uint8), np.full(len(strings), ANY_TURN, np.uint8)
        for word in search.words:
            of_word, turns = np.full(len(strings), NO_MATCH, np.uint8), np.zeros(len(strings), np.uint8)
            first, of_words = self._matching(word, with_typos)
            spread(of_words, self.ends[first : first + len(of_words) + 1], self.places, of_word, turns)
            add_word(of_word, turns, levels, reached)
        rows = np.flatnonzero(reached > 0)  # a string that contains the text has its words in sequence
        levels[rows] = np.minimum(levels[rows], strings.match_levels_folded(search.text, rows))
        return levels

    def _levels_of_word(self, strings: StringTable, word: SearchWord, with_typos: bool) -> Levels:
        """Return the levels for a search of a single word, without reading the strings, except their sizes."""
        levels, (first, of_words) = np.full(len(strings), NO_MATCH, np.uint8), self._matching(word, with_typos)
        if word.letter is not None:  # most words may have it, in nearly all strings
            find_letter(self.letters, word.letter, levels)
            of_words[of_words == EACH_SUBSTRING] = NO_MATCH
        spread_alone(of_words, self.ends[first : first + len(of_words) + 1], self.places, levels)
        ends, size = self.table.ends[first : first + len(of_words) + 1], len(word.utf8)
        beginning = np.flatnonzero(of_words == EACH_WORD_PREFIX)
        for number in beginning[ends[beginning + 1] - ends[beginning] == size].tolist():  # the word itself
            places = self.places[self.ends[first + number] : self.ends[first + number + 1]]
            rows = places[places & STAND_MASK == AT_BEGINNING] >> PLACE_BITS
            levels[rows[strings.ends[rows + 1] - strings.ends[rows] == size]] = EXACT
        return levels

    def _matching(self, word: SearchWord, with_typos: bool) -> tuple[int, Levels]:
        """Return the number of the first word that may match, and how it and the following ones match."""
        first, last = self.with_digits if word.has_digits else 0, len(self.table)
        if word.has_letters:
            last = self.with_digits_alone
        levels = np.full(last - first, NO_MATCH, np.uint8)
        # there are many numbers, and they have no typos
        if word.has_digits and (found := self.table.pairs.occurrences(word.utf8.tobytes())) is not None:
            numbers, begins = found
            are_wanted = (numbers >= first) & (numbers < last)
            of_word = np.where(begins[are_wanted] == 0, EACH_WORD_PREFIX, EACH_SUBSTRING).astype(np.uint8)
            np.minimum.at(levels, numbers[are_wanted] - first, of_word)
            return first, levels
        ends = self.table.ends[first : last + 1]
        match_words(self.table.buffer, ends, word.utf8, with_typos and word.may_have_typo, levels)
        return first, levels


def match_levels(strings: StringTable, search: Search, *, with_typos: bool) -> Levels:
    """Do what `WordIndex` does, without an index, for case-folded strings that change."""
    levels = strings.match_levels_folded(search.text)
    if not search.words or (search.is_word and not with_typos):
        return levels
    of_words = np.zeros(len(strings), np.uint8)
    # the rarest words first, because a string that lacks one is not read again
    for word in sorted(search.words, key=lambda word: (with_typos and word.may_have_typo, -len(word.utf8))):
        may_have_typo = with_typos and word.may_have_typo
        if not may_have_typo:
            rows = np.flatnonzero(of_words < NO_MATCH)
            is_missing = strings.match_levels_folded(word.utf8.tobytes().decode(), rows) == NO_MATCH
            of_words[rows[is_missing]] = NO_MATCH
        raise_levels(strings.buffer, strings.ends, word.utf8, may_have_typo, of_words)
    return np.minimum(levels, of_words)


@cache
def compile_loops() -> None:
    """Compile the loops of searches and of tables of texts, or load their compiled code, before the first request."""
    of_model = StringTable.of(["Red kettle"])
    loaded = StringTable(of_model.buffer.copy(), of_model.ends)  # it may be changed, which is another type
    StringIndex.of(loaded)
    loaded.match_levels_folded("r")
    of_shop = GrowingTable(of_model).strings()
    for search in map(Search.of, ("r", "red kettle")):
        levels = WordIndex(of_model).match_levels(search, with_typos=True)
        match_levels(of_shop, search, with_typos=True)
        closest(levels, np.zeros(1, np.int32), range(NO_MATCH), 1)


def closest(levels: Levels, order: NDArray[np.int32], wanted: range, limit: int) -> NDArray[np.int32]:
    """Return at most `limit` rows of the wanted levels, by level, those of a level in the given order of all rows."""
    counts: list[int] = []
    for level in wanted:
        left = limit - sum(counts)
        counts.append(min(int(np.count_nonzero(levels == level)), left) if left else 0)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    found = np.empty(ends[-1], np.int32)
    fill_by_level(levels, order, wanted.start, ends, found)
    return found
