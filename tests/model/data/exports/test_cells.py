"""Times and numbers in the notations of other programs, against the standard library."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.data.exports.cells import DecimalSign, amounts_in, looks_like_amounts, looks_like_days, times_in
from model.data.exports.checks import examine
from model.data.exports.mapping import TableMapping
from model.data.readers import read_interactions
from model.data.table import LAST_SECOND, unix_times

EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
FORMATS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%d.%m.%Y %H:%M:%S", "%Y/%m/%d %H:%M:%S")
AMERICAN, BRITISH = "%m/%d/%Y %H:%M:%S", "%d/%m/%Y %H:%M:%S"


def micros(time: datetime) -> int:
    return (time - EPOCH) // timedelta(microseconds=1)


@settings(max_examples=40)
@given(
    st.lists(st.datetimes(datetime(1971, 1, 1), datetime(2037, 1, 1)), min_size=1, max_size=4),
    st.sampled_from(["Europe/Berlin", "America/New_York", "UTC", "Asia/Kolkata"]),
    st.sampled_from([*FORMATS, AMERICAN, BRITISH]),
)
def test_local_times_equal_the_standard_library(times: list[datetime], timezone: str, pattern: str) -> None:
    zone = ZoneInfo(timezone)
    times = [datetime(2025, 12, 24, 18, 30), *(time.replace(microsecond=0, fold=0) for time in times)]
    texts = pl.Series([time.strftime(pattern) for time in times], dtype=pl.String)
    found = times_in(texts, timezone)
    for time, us in zip(times, found.us.to_list(), strict=True):
        local = time.replace(tzinfo=zone)
        exists = local.astimezone(ZoneInfo("UTC")).astimezone(zone).replace(tzinfo=None) == time
        assert us == (micros(local) if exists else None)
    unknown = times_in(texts, None)
    assert unknown.us.null_count() == len(times)
    assert unknown.by_no_clock.to_list() == [True] * len(times)
    assert found.by_no_clock.to_list() == found.us.is_null().to_list()


@pytest.mark.parametrize("timezone", ["Africa/Cairo", "America/Santiago", "America/Havana", "Asia/Beirut", "UTC"])
@pytest.mark.parametrize("pattern", ["%Y-%m-%d", "%d.%m.%Y", "%Y%m%d", "%Y-%m-%d 00:00:00"])
def test_a_day_begins_at_its_first_moment_also_where_clocks_skip_midnight(timezone: str, pattern: str) -> None:
    first = datetime(2025, 1, 1, tzinfo=UTC)
    hours = [first + timedelta(hours=n) for n in range(-24, 366 * 24)]
    begin_of: dict[str, datetime] = {}
    for hour in hours:
        begin_of.setdefault(hour.astimezone(ZoneInfo(timezone)).strftime(pattern), hour)
    days = [(first + timedelta(days=n)).strftime(pattern) for n in range(365)]
    found = times_in(pl.Series(days), timezone)
    assert found.us.to_list() == [micros(begin_of[day]) for day in days]
    assert not found.by_no_clock.any()


@pytest.mark.parametrize("ending", ["", ".0"])
def test_numbers_are_dates_only_if_all_of_them_can_be(ending: str) -> None:
    days = [f"20251224{ending}", f"20240229{ending}"]
    found = times_in(pl.Series([*days, "", "noon", f"20250230{ending}"]), "Europe/Berlin")
    expected = [micros(datetime.fromisoformat(f"{day}T00:00:00+01:00")) for day in ("2025-12-24", "2024-02-29")]
    assert found.us.to_list() == [*expected, None, None, None]
    assert times_in(pl.Series(days), None).by_no_clock.all()
    assert looks_like_days(pl.Series(days))
    mixed = times_in(pl.Series([*days, "1751360700"]), "Europe/Berlin")
    assert mixed.us.to_list() == [20_251_224_000_000, 20_240_229_000_000, 1_751_360_700_000_000]


def test_a_compact_day_may_have_a_time() -> None:
    found = times_in(pl.Series(["20251224 18:30", "20250701 9:05:01"]), "Europe/Berlin")
    expected = ("2025-12-24T18:30:00+01:00", "2025-07-01T09:05:01+02:00")
    assert found.us.to_list() == [micros(datetime.fromisoformat(time)) for time in expected]


@pytest.mark.parametrize("ending", ["", ".0"])
def test_a_compact_local_time_is_not_a_unix_time(ending: str) -> None:
    cells = pl.Series([f"20251224183001{ending}", f"202507010905{ending}", "1751360700", f"20251224183001123{ending}"])
    found = times_in(cells, "Europe/Berlin")
    expected = ("2025-12-24T18:30:01+01:00", "2025-07-01T09:05:00+02:00", "2025-07-01T09:05:00+00:00")
    assert found.us.to_list() == [*(micros(datetime.fromisoformat(time)) for time in expected), None]
    assert times_in(cells, None).by_no_clock.to_list() == [True, True, False, False]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24.12.2025 18:30", "2025-12-24T18:30:00+01:00"),
        ("1.7.2025 9:05", "2025-07-01T09:05:00+02:00"),
        ("2025-07-01", "2025-07-01T00:00:00+02:00"),
        ("01.07.2025", "2025-07-01T00:00:00+02:00"),
        (" 2025-07-01 09:05:00.25 ", "2025-07-01T09:05:00.250+02:00"),
        ("2025-07-01T09:05:00Z", "2025-07-01T09:05:00+00:00"),
        ("2025-07-01 09:05:00+05:30", "2025-07-01T09:05:00+05:30"),
        ("2025-07-01T09:05+05:30", "2025-07-01T09:05:00+05:30"),
        ("2025-07-01 09:05 +0530", "2025-07-01T09:05:00+05:30"),
        ("2025-07-01T09:05:00.5-03", "2025-07-01T09:05:00.500-03:00"),
        ("2025-07-01T09:05Z", "2025-07-01T09:05:00+00:00"),
        ("1751360700.5", "2025-07-01T09:05:00.500+00:00"),
        ("12/24/2025 6:30 PM", "2025-12-24T18:30:00+01:00"),
        ("24.12.2025 6:30:05 a.m.", "2025-12-24T06:30:05+01:00"),
        ("2025-12-24, 12:05am", "2025-12-24T00:05:00+01:00"),
        ("24-12-2025 12:05 pm", "2025-12-24T12:05:00+01:00"),
        ("26.10.2025 02:30", "2025-10-26T02:30:00+02:00"),
    ],
)
def test_all_notations_of_times(text: str, expected: str) -> None:
    found = times_in(pl.Series([text, "noon", "00.00.0000", "31.02.2025 10:00", "", None]), "Europe/Berlin")
    assert found.us.to_list() == [micros(datetime.fromisoformat(expected)), *[None] * 5]
    assert not found.by_no_clock.any()


@pytest.mark.parametrize(
    "text",
    ["2025-07-01T09:05Z", "2025-07-01 09:05:00+05:30", "2025-07-01T09:05+0530", "2025-07-01 09:05 -03", "1751360700"],
)
def test_training_reads_each_time_with_a_zone_that_a_check_accepts(tmp_path: Path, text: str) -> None:
    (tmp_path / "interactions.csv").write_text(f"user_id,item_id,timestamp\nann,tea-2,{text}\nann,cup-1,1\n")
    assert not examine(tmp_path, TableMapping())["interactions"].bad.any()
    expected = times_in(pl.Series([text]), None).us[0]
    assert read_interactions(tmp_path).timestamp_us.tolist() == [1_000_000, expected]


def test_dates_with_dashes_are_parsed_like_those_with_slashes() -> None:
    indian = times_in(pl.Series(["24-12-2025 18:30", "3-1-2026 9:05"]), "Asia/Kolkata")
    expected = ("2025-12-24T18:30:00+05:30", "2026-01-03T09:05:00+05:30")
    assert indian.us.to_list() == [micros(datetime.fromisoformat(time)) for time in expected]
    assert times_in(pl.Series(["03-04-2025", "05-04-2025"]), "UTC").either_way.all()


def test_the_whole_column_decides_the_order_of_day_and_month() -> None:
    both = times_in(pl.Series(["03/04/2025", "25/04/2025"]), "UTC")
    assert both.us.to_list() == [
        micros(datetime.fromisoformat(f"2025-04-{day}T00:00:00+00:00")) for day in ("03", "25")
    ]
    neither = times_in(pl.Series(["03/04/2025", "05/04/2025", "2025-04-03"]), "UTC")
    assert neither.us.is_null().to_list() == [True, True, False]
    assert neither.either_way.to_list() == [True, True, False]
    assert neither.both_orders is both.both_orders is None


def test_a_check_names_a_cell_of_each_order(tmp_path: Path) -> None:
    cells = ["03/04/2026", "13/04/2026", "04/13/2026"]
    lines = [f"ann,tea-2,{cell}\n" for cell in cells]
    (tmp_path / "interactions.csv").write_text("user_id,item_id,timestamp\n" + "".join(lines))
    (found,) = examine(tmp_path, TableMapping(timezone="UTC"))["interactions"].findings
    assert "'13/04/2026' begins with the day, and '04/13/2026' with the month" in found.problem
    assert found.count == 2


def test_a_column_with_both_orders_only_resolves_days_above_12() -> None:
    cells = ["24-12-2025", "12/24/2025", "03/04/2025", "3-4-2025 18:30", "2025-04-03", "24.12.2025", "03.04.2025"]
    found = times_in(pl.Series(cells), "UTC")
    assert found.either_way.to_list() == [False, True, True, True, False, False, False]
    assert found.both_orders == ("24-12-2025", "12/24/2025")
    christmas, april = (micros(datetime.fromisoformat(f"{day}T00:00:00+00:00")) for day in ("2025-12-24", "2025-04-03"))
    assert found.us.to_list() == [christmas, None, None, None, april, christmas, april]


@settings(max_examples=60)
@given(
    st.integers(-(10**9), 10**9),
    st.sampled_from([",", "."]),
    st.sampled_from(["{}", "{} €", "€{}", "EUR {}", "${}", "{}\u00a0CHF"]),
    st.booleans(),
)
def test_amounts_ignore_surrounding_text(cents: int, decimal: DecimalSign, pattern: str, is_grouped: bool) -> None:
    plain = f"{cents / 100:,.2f}" if is_grouped else f"{cents / 100:.2f}"
    text = plain if decimal == "." else plain.translate(str.maketrans(",.", ".,"))
    cells = pl.Series([pattern.format(text), "ten", "", None])
    assert amounts_in(cells, decimal).to_list() == [pytest.approx(cents / 100), None, None, None]


@pytest.mark.parametrize(
    ("text", "decimal", "expected"),
    [
        ("₹1,23,456.50", ".", 123_456.5),
        ("Rs. 12,34,567", ".", 1_234_567),
        ("\uffe51,200", ".", 1_200),
        ("\\1,200", ".", 1_200),
        ("1,200円", ".", 1_200),
        ("₪1,299.50", ".", 1_299.5),
        ("₺1.299,50", ",", 1_299.5),
        ("1.299,50 TL", ",", 1_299.5),
        ("1\u00a0299,50 zł", ",", 1_299.5),
        ("1.299,00 kr.", ",", 1_299),
        ("1,2,345", ".", None),
        ("1,23", ".", None),
        ("12 XL", ".", None),
        ("kr 1 299,50", ",", 1_299.5),
        ("- ₺5", ",", -5),
        ("$ -5", ".", -5),
        ("1€20", ",", None),
        ("10kr5", ",", None),
        ("12\\34", ".", None),
        ("TL100", ",", None),
        ("KR-100", ".", None),
        ("12.34.567", ",", None),
    ],
)
def test_amounts_in_other_locales(text: str, decimal: DecimalSign, expected: float | None) -> None:
    cells = pl.Series([text])
    assert amounts_in(cells, decimal).to_list() == [expected]
    assert looks_like_amounts(cells, decimal) == (expected is not None)


@pytest.mark.parametrize(
    ("cells", "decimal", "expected"),
    [
        (["12,50", "7", ""], ",", True),
        (["12.50", "7"], ",", False),
        (["007", "1234"], ",", False),
        (["1.299 €"], ",", True),
        (["1 299,00", "5,00"], ",", True),
        (["1 299", "12\u00a0500", "90"], ",", True),
        (["978 3 16 148410 0"], ",", False),
        (["007 12", "8 13"], ".", False),
        (["Salt, fine"], ",", False),
        (["", None], ",", False),
    ],
)
def test_codes_and_texts_are_not_amounts(cells: list[str | None], decimal: DecimalSign, expected: bool) -> None:
    assert looks_like_amounts(pl.Series(cells, dtype=pl.String), decimal) == expected


def test_out_of_range_times_are_distinguished_from_texts(tmp_path: Path) -> None:
    table = tmp_path / "interactions.csv"
    table.write_text("user_id,item_id,timestamp\nu,i,1700000000000000\nu,i,3e20\nu,i,-3e20\nu,i,soon\n")
    found = examine(table, TableMapping()).popitem()[1].findings
    assert [(finding.problem, finding.count) for finding in found if finding.count] == [
        ("timestamp is not a valid time", 1),
        ("timestamp is after the year 9999", 2),
    ]


seconds_since_2001 = st.integers(10**9, LAST_SECOND).filter(lambda second: str(second)[:2] not in ("19", "20"))


@given(st.one_of(st.integers(-(10**11), -(10**9)), seconds_since_2001), st.sampled_from([1_000, 10**6, 10**9]))
def test_unix_times_in_any_unit_are_equal(second: int, parts: int) -> None:
    """From 2001 on and before 1938, up to the precision of a float64: numbers between are seconds in every unit.

    Numbers that begin with 19 or 20 may be local times, such as 20251224183000.
    """
    cells = pl.Series([str(second), str(second * parts)])
    seconds, smaller = unix_times(cells).to_list()
    assert seconds == second * 10**6
    assert smaller == pytest.approx(seconds, abs=1 + abs(seconds) * 2**-52)
