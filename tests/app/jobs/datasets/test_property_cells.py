"""Types of properties by the cells of an imported table, and warnings of cells of another type."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.jobs.import_items import TIME, column_type, read
from storage.records import PropertyType

CELLS = st.sampled_from(["", "true", "False", "1", "-2.5e3", "007", "a|b", "a", "2026-05-01T08:00:00Z", "2026-05-01"])


@given(st.lists(CELLS, min_size=1, max_size=4))
def test_an_inferred_type_fits_every_cell(cells: list[str]) -> None:
    found, known = column_type(pl.Series(cells)), {cell for cell in cells if cell}
    fitting = {
        "boolean": known <= {"true", "False"},
        "number": known <= {"1", "-2.5e3"},
        "time": known <= {"2026-05-01T08:00:00Z"},
        "set": any("|" in cell for cell in known),
        "text": True,
    }
    assert found == next(type_ for type_, fits in fitting.items() if fits)


def test_a_range_of_hours_is_no_time_with_a_zone(tmp_path: Path) -> None:
    cells = ["2026-11-30 18:30-20:00", "2026-12-01 09:00 -12:30", "2026-12-01T09:00-1630"]
    (tmp_path / "items.csv").write_text(
        "item_id,open\n" + "".join(f"i{row},{cell}\n" for row, cell in enumerate(cells))
    )
    assert [item["properties"]["open"] for item in read(tmp_path / "items.csv", {})] == cells


def test_times_with_a_zone_are_sent_in_the_format_of_the_service(tmp_path: Path) -> None:
    times = ["2026-11-30T10:00+05:30", "2026-11-30 10:00:00.25 +0530", "2026-11-30T04:30Z", "2026-11-30T10:00:00+05"]
    lines = [f"{number},{text},{text},|{text}" for number, text in enumerate(times)]
    (tmp_path / "items.csv").write_text("\n".join(["item_id,made,available_from,code", *lines]) + "\n")
    for item, text in zip(read(tmp_path / "items.csv", {"code": "text"}), times, strict=True):
        sent = item["properties"]["made"]
        assert re.search(TIME, sent) is not None
        assert datetime.fromisoformat(sent) == datetime.fromisoformat(text.replace(" +", "+"))
        assert (item["available_from"], item["properties"]["code"]) == (sent, f"|{text}")


@pytest.mark.parametrize(
    ("cells", "type_", "values"),
    [
        (["7", " 7 ", "8"], "number", [7.0, 7.0, 8.0]),
        ([" -2.5e3", "  ", ""], "number", [-2500.0, None, None]),
        (["true", " FALSE"], "boolean", [True, False]),
        ([" 2026-05-01 08:00Z", "2026-05-01T08:00:00Z "], "time", ["2026-05-01T08:00:00Z"] * 2),
        ([" Hill", "  ", "7"], "text", [" Hill", "  ", "7"]),
    ],
)
def test_spaces_around_cells_count_only_in_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cells: list[str], type_: PropertyType, values: list[Any]
) -> None:
    file = tmp_path / "items.csv"
    file.write_text("item_id,cell\n" + "".join(f"i{row},{cell}\n" for row, cell in enumerate(cells)))
    for declared in ({}, {"cell": type_}):
        assert [item.get("properties", {}).get("cell") for item in read(file, declared)] == values
    assert not caplog.messages


@pytest.mark.parametrize(
    ("cells", "warned"),
    [
        (
            ["4.5", "1,299.00", "", "22"],
            "column price is not a number, because row 2 has '1,299.00' (this affects 1 of 3 cells)",
        ),
        (
            ["2,91 €", "on request", "1.113,50 €", ""],
            "column price is not a number, because row 2 has 'on request' (this affects 1 of 3 cells)",
        ),
        (["2,91 €", "1.113,50 €"], "because row 1 has '2,91 €' (this affects 2 of 2 cells)"),
        (["2,91 €", "1.113,50 €"], "If it should be one, pass --decimal ',' and import again; if the service"),
        (["2,91 €", "1.113,50 €"], "if the service already has it as another type, first delete its values"),
        (["4.5", "22"], None),
        (["007", "0815"], None),
        (["red", "blue", "7"], None),
        (
            ["15.07.2025", "", "16.07.2025"],
            "column price is not a time, because row 1 has '15.07.2025' (this affects 2 of 2 cells)",
        ),
        (
            ["2025-07-15 10:00", "2025-07-15T10:00:00Z"],
            "not a time, because row 1 has '2025-07-15 10:00' (this affects 1 of 2 cells)",
        ),
        (["2025-07-15T10:00:00", "7/5/2025 9:30 pm", "soon"], "such as 2025-07-15T10:00:00+02:00"),
        (["2025-07-15T10:00:00Z", "2025-07-15 10:00:00.5+02:00"], None),
        (["7", " 8", "on request"], "row 3 has 'on request' (this affects 1 of 3 cells)"),
        (["1.10.2", "10.2.11", "2025"], None),
    ],
)
def test_a_few_cells_of_another_type_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cells: list[str], warned: str | None
) -> None:
    file = tmp_path / "items.tsv"
    file.write_text("item_id\tprice\n" + "".join(f"{place}\t{cell}\n" for place, cell in enumerate(cells)))
    read(file, {})
    assert (warned is None) == (not caplog.messages)
    assert warned is None or warned in caplog.text
    caplog.clear()
    if warned is None:
        return
    read(file, {"price": "text"})
    assert not caplog.messages
