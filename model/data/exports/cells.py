"""Times and numbers in the cells of shops' tables."""

from __future__ import annotations

from typing import Literal, NamedTuple

import polars as pl

from model.data.formats.delimited_text import COMPACT_DAY, COMPACT_TIME, are_compact_days
from model.data.table import ISO_DAY, unix_times, with_rfc3339_times

DecimalSign = Literal[".", ","]
DECIMAL_SIGNS: tuple[DecimalSign, DecimalSign] = (",", ".")

# Japanese spreadsheets write the yen as a backslash
_SIGNS = r"\p{Sc}|\\|EUR|USD|GBP|CHF|JPY|円|CNY|元|INR|ILS|NIS|PLN|zł|TRY|SEK|NOK|DKK|CZK|Kč"
_CURRENCY_BEFORE = rf"(?i)^(\s*-?\s*)(?:(?:{_SIGNS}|(?:Rs|TL|kr)[.\s])\s*)+"  # unlike the codes TL100 and KR-100
_CURRENCY_BEHIND = rf"(?i)(?:(?:{_SIGNS}|Rs\.?|TL|kr\.?)\s*)+$"
_LAKHS = r"[1-9]\d?(?:,\d\d)+,\d{3}"  # 12,34,567, as India writes numbers; 12.34.567 is a code

_DAY = r"^\s*\d{1,4}[-./]\d{1,2}[-./]\d{1,4}\s*$"
_HALF_OF_DAY = r"(?i)\s*([ap])\.?m\.?$"  # after a time of twelve hours
_CLOCK_OR_NOTHING = r"(?i)^\s*(\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?(\s*[ap]\.?m\.?)?)?\s*$"
_LOCAL_TIME = ISO_DAY + r"T\d{2}:\d{2}:\d{2}(\.\d+)?$"
_DAYS_BEFORE_YEARS = r"^(\d{2})[/-](\d{2})[/-](\d{4})"


class Times(NamedTuple):
    """The times in the cells of a column, one entry per row.

    us           Int64, microseconds since the epoch; null for a cell that is not a time, or a local one without a zone
    by_no_clock  whether the cell is a local time that cannot be converted: there is no zone, or its clocks skip it
    either_way   whether the cell is ambiguous, such as 03/04/2025, because nothing in it tells days from months,
                 or it has both orders
    both_orders  a cell with the day before the month and one with the month before the day, if there are both
    """

    us: pl.Series
    by_no_clock: pl.Series
    either_way: pl.Series
    both_orders: tuple[str, str] | None


def times_in(cells: pl.Series, timezone: str | None) -> Times:
    """Read Unix seconds, RFC 3339 times, and local ones: 2025-12-24 18:30, 24.12.2025, 24-12-2025, 12/24/2025.

    Numbers such as 20251224 are local days if all numbers of the column can be. 20251224183000 is a local time.
    A local time that occurs twice, in autumn, is the first one. One that clocks skip, in spring, is not a time, except
    midnight, as in Cairo and Santiago: it is the first moment of its day.
    """
    texts = cells.fill_null("").str.strip_chars()
    if are_compact_days(texts):
        texts = texts.str.replace(COMPACT_DAY + r"(\.0+)?$", "${1}-${2}-${3}")
    zoned = with_rfc3339_times(texts).str.to_datetime("%+", time_unit="us", time_zone="UTC", strict=False)
    local, either_way, both_orders = _local_times(texts)
    frame = pl.DataFrame(
        {
            "unix": unix_times(texts),
            "zoned": zoned.dt.timestamp("us"),
            "local": pl.repeat(None, len(texts), dtype=pl.Int64, eager=True)
            if timezone is None
            else _in(local, timezone),
        }
    )
    us = frame.select(us=pl.coalesce("unix", "zoned", "local"))["us"]
    return Times(us, us.is_null() & local.is_not_null(), us.is_null() & either_way, both_orders)


