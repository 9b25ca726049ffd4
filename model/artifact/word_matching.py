"""The compiled loops of searches: matching words, splitting strings into words, and ranking strings by level."""

from __future__ import annotations

import numba
import numpy as np

from model.artifact.string_table import (
    EACH_SUBSTRING,
    EACH_WORD_PREFIX,
    NO_MATCH,
    PREFIX,
    SPACE,
    SUBSTRING,
    TYPO,
)

LETTERS, MIXED, DIGITS = range(3)  # kinds of words
# The position of a word in its string: a match of the first kind is at PREFIX, and each next kind is one level weaker.
AT_BEGINNING, BEHIND_SPACE, BEHIND_OTHER = range(3)
# A place is a number that has, from its lowest bit on: the word's position, the word's turn among those of its string,
# modulo 8, and the string's row.
STAND_BITS, STAND_MASK = 2, 3
TURNS, TURN_MASK = 8, 7
PLACE_BITS = 5  # below the row
ANY_TURN = 0xFF
FIRST_LETTER, LAST_LETTER = ord("a"), ord("z")


@numba.njit(nogil=True)
def is_in_word(byte):  # type: ignore[no-untyped-def]
    """Return whether a UTF-8 byte belongs to a letter or digit. All bytes beyond ASCII count as letters."""
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
def find_kinds(buffer, ends, kinds):  # type: ignore[no-untyped-def]
    """Find the kind of each word."""
    for number in range(len(kinds)):
        kinds[number] = _kind(buffer, np.int64(ends[number]), np.int64(ends[number + 1]))


@numba.njit(nogil=True)
def _letter_end(buffer, place, end):  # type: ignore[no-untyped-def]
    """Return the end of the letter at this place."""
    if place < end:
        place += 1
        while place < end and buffer[place] & 0xC0 == 0x80:
            place += 1
    return place


@numba.njit(nogil=True)
def _stands_at(word, first, last, buffer, place, end):  # type: ignore[no-untyped-def]
    """Return whether this part of the word is at this place, before the end."""
    size, same = last - first, 0
    if size > end - place:
        return False
    while same < size and word[first + same] == buffer[place + same]:
        same += 1
    return same == size


@numba.njit(nogil=True)
def _has_typo(word, same, buffer, begin, end):  # type: ignore[no-untyped-def]
    """Return whether the word, with one typo, equals the beginning of another one, which is between these places.

    same  the number of equal bytes at the beginning of both, less than the size of the word

    A typo before the first different letter is equivalent to one at that letter.
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
    """Return how the word matches the one between these places."""
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
def match_words(buffer, ends, word, may_have_typo, levels):  # type: ignore[no-untyped-def]
    """Set the level at which each word matches."""
    for number in range(len(levels)):
        begin, end = np.int64(ends[number]), np.int64(ends[number + 1])
        levels[number] = _level_in_word(word, may_have_typo, buffer, begin, end)


@numba.njit(cache=True, nogil=True)
def raise_levels(buffer, ends, word, may_have_typo, levels):  # type: ignore[no-untyped-def]
    """Raise each string's level to that at which its closest word matches."""
    for row in range(len(levels)):
        if levels[row] == NO_MATCH:
            continue
        level, place, end = NO_MATCH, np.int64(ends[row]), np.int64(ends[row + 1])
        while place < end and level > EACH_WORD_PREFIX:
            begin = place
            while place < end and is_in_word(buffer[place]):
                place += 1
            if place > begin:
                level = min(level, _level_in_word(word, may_have_typo, buffer, begin, place))
            else:
                place += 1
        if level > levels[row]:
            levels[row] = level


@numba.njit(cache=True, nogil=True)
def spread(of_words, ends, places, levels, turns):  # type: ignore[no-untyped-def]
    """Lower each string's level to that of its closest word.

    turns  (N,)  uint8, gets a bit for the turn of each of the string's words that match without a typo
    """
    for number in range(len(of_words)):
        level = of_words[number]
        if level < NO_MATCH:
            for place in range(ends[number], ends[number + 1]):
                row = places[place] >> PLACE_BITS
                levels[row] = min(levels[row], level)
                if level < TYPO:
                    turns[row] |= 1 << (places[place] >> STAND_BITS & TURN_MASK)


