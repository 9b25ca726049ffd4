"""Checks of the times and numbers in shops' tables: timestamps and values of events, properties of items."""

from __future__ import annotations

import time

import polars as pl

from model.data.exports.cells import (
    WITH_DECIMAL_COMMA,
    DecimalSign,
    amounts_in,
    looks_like_amounts,
    times_in,
)
from model.data.exports.examination import Examination
from model.data.exports.mapping import TableMapping
from model.data.table import INEXACT_TIMES, INEXACT_TIMES_FIX, LAST_SECOND

MAX_AHEAD_US = 5 * 60 * 1_000_000  # the service rejects events that are further ahead of its clock
FIRST_USUAL_US = 631_152_000 * 1_000_000  # 1990; other units, such as days of a spreadsheet, come before it
ZONE_FIX = "pass the time zone, such as --timezone Europe/Berlin or --timezone UTC"


def read_times(found: Examination, mapping: TableMapping) -> None:
    """Read the timestamps as the mapping says, and find cells that are none."""
    if found.dtypes.get("timestamp") == pl.Float32:
        found.note(f"timestamp is {INEXACT_TIMES}", INEXACT_TIMES_FIX, stops=True)
    cells = found.frame["timestamp"]
    times = times_in(cells, mapping.timezone)
    if mapping.timezone is None:
        found.find(times.by_no_clock, "timestamp has no time zone", ZONE_FIX, column="timestamp")
    else:
        problem = f"this timestamp does not exist in {mapping.timezone}: clocks skip it in spring"
        found.find(
            times.by_no_clock, problem, f"check the time zone, which may be UTC; {found.remedy}", column="timestamp"
        )
    found.find(
        times.either_way,
        "timestamp has an ambiguous day and month",
        "export the table with times such as 2025-12-24 18:30",
        column="timestamp",
    )
    found.find(
        times.us.is_null(),
        "timestamp is not a valid time",
        f"use Unix seconds, or times such as 2025-12-24 18:30; {found.remedy}",
        column="timestamp",
    )
    is_far = times.us.abs() > LAST_SECOND * 1_000_000
    found.find(
        is_far,
        "timestamp is after the year 9999",
        "the unit is seconds: divide milliseconds by 1,000",
        column="timestamp",
    )
    found.find(
        times.us < FIRST_USUAL_US,
        "timestamp is before 1990",
        "use Unix seconds, or times such as 2025-12-24 18:30; numbers that only give an order may stay",
        column="timestamp",
        stops=False,
    )
    found.find(
        times.us > time.time_ns() // 1_000 + MAX_AHEAD_US,
        "timestamp is in the future",
        "correct the clock or the time zone: training accepts these lines, but the service rejects them",
        column="timestamp",
        stops=False,
    )
    if not mapping.is_plain:
        found.set_column("timestamp", (times.us / 1e6).cast(pl.String))


def read_values(found: Examination, mapping: TableMapping) -> None:
    """Read the values as the mapping says, and find cells that are none, or negative."""
    cells = found.frame["value"].fill_null("")
    if mapping.decimal is None:
        numbers = cells.cast(pl.Float64, strict=False)
        numbers = numbers.set(~numbers.is_finite(), None)
        sign: DecimalSign = "," if cells.str.contains(WITH_DECIMAL_COMMA).any() else "."
        is_odd = (cells != "") & numbers.is_null()
        is_amount = is_odd & amounts_in(cells, sign).is_not_null()
        fix = f"pass the decimal separator: --decimal '{sign}', which also removes currencies and thousands separators"
        found.find(is_amount, "value is not a plain number", fix, column="value")
    else:
        numbers = amounts_in(cells, mapping.decimal)
    is_bad = (cells != "") & numbers.is_null()
    found.find(is_bad, "value is not a number", found.remedy, column="value")
    found.find(
        numbers < 0,
        "value is negative",
        "remove returns: training counts them as purchases, and the service rejects them",
        column="value",
        stops=False,
    )
    if mapping.decimal is not None:
        found.set_column("value", numbers.cast(pl.String))


def read_property(found: Examination, column: str, mapping: TableMapping) -> None:
    """Read a column that has only numbers or only times, as the mapping says."""
    cells = found.frame[column]
    known = (cells.fill_null("") != "") & ~found.bad  # a line that is left out decides nothing
    readable = cells.filter(known)
    if mapping.decimal is not None and looks_like_amounts(readable, mapping.decimal):
        found.set_column(column, amounts_in(cells, mapping.decimal).cast(pl.String))
    elif mapping.decimal is None and (looks_like_amounts(readable, ",") or looks_like_amounts(readable, ".")):
        numbers = cells.cast(pl.Float64, strict=False)
        sign = "," if looks_like_amounts(readable, ",") else "."
        problem = f"{column} becomes a text, because it has no plain numbers"
        found.find(
            known & numbers.is_null(),
            problem,
            f"pass the decimal separator: --decimal '{sign}'",
            column=column,
            stops=False,
        )
    elif (cells.cast(pl.Float64, strict=False).is_null() & known).any():
        _read_property_times(found, column, known, mapping)


def _read_property_times(found: Examination, column: str, known: pl.Series, mapping: TableMapping) -> None:
    times = times_in(found.frame[column], mapping.timezone)
    if (known & times.by_no_clock).any() and not (known & times.us.is_null() & ~times.by_no_clock).any():
        lacks = "no time zone" if mapping.timezone is None else f"times that do not exist in {mapping.timezone}"
        found.find(
            times.by_no_clock, f"{column} has {lacks}, so it becomes a text", ZONE_FIX, column=column, stops=False
        )
    elif mapping.timezone is not None and known.any() and not (known & times.us.is_null()).any():
        moments = times.us.cast(pl.Datetime("us", "UTC")).dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ")
        found.set_column(column, moments)
