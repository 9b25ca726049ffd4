"""Search and popular items, in the catalogue and over HTTP."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.catalogue.boosted_counts import best_rows
from app.catalogue.category_column import CategoryColumn
from app.catalogue.expressions.set_columns import TextSetColumn
from app.catalogue.trained_catalogue import Rows, TrainedCatalogue
from model.artifact.item_table import ItemTable
from model.artifact.string_table import Labels
from model.inference import bitmap
from model.inference.scan import Boosts
from tests.app.conftest import ITEMS, Client

TITLES = {
    "a": "Blue kettle",
    "b": "Kettle, steel",
    "c": "Teakettle",
    "d": "kettle",
    "e": "",
    "f": "STRASSE in Köln",
    "kettle": "Red pot",
}
COUNTS = [1, 2, 9, 1, 9, 0, 0]
MANY = 5_000
GAINS = st.sampled_from([-20.0, -1.0, 0.5, 3.0, 20.0])


@pytest.fixture(scope="module")
def catalogue() -> TrainedCatalogue:
    categories = [("pots", "blue"), ("pots",), (), ("pots",), ("blue",), (), ()]
    items = ItemTable(list(TITLES), list(TITLES.values()), categories, np.array(COUNTS, np.int64))
    return TrainedCatalogue(items, CategoryColumn(items.categories, TextSetColumn(len(items))))


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("kettle", "d kettle b a c"),  # whole title or id, beginning, beginning of a word, anywhere
        ("  KETTLE ", "d kettle b a c"),
        ("Straße", "f"),
        ("KÖLN", "f"),
        ("", "c e b a d f kettle"),  # by popularity, ties in item order
        ("kettle\n", "d kettle b a c"),
        ("nothing like it", ""),
    ],
)
def test_search_finds_titles_and_ids_closest_first(catalogue: TrainedCatalogue, query: str, found: str) -> None:
    assert [item["item_id"] for item in catalogue.search(query, 10)] == found.split()
    assert [item["item_id"] for item in catalogue.search(query, 2)] == found.split()[:2]


def test_popular_items_tie_in_item_order(catalogue: TrainedCatalogue) -> None:
    assert [(item["item_id"], item["score"]) for item in catalogue.popular_items(4)] == [
        ("c", 9),
        ("e", 9),
        ("b", 2),
        ("a", 1),
    ]


def test_unknown_ids_and_categories_match_nothing(catalogue: TrainedCatalogue) -> None:
    assert catalogue.rows(["z", "b", "z", "a", "b"]).tolist() == [1, 0, 1]
    assert np.flatnonzero(bitmap.to_mask(catalogue.in_categories(["blue", "red"]), len(catalogue))).tolist() == [0, 4]
    assert not catalogue.in_categories(["red"]).any()


@given(
    st.lists(st.integers(0, 5) | st.integers(0, 5_000), min_size=1, max_size=150),
    st.lists(GAINS, max_size=4),
    st.integers(0, 2**32 - 1),
    st.integers(0, 160),
    st.booleans(),
)
def test_boosted_counts_equal_a_sort(counted: list[int], gains: list[float], seed: int, k: int, by_item: bool) -> None:
    random, counts = np.random.default_rng(seed), np.array(counted)
    rows = np.arange(len(counts))
    drawn = [rows[random.random(len(rows)) < share] for share in (0.3, *random.random(len(gains)))]
    excluded, *sets = (bitmap.empty(len(rows)) for _ in drawn)
    for items, chosen in zip((excluded, *sets), drawn, strict=True):
        bitmap.add(items, chosen)
    boosts = Boosts.of_items(np.zeros(len(rows), np.float32))._replace(by_item=np.zeros(0, np.float32))
    if gains:
        boosts = Boosts.of_sets(sets, gains, len(rows))
    if by_item:
        boosts = boosts.plus(random.choice([-2.0, 0.0, 5.0], len(rows)).astype(np.float32))
    scores = np.maximum(counts, 0.5) * np.exp(boosts.of(rows))
    best_first = np.lexsort((rows, -scores))
    expected = best_first[~bitmap.has(excluded, best_first)][:k]
    popular_rows = np.lexsort((rows, -counts)).astype(np.int32)
    assert sorted(best_rows(counts, popular_rows, k, excluded, boosts).tolist()) == sorted(expected.tolist())


def test_boosts_order_items_that_nobody_has_chosen() -> None:
    items = ItemTable([*"abcd"], [*"abcd"], [("old",), (), ("new",), ("new", "late")], np.array([9, 0, 0, 0]))
    catalogue = TrainedCatalogue(items, CategoryColumn(items.categories, TextSetColumn(4)))
    for gain, expected in ((20.0, "dcab"), (0.7, "adcb")):
        boosts = catalogue.build_boosts({"new": gain, "late": 0.1})
        rows, scores = catalogue.popular_top_k(4, bitmap.empty(4), boosts)
        assert "".join(items.ids.at(rows)) == expected
        assert dict(zip(rows.tolist(), scores, strict=True))[1] == 0.5


def test_a_boost_that_matches_no_item_scores_few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [f"item-{row}" for row in range(MANY)]
    items = ItemTable(ids, ids, [()] * MANY, np.arange(MANY, dtype=np.int64))
    catalogue = TrainedCatalogue(items, CategoryColumn(items.categories, TextSetColumn(MANY)))
    boosted_counts, scored = catalogue.boosted_counts, list[int]()

    def noted(rows: Rows, boosts: Boosts | None) -> NDArray[np.float64]:
        scored.append(len(rows))
        return boosted_counts(rows, boosts)

    monkeypatch.setattr(catalogue, "boosted_counts", noted)
    rows, _ = catalogue.popular_top_k(3, bitmap.empty(MANY), catalogue.build_boosts({"none has it": 20.0}))
    assert rows.tolist() == [MANY - 1, MANY - 2, MANY - 3]
    assert sum(scored) == 3


def test_items_with_any_of_many_categories_equal_the_union() -> None:
    labels = [[f"c{row}", f"c{row + 1}"] if row % 3 else [] for row in range(200)]
    replaced = TextSetColumn(200)
    replaced.set(np.array([5, 7]), [["new"], ["c9"]])
    column = CategoryColumn(Labels.of(labels), replaced)
    names = [*column.labels.at(np.arange(len(column.labels)))]
    for wanted in (range(3, len(names)), range(40), [len(names) - 1]):
        is_wanted = np.isin(np.arange(len(names)), wanted)
        rows = bitmap.to_mask(column.rows_with_any(is_wanted), 200)
        chosen = {names[number] for number in wanted}
        assert rows.tolist() == [not chosen.isdisjoint(column.value(row)) for row in range(200)]


def get(client: Client, url: str) -> Any:
    response = client.get(url)
    assert response.status_code == 200
    return response.json()


def test_popular_items_over_http(shared_client: Client) -> None:
    answer = get(shared_client, f"/v1/items/popular?k={ITEMS + 1}")
    assert answer["generation"] == "tiny"
    scores = [item["score"] for item in answer["items"]]
    assert len(scores) == ITEMS
    assert scores == sorted(scores, reverse=True)
    assert get(shared_client, "/v1/items/popular")["items"] == answer["items"][:10]


def test_search_over_http(shared_client: Client) -> None:
    item: dict[str, Any] = {"item_id": "item-17", "title": "Green thing number 17", "categories": ["pot"]}
    item |= {"available": True, "known": True}
    assert get(shared_client, "/v1/items?query=green%20THING%20number%2017")["items"] == [item]
    assert len(get(shared_client, "/v1/items?query=thing&limit=3")["items"]) == 3
    assert len(get(shared_client, "/v1/items")["items"]) == 20
