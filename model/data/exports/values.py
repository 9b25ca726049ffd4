"""Checks of the times and numbers in shops' tables: timestamps and values of events, properties of items."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

import polars as pl

from model.data.exports.cells import (
    DecimalSign,
    amounts_in,
    are_numbers_of_times,
    likely_decimal,
    looks_like_amounts,
    perhaps_thousands,
    times_in,
)
from model.data.exports.examination import Examination
from model.data.exports.mapping import TableMapping
from model.data.table import INEXACT_TIMES, INEXACT_TIMES_FIX, LAST_SECOND, rfc_3339

MAX_AHEAD_US = 5 * 60 * 1_000_000  # the service rejects events that are further ahead of its clock
FIRST_USUAL_US = 631_152_000 * 1_000_000  # 1990; other units, such as days of a spreadsheet, come before it
COORDINATE = r"(?i)(^|[^a-z])(lat|lon|lng|long|latitude|longitude)$"
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
    problem = "timestamp has an ambiguous day and month"
    if times.both_orders is not None:
        problem += ": {!r} begins with the day, and {!r} with the month".format(*times.both_orders)
    found.find(
        times.either_way,
        problem,
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
        f"use Unix times, or times such as 2025-12-24 18:30; {found.remedy}",
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
        "correct the clock or the time zone: training accepts these lines, but 'lisarec replay' stops, or leaves them "
        "out with --skip-bad-lines",
        column="timestamp",
        stops=False,
    )
    if not mapping.is_plain:
        found.set_column("timestamp", (times.us / 1e6).cast(pl.String))


def read_values(found: Examination, mapping: TableMapping) -> None:
    """Read the values as the mapping says, and find cells that are none, or negative."""
    cells = found.frame["value"].fill_null("").str.strip_chars()
    is_numeric = _is_numeric(found, "value")
    decimal = None if is_numeric else mapping.decimal
    if decimal is None:
        numbers = cells.cast(pl.Float64, strict=False)
        numbers = numbers.set(~numbers.is_finite(), None)
        sign = likely_decimal(cells)
        is_odd = (cells != "") & numbers.is_null()
        is_amount = is_odd & amounts_in(cells, sign).is_not_null()
        fix = f"pass the decimal separator: --decimal '{sign}', which also removes currencies and thousands separators"
        found.find(is_amount, "value is not a plain number", fix, column="value")
    else:
        numbers = amounts_in(cells, decimal)
    is_bad = (cells != "") & numbers.is_null()
    found.find(is_bad, "value is not a number", found.remedy, column="value")
    found.find(
        numbers < 0,
        "value is negative",
        "remove returns: training counts them like other events of their type, and 'lisarec replay' stops, or leaves "
        "them out with --skip-bad-lines",
        column="value",
        stops=False,
    )
    if not is_numeric:
        _find_thousands(found, "value", decimal)
    if decimal is not None:
        found.set_column("value", numbers.cast(pl.String))


def negative_numbers(columns: pl.DataFrame) -> dict[str, pl.Series]:
    """Return where each column of numbers is negative, without coordinates, and those that mostly are."""
    found: dict[str, pl.Series] = {}
    for name in columns.columns:
        if re.search(COORDINATE, name.strip()):
            continue
        cells = columns[name].fill_null("").str.strip_chars()
        is_negative = cells.str.starts_with("-")
        if not is_negative.any() or 2 * is_negative.sum() > len(cells):
            continue
        if not (amounts_in(cells, likely_decimal(cells)).is_null() & (cells != "")).any():
            found[name.strip()] = is_negative
    return found


def find_returns(found: Examination, negative: Mapping[str, pl.Series]) -> None:
    """Note lines that may be returns, by negative numbers in columns that are not read, such as a quantity."""
    is_said = found.bad
    if "value" in found.frame.columns:
        is_said |= found.frame["value"].fill_null("").str.starts_with("-")
    for name, is_negative in negative.items():
        found.find(
            is_negative & ~is_said,
            f"{name} is negative, and is not read",
            "remove them if they are returns: training and 'lisarec replay' count them like others of their type",
            stops=False,
        )
        is_said |= is_negative


def read_property(found: Examination, column: str, mapping: TableMapping) -> None:
    """Read a column of numbers or times as the mapping says, and find cells because of which it becomes a text."""
    if _is_numeric(found, column):
        return
    cells = found.frame[column]
    known = (cells.fill_null("") != "") & ~found.bad  # a line that is left out decides nothing
    readable = cells.filter(known)
    if looks_like_amounts(readable, mapping.decimal or likely_decimal(readable)):
        _read_amounts(found, column, known, mapping.decimal)
    elif (cells.cast(pl.Float64, strict=False).is_null() & known).any():
        _read_property_times(found, column, known, mapping)
    elif are_numbers_of_times(readable):
        _read_numbers_of_times(found, column, known, mapping)
    else:
        _find_thousands(found, column, None)


def _read_amounts(found: Examination, column: str, known: pl.Series, decimal: DecimalSign | None) -> None:
    cells = found.frame[column]
    sign = decimal or likely_decimal(cells.filter(known))
    numbers = amounts_in(cells, sign)
    plain = cells.cast(pl.Float64, strict=False) if decimal is None else numbers
    is_odd = known & numbers.is_null() & plain.is_null()
    is_formatted = known & numbers.is_not_null() & plain.is_null()
    problem = f"{column} becomes a text, because it has no plain numbers"
    found.find(is_formatted, problem, f"pass the decimal separator: --decimal '{sign}'", column=column, stops=False)
    problem = f"{column} becomes a text, because not all of its cells are numbers"
    found.find(is_odd, problem, "correct these cells, or empty them", column=column, stops=False)
    if is_odd.any() or is_formatted.any():
        return
    _find_thousands(found, column, decimal)
    if decimal is not None:
        found.set_column(column, numbers.cast(pl.String))


def _find_thousands(found: Examination, column: str, decimal: DecimalSign | None) -> None:
    """Find cells such as 1.299 that may be thousands or have decimals, and say how they are read."""
    other: DecimalSign = decimal or ","
    sign = "," if other == "." else "."
    cells = found.frame[column].set(found.bad, None)
    if decimal is None:
        problem = f"{column} has {sign!r} only before three digits, and is read with decimals"
        fix = f"if it separates thousands, pass --decimal '{other}'"
    else:
        problem = f"{column} has {sign!r} only before three digits, so it separates thousands"
        fix = f"if it separates decimals, export them with {other!r}"
    found.find(perhaps_thousands(cells, other), problem, fix, column=column, stops=False, assumes=decimal is not None)


def _is_numeric(found: Examination, column: str) -> bool:
    """Return whether the column has numbers, not texts, in its Parquet file."""
    dtype = found.dtypes.get(column)
    return dtype is not None and dtype.is_numeric()


def _read_numbers_of_times(found: Examination, column: str, known: pl.Series, mapping: TableMapping) -> None:
    """Read numbers such as 20251224 as days if there is a time zone, and say how they are read."""
    if mapping.timezone is None:
        fix = "if they are days, pass the time zone, such as --timezone Europe/Berlin"
        found.find(known, f"{column} may have days, and is read as numbers", fix, column=column, stops=False)
        return
    times = times_in(found.frame[column], mapping.timezone)
    if not (known & times.us.is_null()).any():
        problem, fix = f"{column} has numbers that are read as days", "if they are numbers, leave out --timezone"
        found.find(known, problem, fix, column=column, stops=False, assumes=True)
        found.set_column(column, rfc_3339(times.us))


def _read_property_times(found: Examination, column: str, known: pl.Series, mapping: TableMapping) -> None:
    times = times_in(found.frame[column], mapping.timezone)
    if (known & times.by_no_clock).any() and not (known & times.us.is_null() & ~times.by_no_clock).any():
        lacks = "no time zone" if mapping.timezone is None else f"times that do not exist in {mapping.timezone}"
        found.find(
            times.by_no_clock, f"{column} has {lacks}, so it becomes a text", ZONE_FIX, column=column, stops=False
        )
    elif mapping.timezone is not None and known.any() and not (known & times.us.is_null()).any():
        found.set_column(column, rfc_3339(times.us))