def _local_times(texts: pl.Series) -> tuple[pl.Series, pl.Series, tuple[str, str] | None]:
    """Return local times as 2025-12-24T18:30:00, null for other cells; the rest is as in `Times`."""
    half = texts.str.extract(_HALF_OF_DAY, 1)
    tidy = texts.str.replace(_HALF_OF_DAY, "").str.replace_all(r"\b(\d)([./:-])", "0${1}${2}")
    days = tidy.str.extract(_DAYS_BEFORE_YEARS, 1).cast(pl.Int32, strict=False)
    months = tidy.str.extract(_DAYS_BEFORE_YEARS, 2).cast(pl.Int32, strict=False)
    is_day_first, is_month_first, both_orders = (days > 12).any(), (months > 12).any(), None
    if is_day_first and is_month_first:  # two exports in one table: only a day above 12 tells
        both_orders = texts.filter(days > 12)[0], texts.filter(months > 12)[0]
        tidy = tidy.str.replace(_DAYS_BEFORE_YEARS, "${3}-${2}-${1}").zip_with((days > 12).fill_null(False), tidy)
    elif is_day_first:
        tidy = tidy.str.replace(_DAYS_BEFORE_YEARS, "${3}-${2}-${1}")
    elif is_month_first:
        tidy = tidy.str.replace(_DAYS_BEFORE_YEARS, "${3}-${1}-${2}")
    tidy = tidy.str.replace(r"^(\d{2})\.(\d{2})\.(\d{4})", "${3}-${2}-${1}")
    tidy = tidy.str.replace(r"^(\d{4})/(\d{2})/(\d{2})", "${1}-${2}-${3}")
    tidy = tidy.str.replace(COMPACT_DAY + r" +(\d+:)", "${1}-${2}-${3} ${4}")
    tidy = tidy.str.replace(COMPACT_TIME + r"(\.0+)?$", "${1}-${2}-${3}T${4}:${5}:${6}").str.strip_chars_end(":")
    tidy = tidy.str.replace(ISO_DAY + r"$", "${1}T00:00:00")
    tidy = tidy.str.replace(ISO_DAY + r"[ T,]+(\d)", "${1}T${2}")
    tidy = tidy.str.replace(r"T(\d{2}:\d{2})$", "T${1}:00")
    tidy = tidy.zip_with(half.is_null(), _by_24_hours(tidy, half))
    frame = pl.DataFrame({"tidy": tidy, "by_clock": _by_clock(tidy)})
    is_local = pl.col("tidy").str.contains(_LOCAL_TIME) & pl.col("by_clock").is_not_null()  # unlike 00.00.0000
    local = frame.select(local=pl.when(is_local).then("tidy"))["local"]
    if is_day_first == is_month_first:  # neither, or both
        return local, (days <= 12).fill_null(False), both_orders
    return local, pl.repeat(False, len(texts), dtype=pl.Boolean, eager=True), None


def _by_24_hours(local: pl.Series, half: pl.Series) -> pl.Series:
    """Return times of twelve hours, with a or p for the half of the day, as those of 24; null for other texts."""
    times = (local + half + "m").str.to_datetime("%Y-%m-%dT%I:%M:%S%.f%p", strict=False)
    return times.dt.strftime("%Y-%m-%dT%H:%M:%S%.f")


def _by_clock(local: pl.Series) -> pl.Series:
    """Return local times as if they were UTC; null for days and times that no calendar and no clock has."""
    return (local + "Z").str.to_datetime("%+", time_unit="us", time_zone="UTC", strict=False)


def _in(local: pl.Series, timezone: str) -> pl.Series:
    """Return the microseconds since the epoch of local times of a zone."""
    times = _by_clock(local).dt.replace_time_zone(None)
    before = times.zip_with(times.dt.truncate("1d") < times, times.dt.offset_by("-1us"))  # of midnight, the day before

    def moments(of: pl.Series) -> pl.Series:
        return of.dt.replace_time_zone(timezone, ambiguous="earliest", non_existent="null").dt.timestamp("us")

    return moments(times).fill_null(moments(before) + 1)


