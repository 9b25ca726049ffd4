"""Parquet tables: columns that nobody reads may hold anything, and one that is needed is named."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from pathlib import Path

import polars as pl
import pytest

from model.data.arrays import IN_MEMORY, Arrays, MappedArrays
from model.data.exports.checks import examine, examine_items
from model.data.exports.mapping import TableMapping
from model.data.interactions import DataError
from model.data.readers import read_interactions, read_item_table, read_items

ODD = {"lists": [["x"]], "bytes": [b"\xff"]}
NEITHER = "has neither numbers nor texts"


@pytest.fixture(params=["in memory", "mapped"])
def arrays(request: pytest.FixtureRequest, tmp_path: Path) -> Arrays:
    return IN_MEMORY if request.param == "in memory" else MappedArrays(tmp_path / "arrays", 8)


@pytest.mark.parametrize("name", ODD)
def test_an_odd_column_is_refused_only_where_events_need_it(name: str, arrays: Arrays, tmp_path: Path) -> None:
    frame = pl.DataFrame({"user_id": ["u"], "item_id": ["i"], "timestamp": [1], name: ODD[name]})
    frame.write_parquet(tmp_path / "interactions.parquet")
    assert read_interactions(tmp_path, arrays).item_ids == ["i"]
    frame.with_columns(user_id=name).write_parquet(tmp_path / "interactions.parquet")
    with pytest.raises(DataError, match=rf"interactions\.parquet: column 'user_id' {NEITHER}"):
        read_interactions(tmp_path, arrays)


@pytest.mark.parametrize("name", ODD)
def test_an_odd_column_is_refused_only_where_items_have_it_as_a_property(name: str, tmp_path: Path) -> None:
    table = tmp_path / "items.parquet"
    pl.DataFrame({"item_id": ["i"], "title": ["I"], name: ODD[name]}).write_parquet(table)
    assert read_items(tmp_path).titles == {"i": "I"}
    with pytest.raises(DataError, match=rf"items\.parquet: column '{name}' {NEITHER}"):
        read_item_table(table, has_properties=True)
    found = examine_items(table, TableMapping())
    assert [finding.problem for finding in found.findings] == [f"column {name!r} {NEITHER}, and is not read"]
    assert found.frame.columns == ["item_id", "title"]


@pytest.mark.parametrize("name", ["title", "categories", "available"])
def test_a_column_that_stops_a_training_stops_its_check(name: str, tmp_path: Path) -> None:
    pl.DataFrame({"user_id": ["u"], "item_id": ["i"], "timestamp": [1]}).write_parquet(
        tmp_path / "interactions.parquet"
    )
    pl.DataFrame({"item_id": ["i"], name: [[{"text": "x"}]]}).write_parquet(tmp_path / "items.parquet")
    with pytest.raises(DataError, match=f"column '{name}' {NEITHER}"):
        read_items(tmp_path)
    assert examine(tmp_path, TableMapping())["items"].stops


def test_categories_may_be_lists_of_texts(tmp_path: Path) -> None:
    table, lists = tmp_path / "items.parquet", [["Tea", "Green tea"], [], None, [None, " Tea "]]
    pl.DataFrame({"item_id": ["a", "b", "c", "d"], "categories": lists}).write_parquet(table)
    assert [*read_items(tmp_path).categories.values()] == [("Tea", "Green tea"), (), (), ("Tea",)]
    assert examine_items(table, TableMapping()).findings == []
    pl.DataFrame({"item_id": ["a"], "categories": [["Tea|Coffee"]]}).write_parquet(table)
    with pytest.raises(DataError, match=r"items\.parquet: a category in column 'categories' has a |"):
        read_items(tmp_path)


def test_a_zone_that_polars_cannot_read_is_an_error_message(arrays: Arrays, tmp_path: Path) -> None:
    """Of an Indian shop, as pandas writes 2026-01-01T10:00:00+05:30."""
    table = tmp_path / "interactions.parquet"
    times = pl.Series([1], dtype=pl.Datetime("us", "Israel"))
    pl.DataFrame({"user_id": ["u"], "item_id": ["i"], "timestamp": times}).write_parquet(table)
    raw = table.read_bytes()
    (schema,) = re.findall(rb"[A-Za-z0-9+/=]{200,}", raw)
    table.write_bytes(raw.replace(schema, b64encode(b64decode(schema).replace(b"Israel", b"+05:30"))))
    for read in (lambda: read_interactions(tmp_path, arrays), lambda: examine(tmp_path, TableMapping())):
        with pytest.raises(DataError, match=r"interactions\.parquet .*unable to parse time zone: '\+05:30'"):
            read()
