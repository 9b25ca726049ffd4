"""JSON tables, as lines or arrays, give the same table as Parquet."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.jobs.import_items import read
from model.data.arrays import IN_MEMORY, Arrays, MappedArrays
from model.data.exports.checks import examine, examine_items
from model.data.exports.mapping import TableMapping
from model.data.formats import json_records
from model.data.interactions import DataError
from model.data.readers import read_interactions, read_items
from tests.model.data.same_interactions import require_same

Records = list[dict[str, Any]]


def in_lines(records: Records) -> bytes:
    return "\n".join(json.dumps(record) for record in records).encode()


def in_an_array(records: Records) -> bytes:
    return json.dumps(records, indent=1).encode()


def zipped(records: Records) -> bytes:
    return gzip.compress(in_lines(records) + b"\n")


FORMS: dict[str, Callable[[Records], bytes]] = {
    ".jsonl": in_lines,
    ".json": in_an_array,
    ".jsonl.gz": zipped,
    ".json.gz": zipped,
}

ids = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=4).filter(lambda id_: id_.strip("."))
records_of_events = st.lists(
    st.fixed_dictionaries(
        {"user_id": ids, "item_id": st.one_of(ids, st.integers(0, 2**53)), "timestamp": st.integers(0, 2**31)},
        optional={"type": st.sampled_from(["view", "purchase"]), "value": st.floats(0, 1e6)},
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(records_of_events, st.sampled_from([*FORMS]), st.booleans())
def test_events_in_json_equal_parquet(
    tmp_path_factory: pytest.TempPathFactory, records: Records, suffix: str, is_mapped: bool
) -> None:
    directory = tmp_path_factory.mktemp("shop")
    arrays: Arrays = MappedArrays(directory / "arrays", 3) if is_mapped else IN_MEMORY
    columns = {name: [record.get(name) for record in records] for name in {name for one in records for name in one}}
    columns["item_id"] = [str(item_id) for item_id in columns["item_id"]]
    if "type" in columns:  # an empty one is refused
        records = [{"type": "click", **record} for record in records]
        columns["type"] = [record["type"] for record in records]
    (parquet := directory / "parquet").mkdir()
    pl.DataFrame(columns).write_parquet(parquet / "interactions.parquet")
    (directory / f"interactions{suffix}").write_bytes(FORMS[suffix](records))
    found = read_interactions(directory, arrays)
    require_same(found, replace(read_interactions(parquet), sha256=found.sha256))


@pytest.mark.parametrize("suffix", FORMS)
def test_lists_become_sets_and_nested_records_columns(suffix: str, tmp_path: Path) -> None:
    records: Records = [
        {"ItemId": "a", "Categories": ["Tea", "Green tea"], "Labels": {"brand": "Hill", "size": {"ml": 500}}},
        {"ItemId": "b", "Categories": None, "Labels": None, "On": True, "tags": ["new"]},
        {"ItemId": "c", "Categories": [], "tags": [], "parts": [{"name": "cup"}]},
    ]
    table = tmp_path / f"items{suffix}"
    table.write_bytes(FORMS[suffix](records))
    mapping = TableMapping(
        {"ItemId": "item_id", "Categories": "categories", "Labels.brand": "brand", "On": "available"}
    )
    found = examine_items(table, mapping)
    assert [finding.problem for finding in found.findings] == [
        "column 'parts' has neither numbers nor texts, and is not read"
    ]
    (tmp_path / "mapped").mkdir()
    found.good.write_csv(tmp_path / "mapped" / "items.csv")
    assert read(tmp_path / "mapped" / "items.csv", {}, mapping) == [
        {"item_id": "a", "categories": ["Tea", "Green tea"], "properties": {"brand": "Hill"}},
        {"item_id": "b", "available": True, "properties": {"tags": ["new"]}},
        {"item_id": "c"},
    ]


@pytest.mark.parametrize("suffix", FORMS)
def test_a_column_may_contain_only_empty_lists(suffix: str, tmp_path: Path) -> None:
    table = tmp_path / f"items{suffix}"
    table.write_bytes(FORMS[suffix]([{"item_id": "a", "categories": [], "tags": []}, {"item_id": "b", "tags": []}]))
    assert read(table, {}) == [{"item_id": "a"}, {"item_id": "b"}]
    assert read(table, {}, empty_removes=True) == [
        {"item_id": item_id, "categories": [], "properties": {"tags": None}} for item_id in ("a", "b")
    ]


def test_texts_that_look_like_json_stay_text(tmp_path: Path) -> None:
    table = tmp_path / "items.jsonl"
    table.write_bytes(in_lines([{"item_id": "a", "note": "[new] cup"}, {"item_id": "b", "note": "{}"}]))
    assert [item["properties"]["note"] for item in read(table, {})] == ["[new] cup", "{}"]


def test_a_vector_is_a_list_of_numbers(tmp_path: Path) -> None:
    table = tmp_path / "items.jsonl"
    table.write_bytes(in_lines([{"item_id": "a", "title": "A", "vector": [1, 0.5]}, {"item_id": "b"}]))
    assert read_items(tmp_path).titles == {"a": "A", "b": ""}
    with_vector, without = read(table, {})
    assert with_vector["vector"][1] / with_vector["vector"][0] == pytest.approx(0.5, abs=1e-3)
    assert "vector" not in without


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b'{"user_id": "u"}\n{"user_id":\n', "line 2: not a JSON record; write one a line, or an array of them"),
        (b'{"user_id": "u"}\n["u"]\n', "line 2: not a JSON record"),
        (b'{\n "user_id": "u"\n}\n', "line 1: not a JSON record"),
        (b'{"user_id": "\xff"}\n', "is not UTF-8 text; save it as UTF-8"),
        ('{"user_id": "u"}\n'.encode("utf-16"), "is not UTF-8 text; save it as UTF-8"),
        (b'{"user_id": "u", "value": NaN}\n', "is not JSON: it has NaN; write null"),
        (b'{"user_id": "u"}\n{"user_id": {"id": 1}}\n', "the field 'user_id' has both records and texts"),
        (b'[{"user_id": "u"}, {"user_id": {"id": 1}}]', "the field 'user_id' has both records and texts"),
        (b'{"a": {"tags": ["x"]}}\n{"a": {"tags": "y"}}\n', "the field 'a.tags' has both lists and texts"),
        (b'{"x": true}\n{"x": 1}\n', "the field 'x' has both booleans and numbers"),
        (b'[{"x": 1.5}, {"x": true}]', "the field 'x' has both booleans and numbers"),
        (b'[{"a": {"x": true}}, {"a": {"x": 1}}]', "the field 'a.x' has both booleans and numbers"),
        (b'[{"x": [2, true]}]', "the field 'x[]' has both booleans and numbers"),
        (b'{"x": [2]}\n{"x": [true]}\n', "the field 'x[]' has both booleans and numbers"),
        (b'[{"x": [{"y": 2}, {"y": false}]}]', "the field 'x[].y' has both booleans and numbers"),
        (b'{"x": [2, [3]]}', "the field 'x[]' has both lists and numbers"),
        (b'{"a.b": 1, "a": {"b": 2}}', "'a.b' is a column and a field of a record; rename one of them"),
        (b'{"a.b": {"c": 1}, "a": {"b": {"c": 2}}}', "'a.b' is a column and a field of a record"),
        (b'[{"user_id": "u"}, 3]', "row 2: not a JSON record"),
        (b'{"user_id": "u", "tags": ["a"]}\n{"tags": {"a": 1}}\n', "the field 'tags' has both lists and records"),
        (b'[{"tags": ["a"]}, {"tags": {"a": 1}}]', "the field 'tags' has both lists and records"),
        (b'[{"user_id": "u"}', "is not JSON"),
        (b"[]", "line 1: column 'user_id' is missing"),
        (b'{"user_id": "u", "item_id": 1.5, "timestamp": 1}', "row 1: item_id '1.5' is a float that may have lost"),
        (b'{"user_id": {"a": "u"}, "item_id": "i", "timestamp": 1}', "column 'user_id' is missing"),
        (b'{"user_id": ["u"], "item_id": "i", "timestamp": 1}', "column 'user_id' has neither numbers nor texts"),
        (b'{"user_id": [{"a": 1}], "item_id": "i", "timestamp": 1}', "column 'user_id' has neither numbers nor texts"),
        (b'{"user_id": "u", "item_id": "i", "timestamp": "noon"}', "row 1: timestamp 'noon'"),
    ],
)
def test_invalid_records_are_named(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "interactions.jsonl").write_bytes(content)
    for arrays in (IN_MEMORY, MappedArrays(tmp_path / "arrays", 1)):
        with pytest.raises(DataError, match=re.escape("interactions.jsonl")) as refused:
            read_interactions(tmp_path, arrays)
        assert says in str(refused.value)


def test_booleans_keep_their_type_in_mixed_columns(tmp_path: Path) -> None:
    records: Records = [
        {"item_id": "a", "new": True, "price": 1, "size": "L", "tags": ["x", True]},
        {"item_id": "b", "new": None, "price": 2.5, "size": True, "tags": None},
    ]
    for suffix in (".json", ".jsonl"):
        table = tmp_path / f"items{suffix}"
        table.write_bytes(FORMS[suffix](records))
        first, second = (item["properties"] for item in read(table, {}))
        assert first == {"new": True, "price": 1.0, "size": "L", "tags": ["x", "true"]}
        assert second == {"price": 2.5, "size": "true"}


def test_readable_lines_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's parser takes three times as long as polars's, which distinguishes booleans from numbers."""
    monkeypatch.setattr(json_records, "_first_problem", Mock(side_effect=AssertionError))
    content = in_lines([{"item_id": "a", "new": True, "price": 1}, {"item_id": "b", "new": False, "price": 2.5}])
    frame = json_records.json_records(tmp_path / "items.jsonl", content)
    assert frame["new"].to_list() == [True, False]


def test_a_check_reads_nested_fields(tmp_path: Path) -> None:
    (tmp_path / "events.json").write_bytes(b'{"who": {"id": 7}, "what": {"sku": "i"}, "at": 1700000000}\n')
    mapping = TableMapping({"who.id": "user_id", "what.sku": "item_id", "at": "timestamp"})
    found = examine(tmp_path / "events.json", mapping)["interactions"]
    assert not found.findings
    assert found.good.rows() == [("7", "i", "1700000000.0")]
    (tmp_path / "events.json").write_bytes(b'{"user_id": "u", "item_id": ["i"], "timestamp": 1700000000}\n')
    (finding,) = examine(tmp_path / "events.json", TableMapping())["interactions"].findings
    assert (finding.problem, finding.stops) == (
        "column 'item_id' has neither numbers nor texts, and is not read",
        True,
    )
