"""Search finds titles that the shop puts like those of the model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.catalogue.expressions.columns import TextColumn
from app.catalogue.expressions.texts import Texts
from app.catalogue.filter_expressions import Expression
from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.overrides.item_overrides import ItemOverrides
from model.artifact import word_index
from model.artifact.item_table import ItemTable
from model.artifact.string_table import EXACT, NO_MATCH, TYPO
from model.artifact.word_index import Search
from model.inference import bitmap
from storage.records import ItemChanges, ItemEntry
from tests.model.artifact.search_oracle import title_level, whole_level

LEARNED = [f"item-{n}" for n in range(9)]
OTHERS = [f"new-{n}" for n in range(5)]
WORDS = st.sampled_from(["green", "tea", "Kettle", "teakettle", "pot", "4k", "\u00e9clair"])
TITLES = st.lists(WORDS, max_size=3).map(" ".join)
PUTS = st.lists(st.builds(ItemEntry, st.sampled_from(LEARNED + OTHERS), st.none() | TITLES), min_size=1, max_size=6)
QUERIES = [
    "tea",
    "t",
    "kettle green",
    "grene",
    "kettel",
    "item-3",
    "new",
    "pot tea",
    "4k",
    "\u00e9cliar",
    "ket gre",
    "zz",
]


def level(query: str, name: str, title: str, *, with_typos: bool) -> int:
    return min(title_level(query, title, with_typos=with_typos), whole_level(query, name))


def expected_items(query: str, titles: Mapping[str, str], limit: int) -> list[str]:
    """Learned items by level, then cold ones, exact matches first; all learned items are equally popular."""
    found: list[str] = []
    for with_typos in (False, True):
        wanted = {TYPO} if with_typos else {*range(EXACT, TYPO)}
        for names in (LEARNED, OTHERS):
            of_names = [
                (level(query, name, titles[name], with_typos=with_typos), name) for name in names if name in titles
            ]
            found += [name for one, name in sorted(of_names) if one in wanted and name not in found]
    return found[:limit]


@given(
    st.lists(TITLES, min_size=len(LEARNED), max_size=len(LEARNED)),
    st.lists(PUTS, max_size=4),
    st.lists(st.sampled_from(QUERIES), min_size=1, max_size=3, unique=True),
    st.integers(1, 4),
)
@settings(max_examples=60)
def test_updated_titles_match_by_the_same_definition(
    of_model: list[str], puts: list[list[ItemEntry]], queries: list[str], indexed: int
) -> None:
    overrides, titles = ItemOverrides(), dict(zip(LEARNED, of_model, strict=True))
    counts = np.ones(len(LEARNED), np.int64)
    catalogue = LiveCatalogue(ItemTable(LEARNED, of_model, [()] * len(LEARNED), counts), overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_index, "MAX_UNINDEXED", indexed)
        for version, entries in enumerate([[], *puts]):
            if entries:
                overrides.apply(ItemChanges(entries, version))
            catalogue.catch_up()
            for entry in entries:
                of_item = dict(zip(LEARNED, of_model, strict=True)).get(entry.item_id, "")
                titles[entry.item_id] = of_item if entry.title is None else entry.title
            for query in queries:
                for limit in (2, 20):
                    found = [item["item_id"] for item in catalogue.search(query, limit)]
                    assert found == expected_items(query, titles, limit)
                levels = catalogue.match_levels(Search.of(query), enough=len(LEARNED) + 1)
                with_typos = [level(query, name, titles[name], with_typos=True) for name in LEARNED]
                assert levels.tolist() == with_typos


def test_unavailable_items_do_not_displace_matches_with_a_typo() -> None:
    overrides, ids = ItemOverrides(), ["pot", "post", "other"]
    catalogue = LiveCatalogue(ItemTable(ids, ["Kettle", "Kettle", "Kettel"], [()] * 3, np.ones(3, np.int64)), overrides)
    search = Search.of("kettle")
    assert catalogue.match_levels(search, enough=2).tolist() == [EXACT, EXACT, NO_MATCH]
    overrides.apply(ItemChanges([ItemEntry("post", available=False)], 1))
    catalogue.catch_up()
    assert catalogue.match_levels(search, enough=2).tolist() == [EXACT, EXACT, TYPO]


@given(st.lists(st.lists(st.text(max_size=3), max_size=20), max_size=6))
def test_growing_texts_stay_sorted(pages: list[list[str]]) -> None:
    texts, added = Texts(), set[str]()
    for page in [*pages, ["a"]]:  # many are sorted with the rest, and few are inserted
        texts.add_all(page)
        added |= {*page}
        assert texts.at(texts.sorted_numbers) == sorted(added)


def test_a_search_decodes_only_the_ids_of_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides, read = ItemOverrides(), list[int]()
    overrides.apply(ItemChanges([ItemEntry(f"new-{n}", "Tea") for n in range(500)], 1))
    catalogue = LiveCatalogue(ItemTable([], [], [], np.zeros(0, np.int64)), overrides)
    at = Texts.at

    def note_and_read(texts: Texts, numbers: NDArray[np.integer]) -> list[str]:
        read.append(len(numbers))
        return at(texts, numbers)

    monkeypatch.setattr(Texts, "at", note_and_read)
    for query in ("", "tea", "new"):
        found = [item["item_id"] for item in catalogue.search(query, 20)]
        assert found == sorted(f"new-{n}" for n in range(500))[:20]
    assert sum(read) == 3 * 20


def test_a_removed_title_disappears_from_expressions() -> None:
    overrides = ItemOverrides()
    catalogue = LiveCatalogue(
        ItemTable(["tea", "pot"], ["Green tea", "Pot"], [()] * 2, np.ones(2, np.int64)), overrides
    )
    named = Expression('item.title == "Green tea"', "boolean", {}, ())
    titled = Expression("size(item.title) > 0", "boolean", {}, ())
    assert bitmap.to_mask(catalogue.expressions.evaluate(named), 2).tolist() == [True, False]
    overrides.apply(ItemChanges([ItemEntry("tea", "")], 1))
    catalogue.catch_up()
    assert not bitmap.to_mask(catalogue.expressions.evaluate(named), 2).any()
    assert bitmap.to_mask(catalogue.expressions.evaluate(titled), 2).tolist() == [False, True]


def test_copying_an_empty_value_clears_the_target() -> None:
    column = TextColumn.of(["Green tea", "Pot"])
    column.copy(TextColumn.empty(2), np.array([0]), np.array([0]))
    assert column.values_at(np.arange(2)) == [None, "Pot"]
    assert (bitmap.to_mask(column.known, 2).tolist(), column.changes) == ([False, True], 1)
