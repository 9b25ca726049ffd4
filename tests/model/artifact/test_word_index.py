"""Search by words and with typos, against its definition."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from random import Random
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from model.artifact import letter_pairs, word_index
from model.artifact.item_table import ItemTable
from model.artifact.string_table import (
    EACH_SUBSTRING,
    EACH_WORD_PREFIX,
    EXACT,
    NO_MATCH,
    PREFIX,
    SUBSTRING,
    TYPO,
    WORD_PREFIX,
    StringTable,
)
from model.artifact.word_index import GrowingWordIndex, Search, WordIndex, closest, match_levels
from model.content.folding import fold
from tests.model.artifact.search_oracle import edits, title_level

LETTERS = "abcé"
TITLES = st.lists(st.lists(st.text(LETTERS, min_size=3, max_size=7), max_size=3).map(" ".join), min_size=1, max_size=8)


def mistyped(draw: st.DrawFn, word: str) -> str:
    """A partly typed word with up to two typos."""
    word = word[: draw(st.integers(2, 7))]
    for _ in range(draw(st.integers(0, 2))):
        place, letter = draw(st.integers(0, len(word) - 1)), draw(st.sampled_from(LETTERS))
        swapped = word[:place] + word[place : place + 2][::-1] + word[place + 2 :]
        added, changed = word[:place] + letter + word[place:], word[:place] + letter + word[place + 1 :]
        word = draw(st.sampled_from([added, changed, swapped, word[:place] + word[place + 1 :] or word]))
    return word


@st.composite
def searches(draw: st.DrawFn) -> tuple[list[str], str]:
    """Titles, and a search for words of one of them in another order."""
    titles = draw(TITLES)
    words = draw(st.permutations(draw(st.sampled_from(titles)).split()))[: draw(st.integers(1, 3))]
    return titles, draw(st.sampled_from([" ", "-", "  "])).join(mistyped(draw, word) for word in words) or "a"


def levels_of(titles: Sequence[str], query: str, *, with_typos: bool) -> list[int]:
    """Match levels by the index, which must equal those without it."""
    strings, search = StringTable.of(titles), Search.of(query)
    levels: list[int] = WordIndex(strings).match_levels(search, with_typos=with_typos).tolist()
    assert match_levels(strings.folded, search, with_typos=with_typos).tolist() == levels
    return levels


@given(searches())
def test_match_levels_equal_their_definition(found: tuple[list[str], str]) -> None:
    titles, query = found
    for with_typos in (False, True):
        expected = [title_level(query, title, with_typos=with_typos) for title in titles]
        assert levels_of(titles, query, with_typos=with_typos) == expected


@pytest.mark.parametrize(
    ("title", "query", "level"),
    [
        ("Grüner Tee", "gruener tee", EXACT),
        ("Gru\u0308ner Tee", "gruener tee", EXACT),
        ("Gruener Tee", "Grün", PREFIX),
        ("Fußstütze", "FUSSSTUETZE", EXACT),
        ("Fussstuetze", "fußstütze", EXACT),
        ("ÖL", "oel", EXACT),
        ("Käse", "kaes", PREFIX),
    ],
)
def test_umlauts_match_their_transliteration(title: str, query: str, level: int) -> None:
    assert levels_of(["Tasse", title], query, with_typos=False) == [NO_MATCH, level]
    assert StringTable.of(["Tasse", title]).match_levels(query).tolist() == [NO_MATCH, level]


@pytest.mark.parametrize(
    ("title", "query", "level"),
    [
        ("赤\u3000ワイン", "赤 ワイン", EXACT),
        ("赤 ワイン", "赤\u3000ワ", PREFIX),
        ("\uff2e\uff29\uff2b\uff2f\uff2e ｶﾞﾗｽ \uff12\uff14", "nikon ガラス 24", EXACT),
        ("ガラス", "カラス", NO_MATCH),
        ("İstanbul IŞIK", "istanbul iş\u0131k", EXACT),
        ("ISPARTA", "\u0131sparta", EXACT),
        ("ΕΛΛΗΝΙΚΟΣ ΚΑΦΕΣ", "ελληνικός καφές", EXACT),
        ("Żółta łódka", "zolta LODKA", EXACT),
        ("Cre\u0300me brûlée", "crème brule", PREFIX),
        ("Ёлка", "елка", EXACT),
        ("Ærø œuf", "aero oeuf", EXACT),
        ("שָׁלוֹם", "שלום", EXACT),
        ("أحمد قَهْوَة", "احمد قهوة", EXACT),
        ("\u200fNike\u200e Air", "nike air", EXACT),
        ("Donau\u00addampf", "donaudampf", EXACT),
        ("हिन्दी", "हन्द", NO_MATCH),
        ("한국어", "\u1112\u1161\u11ab국", PREFIX),
    ],
)
def test_width_accents_and_invisible_characters_are_ignored(title: str, query: str, level: int) -> None:
    assert levels_of(["#", title], query, with_typos=False) == [NO_MATCH, level]
    assert StringTable.of(["#", title]).match_levels(query).tolist() == [NO_MATCH, level]


@pytest.mark.parametrize("query", ["\u0301", "\u200f", "\ufe0f\u200d", "\u00b4", "\u00a8 \u0301"])
def test_a_search_for_punctuation_does_not_match_everything(query: str) -> None:
    assert levels_of(["green tea", "caf\u0065\u0301"], query, with_typos=True) == [NO_MATCH, NO_MATCH]


def test_surrounding_punctuation_is_ignored() -> None:
    assert levels_of(["tea", "green tea"], "\u200f tea \u00b4", with_typos=False) == [EXACT, WORD_PREFIX]


def test_folding_is_idempotent() -> None:
    letters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    assert [letter for letter in letters if not fold(letter) or fold(fold(letter)) != fold(letter)] == []


@given(
    st.lists(st.text("abB é1-ßİ—日eoöÖ", max_size=14), max_size=12),
    st.text("abB é1-ßİ—日eoöÖ", min_size=1, max_size=9).filter(str.strip),
)
def test_any_letters_are_searchable(titles: list[str], query: str) -> None:
    for with_typos in (False, True):
        expected = [title_level(query, title, with_typos=with_typos) for title in titles]
        assert levels_of(titles, query, with_typos=with_typos) == expected


@given(
    st.lists(st.text("12ab -", max_size=9), max_size=8),
    st.lists(st.text("12a", min_size=1, max_size=3), min_size=1, max_size=2).map(" ".join),
    st.sampled_from([0.0, 1_000.0]),
)
def test_rare_numbers_are_found(titles: list[str], query: str, share: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(letter_pairs, "FEW_SHARE", share)
        expected = [title_level(query, title, with_typos=True) for title in titles]
        assert levels_of(titles, query, with_typos=True) == expected


@pytest.mark.parametrize(
    ("query", "title", "level"),
    [
        ("kettle", "Kettle", EXACT),
        ("kettle", "Kettle, steel", PREFIX),
        ("kettle", "Kettles", PREFIX),
        ("kettle", "Kettle ", PREFIX),
        ("ket", "steel Kettle", WORD_PREFIX),
        ("ket", "(Kettle)", SUBSTRING),
        ("ket", "steel-Kettle kettle", WORD_PREFIX),
        ("ett", "Kettle", SUBSTRING),
        ("steel kettle", "Kettle, steel", EACH_WORD_PREFIX),
        ("steel ket", "Kettle, steel", EACH_WORD_PREFIX),
        ("steel kettle", "Teakettle of steel", EACH_SUBSTRING),
        ("steel ketle", "Kettle, steel", TYPO),
        ("kettel", "Kettle", TYPO),
        ("ektt", "Kettle", TYPO),
        ("köttle", "Kettle", TYPO),
        ("kttel", "Kettle", NO_MATCH),  # two typos
        ("cuo", "Cup", NO_MATCH),  # too short
        ("5001", "Model 5000", NO_MATCH),  # a number
        ("kettle", "Kettl3", NO_MATCH),
        ("4k tv", "TV, 4K", EACH_WORD_PREFIX),
        ("50 mod", "Model 1500", EACH_SUBSTRING),
        ("k", "4k", SUBSTRING),
        ("kettle pan", "Kettle, steel", NO_MATCH),
        ("a b c d e f g h never", "abcdefgh", EACH_SUBSTRING),
        ("- -", "steel - - kettle", WORD_PREFIX),
    ],
)
def test_match_levels_of_words(query: str, title: str, level: int) -> None:
    assert levels_of([title, ""], query, with_typos=True) == [level, NO_MATCH]


LONG_TITLES = st.lists(
    st.lists(st.sampled_from(["ab", "abc", "b", "bc", "ca"]), min_size=1, max_size=20).map(" ".join),
    min_size=1,
    max_size=6,
)


@given(LONG_TITLES, st.integers(0, 19), st.integers(1, 10), st.integers(0, 1), st.sampled_from([" ", "-"]))
def test_consecutive_words_are_found_at_any_position(
    titles: list[str], begin: int, count: int, cut: int, between: str
) -> None:
    words = titles[0].split()
    query = between.join(words[begin % len(words) :][:count])[cut:].strip() or "a"
    for with_typos in (False, True):
        expected = [title_level(query, title, with_typos=with_typos) for title in titles]
        assert levels_of(titles, query, with_typos=with_typos) == expected


def test_only_titles_with_consecutive_words_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    titles = ["red tea pot", "pot red", "pot of red", "red pot", "one red pot", "redder, (pots)", "pot, shred pottery"]
    looked_at, match_levels_folded = list[int](), StringTable.match_levels_folded

    def noted(strings: StringTable, wanted: str, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        looked_at.extend(rows.tolist())
        return match_levels_folded(strings, wanted, rows)

    monkeypatch.setattr(StringTable, "match_levels_folded", noted)
    found = WordIndex(StringTable.of(titles)).match_levels(Search.of("red pot"), with_typos=False)
    assert found.tolist() == [title_level("red pot", title, with_typos=False) for title in titles]
    assert looked_at == [3, 4, 5, 6]


@pytest.mark.parametrize("letter", ["a", "B", "z", "é", "1", "y"])
def test_a_single_letter_is_found(letter: str) -> None:
    titles = ["a", "A b", "cab", "zoo 1a", "1", "é", "", "b-a", " a", "(z)", "1z", "11", "Az, b", "aé za"] * 3
    for with_typos in (False, True):
        expected = [title_level(letter, title, with_typos=with_typos) for title in titles]
        assert levels_of(titles, letter, with_typos=with_typos) == expected


def test_titles_are_indexed_in_chunks() -> None:
    titles = [f"{'red' if row % 2 else 'blue'} thing {row % 10}" for row in range(100)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_index, "INDEXED_AT_ONCE", 7)
        for query in ("thing red", "thign", "7"):
            expected = [title_level(query, title, with_typos=True) for title in titles]
            assert levels_of(titles, query, with_typos=True) == expected


@given(st.lists(TITLES, min_size=1, max_size=6), st.data())
def test_added_titles_match_like_initial_ones(pages: list[list[str]], data: st.DataObject) -> None:
    """Between searches, enough titles are added that some are indexed and some are not."""
    index, titles = GrowingWordIndex(), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_index, "MAX_UNINDEXED", data.draw(st.integers(1, 5)))
        for page in pages:
            titles += page
            words = data.draw(st.sampled_from(titles)).split()
            draw = cast(st.DrawFn, data.draw)
            query = " ".join(mistyped(draw, word) for word in data.draw(st.permutations(words))) or "b"
            for with_typos in (False, True):
                found = index.match_levels(StringTable.of(titles).folded, Search.of(query), with_typos=with_typos)
                assert found.tolist() == [title_level(query, title, with_typos=with_typos) for title in titles]


def test_a_table_shorter_than_the_index_is_searched() -> None:
    """As by a thread that read the titles before another thread indexed more."""
    index, titles = GrowingWordIndex(), ["red pot", "blue pot"] * word_index.MAX_UNINDEXED
    for count in (len(titles), len(titles) // 2, 1, len(titles)):
        strings = StringTable.of(titles[:count])
        expected = [title_level("pot red", title, with_typos=False) for title in titles[:count]]
        assert index.match_levels(strings, Search.of("pot red"), with_typos=False).tolist() == expected


@given(
    st.lists(st.integers(EXACT, NO_MATCH), max_size=30),
    st.integers(1, 5),
    st.sampled_from([range(TYPO), range(TYPO, NO_MATCH)]),
    st.randoms(),
)
def test_the_closest_equal_a_sort(levels: list[int], limit: int, wanted: range, chance: Random) -> None:
    order = list(range(len(levels)))
    chance.shuffle(order)
    expected = sorted((row for row in order if levels[row] in wanted), key=lambda row: levels[row])[:limit]
    assert closest(np.array(levels, np.uint8), np.array(order, np.int32), wanted, limit).tolist() == expected


def test_an_empty_table_has_no_matches() -> None:
    assert levels_of([""] * 1_000, "kettle", with_typos=True) == [NO_MATCH] * 1_000
    assert levels_of([], "kettle", with_typos=True) == []


def test_cold_items_use_the_same_index() -> None:
    items = ItemTable(["a"], ["Kettle"], [()], np.zeros(1, np.int64))
    assert items.with_cold_items(["b"]).with_cold_items(["c"]).title_words is items.title_words


def test_edit_distances_of_the_oracle() -> None:
    pairs = {("kettle", "kettle"): 0, ("ketle", "kettle"): 1, ("kettel", "kettle"): 1, ("ktetel", "kettle"): 2}
    assert {pair: edits(*pair) for pair in pairs} == pairs
