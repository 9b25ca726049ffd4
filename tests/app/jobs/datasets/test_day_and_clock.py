"""Dates and times of day in separate columns: `lisarec check` says how to join them, and they read like one column."""

from __future__ import annotations

import shlex
from datetime import date, time
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.jobs.datasets.mapped_copy import data_directory
from lisarec.tables import directory_of
from model.data.exports.mapping import TableMapping, parse_columns
from model.data.interactions import DataError
from model.data.readers import read_interactions
from tests.app.support import run_command

TABLE = "Kunde;Artikel;Datum;Uhrzeit\n7;12/3;24.12.2025;18:30\n7;12/4;24.12.2025;9:05:30\n8;12/3;25.12.2025;\n"
NAMES = "Kunde=user_id,Artikel=item_id"
TIMES = [1766597400.0, 1766563530.0, 1766617200.0]  # a day without a time begins at midnight


def checked(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = run_command("check", *arguments)
    said = capsys.readouterr()
    return status, said.out + said.err


def export(directory: Path, text: str = TABLE) -> Path:
    table = directory / "export.csv"
    table.write_bytes(text.encode("cp1252"))
    return table


def mapping(columns: str, timezone: str | None = "Europe/Berlin", *, skips: bool = False) -> TableMapping:
    return TableMapping(parse_columns([columns]), timezone, skips_bad_lines=skips)


def times_of(table: Path, columns: str, cache: Path) -> list[float]:
    directory, _ = data_directory(table, mapping(columns), cache)
    return [float(text) for text in pl.read_csv(directory / "interactions.csv")["timestamp"]]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.datetimes(), min_size=1, max_size=5),
    st.sampled_from(["%Y-%m-%d %H:%M:%S", "%d.%m.%Y %H:%M", "%Y/%m/%d %H:%M:%S", "%m/%d/%Y %H:%M", "%Y-%m-%d %H:%MZ"]),
    st.sampled_from(["Europe/Berlin", "UTC", None]),
)
def test_two_columns_read_like_one(tmp_path: Path, moments: list[object], form: str, timezone: str | None) -> None:
    whole = [format(moment, form) for moment in moments]
    halves = [text.split(" ") for text in whole]
    (tmp_path / "one.csv").write_text("user_id,item_id,when\n" + "".join(f"u,i,{text}\n" for text in whole))
    (tmp_path / "two.csv").write_text("user_id,item_id,day,time\n" + "".join(f"u,i,{a},{b}\n" for a, b in halves))

    def read(name: str, columns: str) -> object:
        try:
            directory, _ = data_directory(tmp_path / name, mapping(columns, timezone, skips=True), tmp_path / "cache")
        except DataError as exc:
            return str(exc).replace("two.csv", "one.csv")
        return read_interactions(directory).sha256

    assert read("two.csv", "day+time=timestamp") == read("one.csv", "when=timestamp")


def test_the_suggested_option_joins_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = export(tmp_path)
    status, said = checked(capsys, table)
    option = "--columns 'Kunde=user_id,Artikel=item_id,Datum+Uhrzeit=timestamp'"
    assert (status, option in said) == (1, True)
    status, said = checked(capsys, table, "--timezone", "Europe/Berlin", *shlex.split(option))
    assert status == 0
    assert "note" not in said
    (columns,) = shlex.split(option)[1:]
    assert times_of(table, columns, tmp_path / "cache") == TIMES
    assert f"--columns {columns} --timezone Europe/Berlin" in said  # of the next command
    with directory_of(table, {"columns": dict([pair.split("=") for pair in columns.split(",")]), "timezone": "UTC"}):
        pass


def test_numeric_days_need_a_time_zone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = export(tmp_path, "user_id,item_id,day,time\nu,i,20251224,18:30\nu,i,20251225,\n")
    columns = "day=timestamp"
    status, said = checked(capsys, table, "--columns", columns)
    assert (status, "timestamp has no time zone" in said) == (1, True)
    assert "--columns 'day+time=timestamp'" in said
    assert times_of(table, columns, tmp_path / "cache") == [1766530800.0, 1766617200.0]
    assert times_of(table, "day+time=timestamp", tmp_path / "cache") == [TIMES[0], TIMES[2]]


def test_times_in_another_unit_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = export(tmp_path, "user_id,item_id,timestamp\nu,i,46015\nu,i,46016\n")  # days of a spreadsheet
    status, said = checked(capsys, table)
    assert (status, "note: 2 lines: timestamp is before 1990 (line 2: '46015'; line 3: '46016')" in said) == (0, True)


def test_date_and_time_columns_are_distinguished_by_their_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for header in ("Customer,SKU,Time,Date", "Customer,SKU,Order Time,Order Date"):
        table = export(tmp_path, f"{header}\nu,i,18:30,2025-12-24\n")
        clock, day = header.split(",")[2:]
        assert f"--columns 'Customer=user_id,SKU=item_id,{day}+{clock}=timestamp'" in checked(capsys, table)[1]


