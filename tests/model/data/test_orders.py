"""Orders: purchases of a user under one id, or within a time window."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.data.interactions import DataError, Interactions
from model.data.orders import NO_ORDER, WINDOW_S, order_numbers
from model.data.readers import read_interactions

COLUMNS = "user_id item_id timestamp type order_id"
rows_of = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.sampled_from("xyz"),
        st.integers(0, 20).map(lambda n: n * 1_000 + 7 * n * n),
        st.sampled_from(["purchase", "view"]),
        st.sampled_from(["", "", "o1", "o2"]),
    ),
    min_size=1,
    max_size=25,
)


def read(
    directory: Path, write_rows: Callable[..., Path], rows: list[tuple[Any, ...]], columns: str = COLUMNS
) -> Interactions:
    return read_interactions(write_rows(directory, rows, columns))


def orders_in(found: Interactions) -> set[frozenset[int]]:
    """Orders found, as sets of row numbers."""
    numbers = order_numbers(found)
    return {frozenset(np.flatnonzero(numbers == one).tolist()) for one in set(numbers.tolist()) - {NO_ORDER}}


@given(rows=rows_of)
@settings(max_examples=40)
def test_orders_equal_plain_grouping(
    rows: list[tuple[Any, ...]], tmp_path_factory: pytest.TempPathFactory, write_rows: Callable[..., Path]
) -> None:
    found = read(tmp_path_factory.mktemp("data"), write_rows, rows)
    if found.time_is_order:
        return
    in_order = sorted(enumerate(rows), key=lambda row: (found.user_ids.index(row[1][0]), row[1][2], row[0]))
    has_purchases = any(row[3] == "purchase" for row in rows)
    named: dict[tuple[str, str], set[int]] = defaultdict(set)
    windows: list[set[int]] = []
    before = ("", 0)
    for place, (_, (user, _, time_s, kind, order_id)) in enumerate(in_order):
        if has_purchases and kind != "purchase":
            continue
        if order_id:
            named[user, order_id].add(place)
            continue
        if before[0] != user or time_s - before[1] > WINDOW_S:
            windows.append(set())
        windows[-1].add(place)
        before = user, time_s
    assert orders_in(found) == {*map(frozenset, named.values()), *map(frozenset, windows)}


def test_purchases_exactly_a_window_apart_are_one_order(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    times_s = [5, 3_605, 7_206, 90_000]
    found = read(tmp_path, write_rows, [("a", "x", time_s) for time_s in times_s], "user_id item_id timestamp")
    assert orders_in(found) == {frozenset({0, 1}), frozenset({2}), frozenset({3})}


def test_ordinal_timestamps_have_no_window(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    rows = [("a", f"i{n}", n) for n in range(5)]
    found = read(tmp_path / "counted", write_rows, rows, "user_id item_id timestamp")
    assert not orders_in(found)
    with_ids = read(
        tmp_path / "named", write_rows, [(*row, "o1") for row in rows], "user_id item_id timestamp order_id"
    )
    assert orders_in(with_ids) == {frozenset(range(5))}


def test_order_ids_may_be_any_text_of_limited_length(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    columns = "user_id item_id timestamp order_id"
    assert orders_in(
        read(tmp_path / "odd", write_rows, [("a", "x", 5, "No. 7/ü"), ("a", "y", 90_000, "No. 7/ü")], columns)
    )
    with pytest.raises(DataError, match=r"line 2: order_id .* has more than 128"):
        read(tmp_path / "long", write_rows, [("a", "x", 5, "o" * 129)], columns)
