"""The form of texts in which searches compare them."""

from __future__ import annotations

import re
from unicodedata import normalize

PLAIN_LETTERS = {"a\u0308": "ae", "o\u0308": "oe", "u\u0308": "ue"}  # of decomposed umlauts
PLAIN_LETTERS |= {"\u0131": "i", "ł": "l", "đ": "d", "ø": "o", "æ": "ae", "œ": "oe"}  # no normal form has plain letters
# in a class of characters: of Latin, Greek and Cyrillic letters, and the points of Hebrew and Arabic
ACCENTS = "\u0300-\u036f\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u064b-\u065f\u0670"
INVISIBLE = "\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufe00-\ufe0f\ufeff"  # soft hyphens, joiners, directions
IGNORED = re.compile(f"[{ACCENTS}{INVISIBLE}]+")


def fold(text: str) -> str:
    """Return the text in small letters of usual width, without accents and invisible characters.

    Umlauts become the two letters that stand for them. Marks that make another letter stay, such as those of kana and
    Devanagari. A text of nothing but ignored characters, such as U+00B4, stays: a blank one would match all titles.
    """
    if text.isascii():
        return text.lower()
    folded = normalize("NFKD", text).casefold()
    for letter, plain in PLAIN_LETTERS.items():
        folded = folded.replace(letter, plain)
    folded = normalize("NFC", IGNORED.sub("", folded))
    return folded if folded.strip() else text