def looks_like_days(cells: pl.Series) -> bool:
    """Return whether cells are days, and none has a time."""
    return (bool(cells.str.contains(_DAY).any()) or are_compact_days(cells)) and not cells.str.contains(":").any()


def are_numbers_of_times(cells: pl.Series) -> bool:
    """Return whether all cells are numbers that can be local days or times, such as 20251224 or 20251224183000."""
    return len(cells) > 0 and (
        bool(cells.str.contains(COMPACT_DAY + r"(\.0+)?$").all())
        or bool(cells.str.contains(COMPACT_TIME + r"(\.0+)?$").all())
    )


def looks_like_clock(cells: pl.Series) -> bool:
    """Return whether all cells that are not empty are times of a day, such as 18:30."""
    return bool(cells.str.contains(":").any()) and bool(cells.str.contains(_CLOCK_OR_NOTHING).all())


def amounts_in(cells: pl.Series, decimal: DecimalSign) -> pl.Series:
    """Read numbers such as 1.299,00 € as Float64; null for cells that are not numbers, such as 0.250.

    decimal  the decimal separator; the other sign, or an apostrophe, separates thousands
    """
    group = _thousands_sign(decimal)
    bare = cells.fill_null("").str.replace(_CURRENCY_BEFORE, "${1}").str.replace(_CURRENCY_BEHIND, "")
    plain = bare.str.replace_all(r"\s", "")
    grouped = rf"[1-9]\d{{0,2}}(?:[{group}']\d{{3}})+|{_LAKHS}"
    fits = plain.str.contains(rf"^-?(?:\d+|{grouped})(?:[{decimal}]\d+)?(?:[eE][-+]?\d+)?$")
    digits = plain.str.replace_all(rf"[{group}']", "").str.replace(decimal, ".", literal=True)
    numbers = digits.cast(pl.Float64, strict=False)
    return numbers.set(~fits | numbers.is_infinite(), None)


def looks_like_amounts(cells: pl.Series, decimal: DecimalSign) -> bool:
    """Return whether most cells are numbers, and one has decimals, a currency or thousands, so that they are not codes.

    A sign separates thousands if it does so wherever the column has it.
    """
    known = cells.filter(cells.fill_null("") != "")
    amounts = known.filter(amounts_in(known, decimal).is_not_null())
    group = _thousands_sign(decimal)
    has_sign = amounts.str.contains(rf"{_CURRENCY_BEFORE}|{_CURRENCY_BEHIND}|\d[{decimal}]\d").any()
    with_groups = known.filter(known.str.contains(rf"\d[\s{group}']\d"))
    thousands = rf"^\s*-?([1-9]\d{{0,2}}([\s{group}']\d{{3}})+|{_LAKHS})\s*$"
    is_grouped = len(with_groups) > 0 and with_groups.str.contains(thousands).all()
    return bool(has_sign or is_grouped) and 2 * len(amounts) > len(known)


def likely_decimal(cells: pl.Series) -> DecimalSign:
    """Return the decimal separator with which most cells are numbers; if both are alike, no cell has it."""
    with_comma, with_point = (amounts_in(cells, sign).count() for sign in DECIMAL_SIGNS)
    if with_comma != with_point:
        return "," if with_comma > with_point else "."
    return "." if cells.str.contains(",", literal=True).any() else ","


def perhaps_thousands(cells: pl.Series, decimal: DecimalSign) -> pl.Series:
    """Return which cells, such as 1.299, are thousands only because this is the decimal separator.

    No cell of a column is, if another one, such as 12,50 or 1.000.000, tells thousands from decimals.
    """
    group = _thousands_sign(decimal)
    with_group = cells.str.contains(rf"\d[{group}]\d")
    tells = cells.str.contains(rf"\d[{decimal}]\d|[{group}]\d{{2,3}}[{group}]")
    is_decimal = with_group & amounts_in(cells, decimal).is_null()
    return with_group & (not (tells | is_decimal).any())


def _thousands_sign(decimal: DecimalSign) -> DecimalSign:
    return "." if decimal == "," else ","