@numba.njit(cache=True, nogil=True)
def add_word(of_word, turns, levels, reached):  # type: ignore[no-untyped-def]
    """Raise each string's level to that of the next word of a search, which has these turns.

    reached  (N,)  uint8, the turns at which the previous word ends a sequence of all words so far, ANY_TURN at first;
                   updated to those of this word
    """
    for row in range(len(levels)):
        levels[row] = max(levels[row], of_word[row])
        before = np.int64(reached[row])
        reached[row] = (before << 1 | before >> (TURNS - 1)) & turns[row]


@numba.njit(cache=True, nogil=True)
def spread_alone(of_words, ends, places, levels):  # type: ignore[no-untyped-def]
    """Do what `spread` does, for a search of a single word, whose levels follow from the words' positions.

    Whole strings are not distinguished from those that begin with the word.
    """
    for number in range(len(of_words)):
        level = of_words[number]
        if level == EACH_WORD_PREFIX:
            for place in range(ends[number], ends[number + 1]):
                row, of_row = places[place] >> PLACE_BITS, PREFIX + (places[place] & STAND_MASK)
                levels[row] = min(levels[row], of_row)
        elif level < NO_MATCH:
            within = SUBSTRING if level == EACH_SUBSTRING else level
            for place in range(ends[number], ends[number + 1]):
                row = places[place] >> PLACE_BITS
                levels[row] = min(levels[row], within)


@numba.njit(cache=True, nogil=True)
def add_letters(buffer, ends, numbers, places, letters):  # type: ignore[no-untyped-def]
    """Set the bits in each string's `letters` (N,) for the letters that its words have, from the lowest bit (a) on.

    numbers, places  (M,)  for each occurrence of a word, the word's number in `buffer`, and the place
    """
    of_words = np.zeros(len(ends) - 1, np.uint32)
    for number in range(len(of_words)):
        for place in range(np.int64(ends[number]), np.int64(ends[number + 1])):
            if FIRST_LETTER <= buffer[place] <= LAST_LETTER:
                of_words[number] |= np.uint32(1) << np.uint32(buffer[place] - FIRST_LETTER)
    for n in range(len(numbers)):
        letters[places[n] >> PLACE_BITS] |= of_words[numbers[n]]


@numba.njit(cache=True, nogil=True)
def find_letter(letters, letter, levels):  # type: ignore[no-untyped-def]
    """Set the levels of the strings by whether they contain this letter, a number from 0 (a) to 25 (z)."""
    bit = np.uint32(1) << np.uint32(letter)
    for row in range(len(levels)):
        levels[row] = SUBSTRING if letters[row] & bit else NO_MATCH


@numba.njit(cache=True, nogil=True)
def split(buffer, ends, first_row):  # type: ignore[no-untyped-def]
    """Return the concatenated words of strings, their ends, and the place of each."""
    begin, end = ends[0], ends[-1]
    words, word_ends = np.empty(end - begin, np.uint8), np.zeros((end - begin) // 2 + len(ends) + 1, np.int64)
    places = np.empty(len(word_ends), np.int32)
    count, used = 0, 0
    for row in range(len(ends) - 1):
        place, stands, turn = ends[row], AT_BEGINNING, 0
        while place < ends[row + 1]:
            before = used
            while place < ends[row + 1] and is_in_word(buffer[place]):
                words[used] = buffer[place]
                used += 1
                place += 1
            if used > before:
                places[count] = (first_row + row) << PLACE_BITS | (turn & TURN_MASK) << STAND_BITS | stands
                count += 1
                turn += 1
                word_ends[count] = used
            else:
                stands = BEHIND_SPACE if buffer[place] == SPACE else BEHIND_OTHER
                place += 1
    return words[:used], word_ends[: count + 1], places[:count]


@numba.njit(cache=True, nogil=True)
def sort(numbers, places, free, found):  # type: ignore[no-untyped-def]
    """Move each word's places to its free room."""
    for n in range(len(numbers)):
        number = numbers[n]
        found[free[number]] = places[n]
        free[number] += 1


@numba.njit(cache=True, nogil=True)
def fill_by_level(levels, order, first_level, ends, found):  # type: ignore[no-untyped-def]
    """Fill the room of each level with its first rows in the given order.

    ends   (levels + 1,) of the rooms of `first_level` and the following levels, each of which has enough rows
    found  (ends[-1],)
    """
    places, left = ends[:-1].copy(), len(found)
    if left == 0:
        return
    for row in order:
        level = np.int64(levels[row]) - first_level
        if 0 <= level < len(places) and places[level] < ends[level + 1]:
            found[places[level]] = row
            places[level] += 1
            left -= 1
            if left == 0:
                return
