"""Parquet tables: unread columns may have any type; an unsupported needed column is named."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from model.data.arrays import IN_MEMORY, Arrays, MappedArrays
from model.data.exports.checks import examine, examine_items
from model.data.exports.mapping import TableMapping
from model.data.interactions import DataError
from model.data.readers import read_interactions, read_item_table, read_items

LARGE_DATA = Path(__file__).parents[3] / "docs" / "how-to" / "models" / "train-on-large-data.md"
ODD = {"lists": [[3]], "bytes": [b"\xff"]}
NEITHER = "has neither numbers nor texts"


@pytest.fixture(params=["in memory", "mapped"])
def arrays(request: pytest.FixtureRequest, tmp_path: Path) -> Arrays:
    return IN_MEMORY if request.param == "in memory" else MappedArrays(tmp_path / "arrays", 8)


@pytest.mark.parametrize("name", ODD)
def test_an_unsupported_column_is_refused_only_if_events_need_it(name: str, arrays: Arrays, tmp_path: Path) -> None:
    frame = pl.DataFrame({"user_id": ["u"], "item_id": ["i"], "timestamp": [1], name: ODD[name]})
    frame.write_parquet(tmp_path / "interactions.parquet")
    assert read_interactions(tmp_path, arrays).item_ids == ["i"]
    frame.with_columns(user_id=name).write_parquet(tmp_path / "interactions.parquet")
    with pytest.raises(DataError, match=rf"interactions\.parquet: column 'user_id' {NEITHER}"):
        read_interactions(tmp_path, arrays)


@pytest.mark.parametrize("name", ODD)
def test_an_unsupported_column_is_refused_only_if_it_is_a_property(name: str, tmp_path: Path) -> None:
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
    with pytest.raises(DataError, match=r"items\.parquet: a text in column 'categories' has a |"):
        read_items(tmp_path)


def test_an_unknown_time_zone_is_reported(arrays: Arrays, tmp_path: Path) -> None:
    """pandas writes 2026-01-01T10:00:00+05:30 of an Indian shop like this."""
    table = tmp_path / "interactions.parquet"
    times = pl.Series([1], dtype=pl.Datetime("us", "Israel"))
    pl.DataFrame({"user_id": ["u"], "item_id": ["i"], "timestamp": times}).write_parquet(table)
    raw = table.read_bytes()
    (schema,) = re.findall(rb"[A-Za-z0-9+/=]{200,}", raw)
    table.write_bytes(raw.replace(schema, b64encode(b64decode(schema).replace(b"Israel", b"+05:30"))))
    for read in (lambda: read_interactions(tmp_path, arrays), lambda: examine(tmp_path, TableMapping())):
        with pytest.raises(DataError, match=r"interactions\.parquet .*unable to parse time zone: '\+05:30'"):
            read()


def test_the_documented_script_joins_the_files_of_a_warehouse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrays: Arrays
) -> None:
    monkeypatch.chdir(tmp_path)
    times = pl.Series("timestamp", [1_000_000, 2_000_000, 3_000_000])
    first = pl.DataFrame({"user_id": [1, 1, 2], "item_id": ["i", "j", "i"], "timestamp": times.cast(pl.Datetime("us"))})
    later = first.select(pl.col("user_id").cast(pl.String), "item_id", times.cast(pl.Datetime("ms", "Europe/Berlin")))
    later = later.with_columns(type=pl.lit("purchase"), value=pl.Series([5, 6, 7], dtype=pl.Decimal(8, 2)))
    for day, frame in enumerate((first, first[1:], first[:0], later)):
        (tmp_path / "export" / f"dt=2026-01-0{day + 1}").mkdir(parents=True)
        frame.write_parquet(tmp_path / "export" / f"dt=2026-01-0{day + 1}" / "part-0.parquet")
    (script,) = re.findall(r"^```python\n(.*?)^```", LARGE_DATA.read_text(), re.DOTALL | re.MULTILINE)
    exec(script, {})
    found = read_interactions(tmp_path / "shop", arrays)
    users, items = [found.user_ids[row] for row in found.user], [found.item_ids[row] for row in found.item]
    assert users == ["1", "1", "1", "1", "2", "2"]
    assert items == ["i", "j", "i", "j", "i", "i"]
    assert found.timestamp_us.tolist() == [10**6, 2 * 10**6, 10**9, 2 * 10**9, 3 * 10**6, 3 * 10**9]
    assert np.nansum(found.value) == 18
    later.with_columns(timestamp=pl.lit(1_700_000_000)).write_parquet(tmp_path / "export" / "unix-seconds.parquet")
    with pytest.raises(pl.exceptions.PolarsError):  # they must not become times in 1970
        exec(script, {})
