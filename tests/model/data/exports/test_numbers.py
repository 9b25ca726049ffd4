"""Thousands and decimal separators; `lisarec check` reports ambiguous columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from model.data.exports.cells import DecimalSign
from model.data.exports.checks import examine, examine_items
from model.data.exports.examination import Examination
from model.data.exports.mapping import TableMapping
from model.data.readers import read_interactions

Check = Callable[[Path, Sequence[str], DecimalSign | None], Examination]


def items(directory: Path, cells: Sequence[str], decimal: DecimalSign | None) -> Examination:
    """Check a table of items with these prices."""
    table = directory / "items.csv"
    table.write_text("item_id;price\n" + "".join(f"i{row};{cell}\n" for row, cell in enumerate(cells)))
    return examine_items(table, TableMapping(decimal=decimal))


def events(directory: Path, cells: Sequence[str], decimal: DecimalSign | None) -> Examination:
    """Check a table of events with these values."""
    table = directory / "interactions.csv"
    lines = [f"u;i;{row};purchase;{cell}\n" for row, cell in enumerate(cells)]
    table.write_text("user_id;item_id;timestamp;type;value\n" + "".join(lines))
    return examine(table, TableMapping(decimal=decimal))["interactions"]


def problems(found: Examination) -> list[str]:
    return [one.problem for one in found.findings if "1990" not in one.problem]


@pytest.mark.parametrize(
    ("cells", "decimal", "expected"),
    [
        (["1.299", "990", "2.490"], ",", [1299, 990, 2490]),
        (["1,299", "990", "2,490"], ".", [1299, 990, 2490]),
        (["1.000.000", "990"], ",", [1_000_000, 990]),
        (["0.250", "1.500"], ",", [0.25, 1.5]),
        (["12.5", "1.299", "990"], ",", [12.5, 1.299, 990]),
        (["1.299", "12,50"], ",", [1299, 12.5]),
        (["1.299", "990"], None, [1.299, 990]),
        (["1e-05", "1.5", "2.5"], ".", [1e-05, 1.5, 2.5]),
    ],
)
def test_a_separator_means_thousands_if_it_does_in_all_cells(
    tmp_path: Path, cells: list[str], decimal: DecimalSign | None, expected: list[float]
) -> None:
    found = items(tmp_path, cells, decimal)
    assert found.frame["price"].cast(pl.Float64).to_list() == expected


@pytest.mark.parametrize("of", [items, events])
@pytest.mark.parametrize(
    ("cells", "decimal", "expected"),
    [
        (["1.299", "990"], ",", "has '.' only before three digits, so it separates thousands"),
        (["1.299 €", "990 €"], ",", "has '.' only before three digits, so it separates thousands"),
        (["1,299", "990"], ".", "has ',' only before three digits, so it separates thousands"),
        (["1.299", "990"], None, "has '.' only before three digits, and is read with decimals"),
        (["1.299", "12,50"], ",", ""),
        (["1.299", "1.299.000"], ",", ""),
        (["1,299", "1,23,456"], ".", ""),
        (["1.299", "12.5"], None, ""),
        (["1.299", "0.250"], None, ""),
        (["1299", "990"], None, ""),
    ],
)
def test_ambiguous_separators_are_noted(
    tmp_path: Path, of: Check, cells: list[str], decimal: DecimalSign | None, expected: str
) -> None:
    found = of(tmp_path, cells, decimal)
    (name,) = {"price", "value"} & {*found.frame.columns}
    assert problems(found) == [f"{name} {expected}"] * bool(expected)
    assert not found.bad.any()


@pytest.mark.parametrize(
    ("cells", "decimal"),
    [(["1.299 €", "990 €"], ","), (["$1,299", "$990"], "."), (["12,50", "7"], ","), (["1,299.00", "1,299"], ".")],
)
def test_the_suggested_option_reads_thousands(tmp_path: Path, cells: list[str], decimal: DecimalSign) -> None:
    for of in (items, events):
        fixes = [one.fix for one in of(tmp_path, cells, None).findings]
        assert [f"--decimal '{decimal}'" in fix for fix in fixes if "--decimal" in fix] == [True]


@pytest.mark.parametrize(
    ("cells", "decimal"),
    [
        (["2,91 €", "on request", "1.113,50 €", ""], ","),
        (["2.91", "on request", "1,113.50"], "."),
        (["12,50", "12.50", "7"], ","),
        (["12,50", "0.250", "7"], ","),
        (["4.50", "on request", "7"], None),
    ],
)
def test_a_cell_that_makes_a_column_text_is_named(
    tmp_path: Path, cells: list[str], decimal: DecimalSign | None
) -> None:
    found = items(tmp_path, cells, decimal)
    assert problems(found) == ["price becomes a text, because not all of its cells are numbers"]
    assert found.findings[0].examples == [f"line 3: {cells[1]!r}"]
    assert found.frame["price"].fill_null("").to_list() == cells


def test_an_odd_cell_does_not_hide_the_suggested_option(tmp_path: Path) -> None:
    plain, odd = items(tmp_path, ["2,91 €", "on request", "1.113,50 €"], None).findings
    assert (plain.count, "--decimal ','" in plain.fix) == (2, True)
    assert odd.examples == ["line 3: 'on request'"]


@pytest.mark.parametrize("cells", [["38", "38,5", "M", "L"], ["12", "13", "Euro pallet"], ["a", "b", "1,5"]])
def test_text_columns_get_no_note(tmp_path: Path, cells: list[str]) -> None:
    assert not items(tmp_path, cells, ",").findings


def test_numbers_with_leading_zeros_have_no_thousands(tmp_path: Path) -> None:
    found = events(tmp_path, ["12,50", "0.250"], ",")
    assert problems(found) == ["value is not a number"]
    assert found.findings[-1].examples == ["line 3: '0.250'"]


def test_numbers_of_parquet_are_unchanged(tmp_path: Path) -> None:
    numbers = [1.125, 465.21, None]
    pl.DataFrame({"item_id": ["a", "b", "c"], "price": numbers}).write_parquet(tmp_path / "items.parquet")
    usual = {"user_id": ["u"] * 3, "item_id": ["a"] * 3, "timestamp": [2e9, 2e9, 2e9]}
    pl.DataFrame({**usual, "value": numbers}).write_parquet(tmp_path / "interactions.parquet")
    for decimal in (",", ".", None):
        found = examine(tmp_path, TableMapping(timezone="UTC", decimal=decimal))
        for name, table in zip(("value", "price"), found.values(), strict=True):
            assert table.frame[name].cast(pl.Float64).to_list() == numbers
            assert not [one for one in problems(table) if name in one]


@pytest.mark.parametrize(
    ("cells", "decimal", "noted"),
    [
        (["2", "-1", "", "-3"], None, ["line 3", "line 5"]),
        (["2", "-1,5", "1.299"], ",", ["line 3"]),
        (["2", "-1,5", "1"], None, ["line 3"]),
        (["2", "€ 1", "-€ 1"], None, ["line 4"]),
        (["2", "1", "0"], None, []),
        (["-2", "-1", "0"], None, []),  # as degrees west
        (["a-1", "-1", "b", "c"], None, []),
        (["-", "2", "3"], None, []),
    ],
)
def test_lines_with_a_negative_quantity_are_noted(
    tmp_path: Path, cells: list[str], decimal: DecimalSign | None, noted: list[str]
) -> None:
    table = tmp_path / "interactions.csv"
    lines = [f"u;i{row};{row};{cell}\n" for row, cell in enumerate(cells)]
    table.write_text("user_id;item_id;timestamp;Quantity\n" + "".join(lines))
    found = examine(table, TableMapping(decimal=decimal))["interactions"]
    problem = "Quantity is negative, and is not read"
    assert [place for one in found.findings if one.problem == problem for place in one.examples] == noted
    assert len(found.good) == len(cells)


@pytest.mark.parametrize("name", ["lat", "geo.lon", "store_longitude", "Latitude "])
def test_coordinates_are_not_taken_for_returns(tmp_path: Path, name: str) -> None:
    table = tmp_path / "interactions.csv"
    table.write_text(f"user_id,item_id,timestamp,{name},plat\nu,i,1,-33.9,1\nu,j,2,52.5,-1\nu,k,3,52.5,1\n")
    assert [one for one in problems(examine(table, TableMapping())["interactions"]) if "negative" in one] == [
        "plat is negative, and is not read"
    ]


def test_returns_are_noted_once(tmp_path: Path) -> None:
    table = tmp_path / "interactions.csv"
    lines = ["2;3.5;7", "-1;-3.5;-3.5", "-1;3.5;-3.5", "1;3.5;3.5", "1;3.5;3.5"]
    header = "user_id;item_id;timestamp;Quantity;value;Sum\n"
    table.write_text(header + "".join(f"u;i;{row};{line}\n" for row, line in enumerate(lines)))
    found = examine(table, TableMapping())["interactions"]
    returns = [(one.problem, one.examples[0][:6]) for one in found.findings if "negative" in one.problem]
    assert returns == [("value is negative", "line 3"), ("Quantity is negative, and is not read", "line 4")]


@pytest.mark.parametrize("decimal", [None, "."])
def test_training_reads_a_number_with_spaces_that_a_check_accepts(tmp_path: Path, decimal: DecimalSign | None) -> None:
    assert not problems(events(tmp_path, [" 7 ", "  ", "8"], decimal))
    np.testing.assert_array_equal(read_interactions(tmp_path).value, [7, np.nan, 8])