@pytest.mark.parametrize(
    ("day", "clock", "is_noted"),
    [
        ("31.03.2024", "18:30", True),
        ("31.03.2024 18:30", "18:30", False),
        ("31.03.2024", "18", False),
        ("1711900000", "18:30", False),
    ],
)
def test_an_unmapped_time_column_is_noted_with_the_complete_mapping(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], day: str, clock: str, is_noted: bool
) -> None:
    table = export(tmp_path, f"Kunde,Artikel,Datum,Uhrzeit\nu,i,{day},{clock}\nu,j,{day},\n")
    status, said = checked(capsys, table, "--timezone", "UTC", "--columns", f"Datum=timestamp,{NAMES}")
    fix = "join both columns: --columns 'Datum+Uhrzeit=timestamp,Kunde=user_id,Artikel=item_id'"
    note = f"  note: the days of 'Datum' have no time, and 'Uhrzeit' has times -> {fix}\n"
    assert (status, note in said) == (0, is_noted)


def test_a_table_with_standard_names_gets_the_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = export(tmp_path, "user_id,item_id,timestamp,clock\nu,i,2025-12-24,18:30\n")
    assert "join both columns: --columns 'timestamp+clock=timestamp'" in checked(capsys, table)[1]
    assert times_of(table, "timestamp+clock=timestamp", tmp_path / "cache") == [1766597400.0]


@pytest.mark.parametrize("name", ["Datum+Uhrzeit", "Datum + Uhrzeit"])
def test_a_column_whose_name_contains_a_plus_takes_precedence(tmp_path: Path, name: str) -> None:
    table = export(tmp_path, f"Kunde;Artikel;Datum;Uhrzeit;{name}\nu;i;24.12.2025;09:00;24.12.2025 18:30\n")
    assert times_of(table, f"{NAMES},{name}=timestamp", tmp_path / "cache") == [1766597400.0]


def test_names_with_a_plus_can_be_joined_and_mapped(tmp_path: Path) -> None:
    table = export(tmp_path, "Kunde;Artikel;Tag+Monat+Jahr;Zeit;Preis+MwSt\nu;i;24.12.2025;18:30;5\n")
    columns = f"{NAMES},Tag+Monat+Jahr + Zeit=timestamp,Preis+MwSt=value"
    directory, _ = data_directory(table, mapping(columns), tmp_path / "cache")
    found = read_interactions(directory)
    assert (found.timestamp_us.tolist(), found.value.tolist()) == ([1766597400000000], [5.0])


def test_a_parquet_table_may_have_dates_and_times(tmp_path: Path) -> None:
    table = tmp_path / "export.parquet"
    pl.DataFrame({"user_id": ["u"], "item_id": ["i"], "day": [date(2025, 12, 24)], "at": [time(18, 30)]}).write_parquet(
        table
    )
    assert times_of(table, "day+at=timestamp", tmp_path / "cache") == [1766597400.0]


def test_a_repeated_header_and_a_bad_time_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = export(tmp_path, TABLE + "Kunde;Artikel;Datum;Uhrzeit\n8;12/3;25.12.2025;25:00\n8;12/3;;18:30\n")
    options = ("--columns", f"{NAMES},Datum+Uhrzeit=timestamp", "--timezone", "UTC")
    status, said = checked(capsys, table, *options)
    assert status == 1
    assert "1 line: the header is repeated (line 5)" in said
    assert "2 lines: timestamp is not a valid time (line 6: '25.12.2025 25:00'; line 7: '18:30')" in said
    status, said = checked(capsys, export(tmp_path, "Datum;" + TABLE.replace("\n", "\n;")), *options)
    assert (status, "column 'Datum' appears twice -> keep one of them" in said) == (1, True)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ("Datum+Uhrzeitt=timestamp", "no table has a column 'Uhrzeitt'; did you mean 'Uhrzeit'?"),
        ("Tag+Uhrzeit=timestamp", "no table has a column 'Tag'; existing columns: 'Kunde', 'Artikel', 'Datum'"),
        (
            "Datum+Uhrzeit+Artikel=timestamp",
            "a timestamp can be joined from two columns only: pass the day and its time, such as Datum+Artikel",
        ),
        (
            "Datum+Uhrzeit=user_id",
            "no table has this column, and only a timestamp can be joined from two; map one column to user_id",
        ),
    ],
)
def test_columns_that_cannot_be_joined_get_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], columns: str, problem: str
) -> None:
    status, said = checked(capsys, export(tmp_path), "--columns", columns)
    own = columns.partition("=")[0]
    assert status != 0
    assert f"--columns names {own!r}, but {problem}" in said


def test_columns_of_two_tables_are_not_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "interactions.csv").write_text("user_id,item_id,day\nu,i,2025-12-24\n")
    (tmp_path / "items.csv").write_text("item_id,clock\ni,18:30\n")
    status, said = checked(capsys, tmp_path, "--columns", "day+clock=timestamp")
    assert (status != 0, "but no table has both columns; both must be in the table of events" in said) == (True, True)


@pytest.mark.parametrize("midnight", ["", " 00:00", " 00:00:00", "T00:00:00", " 00:00:00.000"])
def test_a_date_column_may_contain_midnight(tmp_path: Path, midnight: str) -> None:
    table = export(tmp_path, f"Kunde;Artikel;Datum;Uhrzeit\n7;12/3;2025-12-24{midnight};18:30\n")
    assert times_of(table, f"{NAMES},Datum+Uhrzeit=timestamp", tmp_path / "cache") == TIMES[:1]
