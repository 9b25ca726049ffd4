"""How titles match a search, by definition and word by word."""

from __future__ import annotations

import re
import unicodedata

from model.artifact.string_table import (
    EACH_SUBSTRING,
    EACH_WORD_PREFIX,
    EXACT,
    NO_MATCH,
    PREFIX,
    SUBSTRING,
    TYPO,
    WORD_PREFIX,
)

WORD, DIGIT = re.compile("[0-9A-Za-z\u0080-\U0010ffff]+"), re.compile("[0-9]")


def folded(text: str) -> str:
    """The text case-folded, in normal width and without accents; German umlauts become two letters."""
    composed = unicodedata.normalize("NFKC", text)
    return "".join(folded_letter(letter) for letter in composed)


def folded_letter(letter: str) -> str:
    if umlaut := {"ä": "ae", "ö": "oe", "ü": "ue"}.get(letter.lower()):
        return umlaut
    base = unicodedata.normalize("NFD", letter)[0]
    return {"\u0131": "i", "ł": "l"}.get(base.casefold(), base.casefold())


def edits(one: str, other: str) -> int:
    """Number of inserted, deleted, replaced or transposed letters."""
    rows: list[list[int]] = [[*range(len(other) + 1)]]
    for n, letter in enumerate(one):
        row = [n + 1]
        for m, of_other in enumerate(other):
            found = min(rows[n][m + 1] + 1, row[m] + 1, rows[n][m] + (letter != of_other))
            if n and m and letter == other[m - 1] and one[n - 1] == of_other:
                found = min(found, rows[n - 1][m - 1] + 1)
            row.append(found)
        rows.append(row)
    return rows[-1][-1]


def may_have_typo(word: str) -> bool:
    return len(word) >= 4 and not DIGIT.search(word)


def whole_level(query: str, text: str) -> int:
    """Match level of the whole search with a title or an id."""
    wanted, found = folded(query.strip()), folded(text)
    if found == wanted:
        return EXACT
    if found.startswith(wanted):
        return PREFIX
    return WORD_PREFIX if f" {wanted}" in found else SUBSTRING if wanted in found else NO_MATCH


def word_level(word: str, other: str, *, with_typos: bool) -> int:
    if other.startswith(word):
        return EACH_WORD_PREFIX
    if word in other:
        return EACH_SUBSTRING
    beginnings = (other[:end] for end in range(len(other) + 1))
    may_differ = with_typos and may_have_typo(word) and not DIGIT.search(other)
    is_like = may_differ and any(edits(word, one) <= 1 for one in beginnings)
    return TYPO if is_like else NO_MATCH


def title_level(query: str, title: str, *, with_typos: bool) -> int:
    """Match level of the search with a title, as a whole or by its first eight words."""
    whole, words = whole_level(query, title), WORD.findall(folded(query.strip()))[:8]
    if not words:
        return whole
    of_title = WORD.findall(folded(title))
    each = [min((word_level(word, one, with_typos=with_typos) for one in of_title), default=NO_MATCH) for word in words]
    return min(whole, max(each))
