"""Packed strings and their index, against lists and dicts."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.artifact import letter_pairs
from model.artifact.string_table import (
    EXACT,
    MAX_LOAD,
    NO_MATCH,
    PREFIX,
    SUBSTRING,
    WORD_PREFIX,
    Labels,
    StringIndex,
    StringTable,
    first_slot,
)

TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)


@given(strings=st.lists(TEXTS, max_size=40))
def test_packed_strings_round_trip(strings: list[str]) -> None:
    for names in (StringTable.of(strings), StringTable.of(pl.Series(strings, dtype=pl.String))):
        assert list(names) == [names[place] for place in range(len(names))] == names[:] == strings
        assert names[1:3] == strings[1:3]
        for place in (-1, len(strings)):
            with pytest.raises(IndexError):
                names[place]


def test_long_tables_are_decoded_in_chunks() -> None:
    strings = [f"{number:b}" for number in range(10_000)]
    names = StringTable.of(strings)
    assert list(names) == strings
    assert dict(StringIndex.of(names)) == {name: row for row, name in enumerate(strings)}


@given(known=st.lists(TEXTS, max_size=60, unique=True), asked=st.lists(TEXTS, max_size=20))
@pytest.mark.slow
def test_rows_equal_a_dict(known: list[str], asked: list[str]) -> None:
    rows, oracle = StringIndex.of(StringTable.of(known)), {name: row for row, name in enumerate(known)}
    assert dict(rows) == oracle
    asked += known[::3]
    assert [rows.get(name) for name in asked] == [oracle.get(name) for name in asked]
    assert [name in rows for name in asked] == [name in oracle for name in asked]
    assert rows.rows_of(asked).tolist() == [oracle[name] for name in asked if name in oracle]


@pytest.mark.parametrize("shape", ["{}", "item-{}", "SKU-{:08}", "B0{:06X}", "{:b}"])
def test_numbered_names_are_found_within_few_probes(shape: str) -> None:
    """Ideal hashes need 0.5 (1 + 1 / (1 - MAX_LOAD)) probes; twice as many are allowed."""
    names = StringTable.of(shape.format(number) for number in range(10_000))
    table = StringIndex.of(names).table
    place_of = np.empty(len(names), np.int64)
    place_of[table[table >= 0]] = np.flatnonzero(table >= 0)
    ends = names.ends.astype(np.int64)
    first = [first_slot(names.buffer, ends[row], ends[row + 1], len(table)) for row in range(len(names))]
    assert np.mean((place_of - first) % len(table) + 1) < 1 + 1 / (1 - MAX_LOAD)


def test_an_unknown_name_raises_key_error() -> None:
    with pytest.raises(KeyError, match="pot"):
        StringIndex.of(StringTable.of(["pan"]))["pot"]


@given(strings=st.lists(st.text("aAbB ßé", max_size=8), max_size=30), wanted=st.text("aB ßé", min_size=1, max_size=3))
def test_match_levels_equal_their_definition(strings: list[str], wanted: str) -> None:
    folded = wanted.casefold()

    def closeness(text: str) -> int:
        if text == folded:
            return EXACT
        if text.startswith(folded):
            return PREFIX
        return WORD_PREFIX if f" {folded}" in text else SUBSTRING if folded in text else NO_MATCH

    expected = [closeness(name.casefold()) for name in strings]
    assert StringTable.of(strings).match_levels(wanted).tolist() == expected


@given(strings=st.lists(st.text("aAbB ß", max_size=8), max_size=30), wanted=st.text("aB ß", min_size=1, max_size=3))
def test_occurrences_are_complete(strings: list[str], wanted: str) -> None:
    """Also for texts reported as rare, and across adjacent strings."""
    table, text = StringTable.of(strings), wanted.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(letter_pairs, "FEW_SHARE", 1_000)
        found = table.pairs.occurrences(text)
        expected = [
            (row, place)
            for row, string in enumerate(strings)
            for place in range(len(string.encode()))
            if string.encode().startswith(text, place)
        ]
        if found is None:
            assert len(text) == 1 or len(table.buffer) < 2
        else:
            assert list(zip(*(part.tolist() for part in found), strict=True)) == expected
        levels = table.folded.match_levels_folded(wanted.casefold())
        assert table.match_levels(wanted).tolist() == levels.tolist()


@given(labels=st.lists(st.lists(TEXTS, max_size=4, unique=True), max_size=20))
def test_labels_by_item_and_items_by_label(labels: list[list[str]]) -> None:
    packed = Labels.of(labels)
    assert list(packed) == [tuple(names) for names in labels]
    for label in {*(name for names in labels for name in names), "none has it"}:
        assert packed.items_with(label).tolist() == [row for row, names in enumerate(labels) if label in names]


def test_a_name_takes_its_bytes_plus_four() -> None:
    names = StringTable.of([f"item-{number:07}" for number in range(10_000)])
    table = StringIndex.of(names).table
    assert names.buffer.nbytes == 12 * 10_000
    assert names.ends.nbytes == 4 * 10_001
    assert table.nbytes <= 5 * 10_000 + 8
    shared_end = StringTable.of([""] * 10_000).ends.base
    assert shared_end is not None
    assert shared_end.nbytes == 4
    assert Labels.of([()] * 10_000).items_with("x").dtype == np.int32
