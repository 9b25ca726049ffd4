"""The most popular items under boosts: those that a sort of all items finds, without a sort of all items."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.catalogue.boosted_counts import best_rows
from app.catalogue.category_column import CategoryColumn
from app.catalogue.expressions.set_columns import TextSetColumn
from app.catalogue.trained_catalogue import Rows, TrainedCatalogue
from model.artifact.item_table import ItemTable
from model.inference import bitmap
from model.inference.scan import Boosts

MANY = 5_000
GAINS = st.sampled_from([-20.0, -1.0, 0.5, 3.0, 20.0])


@given(
    st.lists(st.integers(0, 5) | st.integers(0, 5_000), min_size=1, max_size=150),
    st.lists(GAINS, max_size=4),
    st.integers(0, 2**32 - 1),
    st.integers(0, 160),
    st.booleans(),
)
def test_they_are_those_of_a_sort(counted: list[int], gains: list[float], seed: int, k: int, by_item: bool) -> None:
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
    scores = counts * np.exp(boosts.of(rows))
    best_first = np.lexsort((rows, -scores))
    expected = best_first[~bitmap.has(excluded, best_first)][:k]
    popular_rows = np.lexsort((rows, -counts)).astype(np.int32)
    assert sorted(best_rows(counts, popular_rows, k, excluded, boosts).tolist()) == sorted(expected.tolist())


def test_a_boost_of_no_item_scores_few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [f"item-{row}" for row in range(MANY)]
    items = ItemTable(ids, ids, [()] * MANY, np.arange(MANY, dtype=np.int64))
    catalogue = TrainedCatalogue(items, CategoryColumn(items.categories, TextSetColumn(MANY)))
    boosted_counts, scored = catalogue.boosted_counts, list[int]()

    def noted(rows: Rows, boosts: Boosts | None) -> np.ndarray:
        scored.append(len(rows))
        return boosted_counts(rows, boosts)

    monkeypatch.setattr(catalogue, "boosted_counts", noted)
    rows, _ = catalogue.popular_top_k(3, bitmap.empty(MANY), catalogue.build_boosts({"none has it": 20.0}))
    assert rows.tolist() == [MANY - 1, MANY - 2, MANY - 3]
    assert sum(scored) == 3
