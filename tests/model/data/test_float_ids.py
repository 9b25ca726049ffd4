"""Ids and times stored as floats: exact integers are accepted, others refused, and texts noted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest

from model.data.arrays import IN_MEMORY, Arrays, MappedArrays
from model.data.exports.checks import examine, examine_items
from model.data.exports.examination import Finding
from model.data.exports.mapping import TableMapping
from model.data.interactions import DataError
from model.data.readers import read_interactions, read_item_table, read_items

NOW = 1_766_597_400
LOST = "a float that may have lost digits"


@pytest.fixture(params=["in memory", "mapped"])
def arrays(request: pytest.FixtureRequest, tmp_path: Path) -> Arrays:
    return IN_MEMORY if request.param == "in memory" else MappedArrays(tmp_path / "arrays", 1)


def write(directory: Path, **columns: Sequence[float | None] | pl.Series) -> pl.DataFrame:
    """Write two events with these columns."""
    usual = {"user_id": ["u", "v"], "item_id": ["i", "k"], "timestamp": [NOW, NOW + 1]}
    frame = pl.DataFrame(usual | columns)
    frame.write_parquet(directory / "interactions.parquet")
    return frame


def findings(directory: Path, frame: pl.DataFrame, column: str) -> list[Finding]:
    """Check the events with the column renamed."""
    table = directory / "export.parquet"
    frame.rename({column: "own"}).write_parquet(table)
    return examine(table, TableMapping({"own": column}))["interactions"].findings


def test_integral_floats_are_read_as_integers(arrays: Arrays, tmp_path: Path) -> None:
    write(tmp_path, user_id=[1.0, 2.0**53 - 1], item_id=[-7.0, 0.0], order_id=[1000.0, None], value=[1.0, 2.5])
    found = read_interactions(tmp_path, arrays)
    assert found.user_ids == ["1", "9007199254740991"]
    assert found.item_ids == ["-7", "0"]
    assert [found.order_id(row) for row in range(2)] == ["1000", None]
    assert list(found.value) == [1.0, 2.5]
    pl.DataFrame({"item_id": [5.0, 6.0], "title": [1984.0, None]}).write_parquet(tmp_path / "items.parquet")
    assert read_items(tmp_path).titles == {"5": "1984", "6": ""}


@pytest.mark.parametrize("odd", [2.0**53, 1.5, float("nan")])
@pytest.mark.parametrize("column", ["user_id", "item_id", "order_id"])
def test_other_floats_are_refused_as_ids(column: str, odd: float, arrays: Arrays, tmp_path: Path) -> None:
    frame = write(tmp_path, **{column: [1.0, odd]})
    reason = f"row 2: {column} '.*' is {LOST}; write ids as integers or texts"
    with pytest.raises(DataError, match=reason):
        read_interactions(tmp_path, arrays)
    (finding,) = findings(tmp_path, frame, column)
    assert (finding.problem, finding.count, finding.stops) == (f"{column} is {LOST}", 1, True)


def test_other_floats_are_refused_as_item_ids(tmp_path: Path) -> None:
    table = tmp_path / "items.parquet"
    pl.DataFrame({"item_id": [1.0, 2.0**53]}).write_parquet(table)
    with pytest.raises(DataError, match=f"row 2: item_id '9007199254740992.0' is {LOST}"):
        read_item_table(table)
    assert [finding.problem for finding in examine_items(table, TableMapping()).findings] == [f"item_id is {LOST}"]


def test_low_precision_floats_are_refused(arrays: Arrays, tmp_path: Path) -> None:
    equal = pl.Series([NOW, NOW + 1], dtype=pl.Float32)
    write(tmp_path, item_id=equal)
    with pytest.raises(DataError, match=f"row 1: item_id '1766597400.0' is {LOST}"):
        read_interactions(tmp_path, arrays)
    frame = write(tmp_path, timestamp=equal)
    with pytest.raises(DataError, match=r"timestamp is float32, .* are equal; write float64 or integers"):
        read_interactions(tmp_path, arrays)
    (finding,) = findings(tmp_path, frame, "timestamp")
    assert (finding.fix, finding.stops) == ("write float64 or integers", True)
    write(tmp_path, value=equal)
    assert len(read_interactions(tmp_path, arrays)) == 2


@pytest.mark.parametrize(
    ("user_ids", "noted"),
    [
        (["1.0", "2.0"], 2),
        (["1", "1.0"], 1),
        (["17", "1.2345678901234568e+16"], 1),  # of pandas
        (["4006380000000", "4,00638E+12"], 1),  # of a spreadsheet
        (["1,0", "2,0"], 2),
        (["1", "2"], 0),
        (["1.0", "1.1"], 0),
        (["1.0", "u"], 0),
    ],
)
def test_float_like_texts_are_kept_and_noted(user_ids: list[str], noted: int, tmp_path: Path) -> None:
    table = tmp_path / "interactions.tsv"
    rows = "".join(f"{user_id}\titem-1\t{NOW}\n" for user_id in user_ids)
    table.write_text(f"user_id\titem_id\ttimestamp\n{rows}")
    assert read_interactions(tmp_path).user_ids == user_ids
    found = examine(table, TableMapping())["interactions"].findings
    assert [(finding.count, finding.stops) for finding in found] == [(noted, False)] * bool(noted)
    assert all("user_id looks like an integer that was exported as a float" in finding.problem for finding in found)


def test_ids_with_lost_digits_are_reported(tmp_path: Path) -> None:
    table = tmp_path / "interactions.csv"
    table.write_text(f"user_id;item_id;timestamp\n1;7,10E+11;{NOW}\n2;7;{NOW}\n3,0;8;{NOW}\n")
    float_, rounded = examine(table, TableMapping())["interactions"].findings
    assert (float_.examples, "astype('Int64')" in float_.fix) == (["line 4: '3,0'"], True)
    assert (rounded.examples, "lost digits" in rounded.problem) == (["line 2: '7,10E+11'"], True)
    assert rounded.fix.startswith("export item_id anew, as text")


@pytest.mark.parametrize(
    ("of_events", "of_items"), [(["007", "a", "7x"], ["7", "x"]), (["7", "a", "07x"], ["007", "7x"])]
)
def test_lost_leading_zeros_are_reported(of_events: list[str], of_items: list[str], tmp_path: Path) -> None:
    lines = "".join(f"u,{item_id},{NOW}\n" for item_id in of_events)
    (tmp_path / "interactions.csv").write_text(f"user_id,item_id,timestamp\n{lines}")
    (tmp_path / "items.csv").write_text("item_id\n" + "\n".join(of_items) + "\n")
    zeros, unknown = examine(tmp_path, TableMapping())["interactions"].findings
    assert zeros.problem == "the item is in items.csv with other leading zeros"
    assert zeros.examples == [f"line 2: {of_events[0]!r}"]
    assert unknown.problem == "the item is not in items.csv"
    assert unknown.examples == [f"line {row}: {of_events[row - 2]!r}" for row in (3, 4)]
