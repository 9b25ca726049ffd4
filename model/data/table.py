"""A table of a data directory as columns of text, whose errors name the file and the line."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.config import ID_PATTERN, ID_RULE, NAME_PATTERN, NAME_RULE
from model.data.formats.delimited_text import COMPACT_TIME, SAVE_OTHERWISE, are_compact_days, delimited_text
from model.data.formats.json_records import JSON_SUFFIXES, is_json, json_records
from model.data.interactions import DataError

SUFFIXES = (".tsv.gz", ".tsv", ".csv.gz", ".csv", ".parquet", *JSON_SUFFIXES)
OTHER_SUFFIXES = (".xlsx", ".xls", ".ods")
VECTOR, CATEGORIES = "vector", "categories"  # lists of numbers; lists of texts, which properties may have, too
ROW_GROUP = 131_072  # rows; a training reads at least one group at a time
LAST_SECOND = 253_402_300_799  # the end of the year 9999, and of RFC 3339
FIRST_NS = 662_688_000 * 10**9  # 1991; .NET counts up to 2099 in smaller numbers, from the year 1 on
RFC_3339 = "%Y-%m-%dT%H:%M:%S%.6fZ"
ISO_DAY = r"^(\d{4}-\d{2}-\d{2})"
_ZONE_HOURS = r"(\+(?:0\d|1[0-4])|-(?:0\d|1[01]))"  # of inhabited places, unlike the end of 18:30-20:00
EXACT_BELOW = 2**53  # a float64 from here on may stand for several integers
POLARS_ERRORS = (
    pl.exceptions.PolarsError,
    pl.exceptions.PanicException,  # not an Exception, but what polars raises for zones such as +05:30
)
INEXACT_ID, INEXACT_ID_FIX = "a float that may have lost digits", "write ids as integers or texts"
INEXACT_TIMES, INEXACT_TIMES_FIX = "float32, in which times up to 128 s apart are equal", "write float64 or integers"


@dataclass(frozen=True)
class Table:
    """A table of text columns; row i is line i + 2 of a text file in which every row has one line.

    first_row  the number of its first row, if it is a piece of a table, or if a line is before the header
    left_out   other columns that were wanted, but have neither numbers nor texts, in a Parquet file or JSON
    dtypes     of its columns, in a Parquet file or JSON
    """

    path: Path
    frame: pl.DataFrame
    sha256: str
    first_row: int = 0
    left_out: Sequence[str] = ()
    dtypes: Mapping[str, pl.DataType] = field(default_factory=dict)

    def refuse(self, bad: pl.Series, reason: str, column: str) -> None:
        """Raise DataError for the first row where ``bad`` holds; ``{!r}`` in the reason becomes the cell."""
        rows = bad.fill_null(True).arg_true()
        if len(rows):
            cell = self.frame[column][rows[0]]
            place = self.place(rows[0])
            raise DataError(f"{self.path}, {place}: " + reason.format("" if cell is None else str(cell)[:80]))

    def place(self, row: int) -> str:
        """Return the position of a row in the file as text."""
        row += self.first_row
        if has_types(self.path) or self.path.is_dir():
            return f"row {row + 1}"
        lines = self._first_lines
        return f"line {lines[row] if row < len(lines) else row + 2}"

    @cached_property
    def _first_lines(self) -> NDArray[np.int64]:
        """The line of a text file at which each row begins.

        None if all rows are one line long, or if the file is not as it was read: it may have been a pipe.
        """
        with suppress(csv.Error, DataError):  # a field of more than 128 KiB, or a file that is gone
            raw = uncompressed(self.path) if self.path.is_file() else b""
            if b'"' in raw and hashlib.sha256(raw).hexdigest() == self.sha256:
                text = delimited_text(self.path, raw)
                if text.separator != "\t":
                    return np.insert(text.first_lines(), 0, np.zeros(text.first_line - 1, np.int64))
        return np.empty(0, np.int64)

    def require_ids(self, *columns: str) -> None:
        """Raise DataError for the first cell of these columns that is not an id or, in the column `type`, a name."""
        for column in columns:
            cells = self.frame[column]
            self.refuse(cells.eq_missing(column), "the header is repeated; remove this line", column)
            bad, rule = bad_ids(cells, column)
            self.refuse(bad, f"{column} {{!r}} is not an id ({rule})", column)
            self.require_exact_ids(column)

    def require_exact_ids(self, column: str) -> None:
        """Raise DataError for the first float that cannot be an id; an empty cell can."""
        bad = inexact_ids(self.frame[column].fill_null(""), self.dtypes.get(column))
        self.refuse(bad, f"{column} {{!r}} is {INEXACT_ID}; {INEXACT_ID_FIX}", column)

    def numbers(self, column: str) -> NDArray[np.float64]:
        """Parse the column as floats, NaN for empty cells; raises DataError."""
        cells = self.frame[column].str.strip_chars()
        numbers = cells.cast(pl.Float64, strict=False)
        bad = (numbers.is_null() | ~numbers.is_finite()) & cells.is_not_null() & (cells != "")
        self.refuse(bad, f"{column} {{!r}} is not a finite number", column)
        return numbers.fill_null(np.nan).to_numpy().astype(np.float64)

    def timestamps_us(self) -> NDArray[np.int64]:
        """Parse the timestamps, Unix or RFC 3339 times, as microseconds; raises DataError."""
        if self.dtypes.get("timestamp") == pl.Float32:
            raise DataError(f"{self.path}: timestamp is {INEXACT_TIMES}; {INEXACT_TIMES_FIX}")
        cells = self.frame["timestamp"].str.strip_chars()
        if are_compact_days(cells):
            reason = "timestamp {!r} is a day without a time zone; pass one, such as --timezone Europe/Berlin"
            self.refuse(cells.cast(pl.Float64, strict=False).is_not_null(), reason, "timestamp")
        times = unix_times(cells)
        if times.null_count():
            texts = cells.filter(times.is_null())
            parsed = _rfc3339_times(texts)
            if parsed.null_count():
                parsed = _rfc3339_times(with_rfc3339_times(texts))
            times = times.scatter(times.is_null().arg_true(), parsed.dt.timestamp("us"))
        self.refuse(times.is_null(), "timestamp {!r} is neither a Unix time nor an RFC 3339 time", "timestamp")
        far = times.abs() > LAST_SECOND * 1_000_000
        self.refuse(far, "timestamp {!r} is after the year 9999", "timestamp")
        return times.to_numpy().astype(np.int64)


def unix_times(cells: pl.Series) -> pl.Series:
    """Return Unix times as microseconds, null for cells that are no finite numbers. What is too far stays too far.

    Local times without signs, such as 20251224183000, are no Unix times.
    A number is in seconds. One that would be after the year 9999 is in the first of milliseconds, microseconds and
    nanoseconds, these from 1991 on, in which it is not.
    """
    number, size = pl.col("number"), pl.col("number").abs()
    us = (
        pl.when(size <= LAST_SECOND)
        .then(number * 1e6)
        .when(size <= LAST_SECOND * 1e3)
        .then(number * 1e3)
        .when(size < FIRST_NS)
        .then(number)
        .otherwise(number / 1e3)
    )
    numbers = cells.cast(pl.Float64, strict=False)
    is_local = cells.str.contains(COMPACT_TIME + r"(\d{3})?(\.0+)?$")
    frame = pl.DataFrame({"number": numbers.set(~numbers.is_finite() | is_local, None)})
    furthest = 2e6 * LAST_SECOND  # 64 bits have room
    return frame.select(us=us.clip(-furthest, furthest).round().cast(pl.Int64))["us"]


def _rfc3339_times(texts: pl.Series) -> pl.Series:
    return texts.str.to_datetime("%+", time_unit="us", time_zone="UTC", strict=False)


def with_rfc3339_times(cells: pl.Series) -> pl.Series:
    """Write times with a zone as RFC 3339 does: 2026-11-30 10:00 +0530 becomes 2026-11-30T10:00:00+05:30.

    Other cells stay as they are, but for a T between a day and a time.
    """
    times = cells.str.replace(ISO_DAY + r" +(\d)", "${1}T${2}")
    times = times.str.replace(ISO_DAY + rf"T(\d{{2}}:\d{{2}}) *([Zz]|{_ZONE_HOURS})", "${1}T${2}:00${3}")
    times = times.str.replace(ISO_DAY + rf"T([\d:.]+) *{_ZONE_HOURS}:?(\d{{2}})$", "${1}T${2}${3}:${4}")
    return times.str.replace(ISO_DAY + rf"T([\d:.]+) *{_ZONE_HOURS}$", "${1}T${2}${3}:00")


def rfc_3339(us: pl.Series) -> pl.Series:
    """Return microseconds since the epoch as times of RFC 3339."""
    return us.cast(pl.Datetime("us", "UTC")).dt.strftime(RFC_3339)


def bad_ids(cells: pl.Series, column: str) -> tuple[pl.Series, str]:
    """Return which cells of a column are not ids or, in the column `type`, not names; and what these must be."""
    pattern, rule = (NAME_PATTERN, NAME_RULE) if column == "type" else (ID_PATTERN, ID_RULE)
    return ~cells.str.contains(rf"\A{pattern}\z") | cells.is_in([".", ".."]), rule


def inexact_ids(cells: pl.Series, dtype: pl.DataType | None) -> pl.Series:
    """Return which cells are not ids, because the column has floats in its file, and these are no exact integers."""
    if dtype is None or not dtype.is_float():
        return pl.repeat(False, len(cells), dtype=pl.Boolean, eager=True)
    return ~cells.str.contains(r"\A(-?\d+)?\z")


def find_table(directory: Path, stem: str) -> Path | None:
    """Return the path of the directory's table of that name, None without one.

    raises  DataError  for two of them, or for one that has to be converted
    """
    if not directory.is_dir():
        raise DataError(f"data directory {str(directory)!r} does not exist; download one with 'lisarec data NAME'")
    files = [directory / f"{stem}{suffix}" for suffix in SUFFIXES if (directory / f"{stem}{suffix}").is_file()]
    if len(files) > 1:
        raise DataError(f"data directory {str(directory)!r} has {files[0].name} and {files[1].name}; keep one of them")
    others = [directory / f"{stem}{suffix}" for suffix in OTHER_SUFFIXES if (directory / f"{stem}{suffix}").is_file()]
    if others and not files:
        raise DataError(f"{others[0]} cannot be read; {SAVE_OTHERWISE}")
    return files[0] if files else None


def read_table(
    path: Path,
    required: Sequence[str],
    optional: Sequence[str],
    *,
    has_others: bool = False,
) -> Table:
    """Read a table with these columns, and others if wanted, from a file of any supported format; raises DataError.

    In a Parquet file and in JSON, lists in the column ``vector`` become lists of floats. They are not among the others.
    Lists of texts become texts separated by ``|``. The fields of a record become columns such as ``labels.brand``.
    """
    raw, first_row = uncompressed(path), 0
    if path.suffix == ".parquet":
        frame = _without_records(path, _parquet(path, raw))
    elif is_json(path):
        frame = _without_records(path, json_records(path, raw).lazy())
    else:
        text = delimited_text(path, raw)
        frame, first_row = text.frame().lazy(), text.first_line - 1
    schema = frame.collect_schema()
    others = [name for name in schema if has_others and name not in (*required, *optional)]
    others = [name for name in others if name != VECTOR or not schema[name].is_nested()]
    _check_header(path, schema.names(), required, (*optional, *others))
    keep = [name for name in (*required, *optional, *others) if name in schema]
    columns, left_out = [], []
    for column in _collected(path, frame.select(keep)):
        try:
            columns.append(_as_text(path, column, is_set=column.name in (CATEGORIES, *others)))
        except DataError:
            if column.name not in others:
                raise
            left_out.append(column.name)
    return Table(path, pl.DataFrame(columns), hashlib.sha256(raw).hexdigest(), first_row, left_out, schema)


class TableInPieces:
    """A table with these columns, of any supported format, that is read piece by piece; raises DataError.

    Of a Parquet file, only the row groups of a piece are read at a time. A text is read as a whole.
    """

    def __init__(self, path: Path, required: Sequence[str], optional: Sequence[str]) -> None:
        self.path = path
        self._names = (*required, *optional)
        self._whole: Table | None = None
        if path.suffix != ".parquet":
            self._whole = read_table(path, required, optional)
            self.columns, self.sha256, self.rows = self._whole.frame.columns, self._whole.sha256, len(self._whole.frame)
            return
        try:
            with path.open("rb") as file:
                self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            found = pl.scan_parquet(path, glob=False)
            self._dtypes = found.collect_schema()
            self.columns = [name for name in self._names if name in self._dtypes]
            _check_header(path, self.columns, required, optional)
            self.rows = int(found.select(pl.len()).collect().item())
        except OSError as exc:
            raise DataError(f"{path} cannot be read: {exc}") from exc
        except POLARS_ERRORS as exc:
            raise _unreadable(path, exc) from exc

    def pieces(self, rows: int) -> Iterator[Table]:
        """Iterate over the rows in chunks, in order."""
        for begin in range(0, self.rows, rows):
            if self._whole is not None:
                frame, first_row = self._whole.frame.slice(begin, rows), self._whole.first_row + begin
                yield Table(self.path, frame, self.sha256, first_row, dtypes=self._whole.dtypes)
                continue
            yield Table(self.path, self._texts(begin, rows), self.sha256, begin, dtypes=self._dtypes)

    def _texts(self, begin: int, rows: int) -> pl.DataFrame:
        frame = _collected(self.path, pl.scan_parquet(self.path, glob=False).select(self.columns).slice(begin, rows))
        return pl.DataFrame([_as_text(self.path, column) for column in frame])


def _unreadable(path: Path, exc: BaseException) -> DataError:
    kind = "JSON" if is_json(path) else "a Parquet table"
    return DataError(f"{path} is not {kind} of numbers and texts: {str(exc)[:200]}")


def _parquet(path: Path, raw: bytes) -> pl.LazyFrame:
    try:
        found = pl.scan_parquet(io.BytesIO(raw))
        found.collect_schema()
    except POLARS_ERRORS as exc:
        raise _unreadable(path, exc) from exc
    return found


def _without_records(path: Path, frame: pl.LazyFrame) -> pl.LazyFrame:
    """Return the columns; those of records become one for each field, named ``record.field``."""
    try:
        while records := {
            name: dtype for name, dtype in frame.collect_schema().items() if isinstance(dtype, pl.Struct)
        }:
            fields = [f"{name}.{part.name}" for name, dtype in records.items() for part in dtype.fields]
            names = [*frame.collect_schema(), *fields]
            if twice := [name for name, times in Counter(names).items() if times > 1]:
                raise DataError(f"{path}: {twice[0]!r} is a column and a field of a record; rename one of them")
            frame = frame.unnest([*records], separator=".")
    except POLARS_ERRORS as exc:
        raise _unreadable(path, exc) from exc
    return frame


def _collected(path: Path, frame: pl.LazyFrame) -> pl.DataFrame:
    try:
        return frame.collect()
    except (OSError, pl.exceptions.PolarsError) as exc:
        raise _unreadable(path, exc) from exc


def _as_text(path: Path, column: pl.Series, *, is_set: bool = False) -> pl.Series:
    """Return a column with a type as texts, times with a zone as those of RFC 3339, and vectors as lists.

    Floats that are integers become texts of integers, because pandas stores integers with empty cells as floats.

    is_set  whether lists of texts are allowed, which become texts separated by ``|``

    raises  DataError  when it has neither numbers nor texts, or a text of a list has a ``|``
    """
    if is_set and column.dtype in (pl.List(pl.String), pl.List(pl.Null)):  # the latter are all empty
        column = column.cast(pl.List(pl.String))
        if column.explode().str.contains("|", literal=True).any():
            raise DataError(f"{path}: a text in column {column.name!r} has a |, which separates them; replace it")
        return column.list.join("|").str.replace(r"^([^|]+)$", "${1}|")  # so that one text is a set, too
    if isinstance(column.dtype, pl.Datetime) and column.dtype.time_zone is not None:
        return column.dt.convert_time_zone("UTC").dt.strftime(RFC_3339)
    try:
        is_vectors = column.name == VECTOR and column.dtype.is_nested()
        texts = column.cast(pl.List(pl.Float64) if is_vectors else pl.String)
        if column.dtype != pl.Float64:
            return texts
        is_integer = (column % 1 == 0) & (column.abs() < EXACT_BELOW)
        integers = column.cast(pl.Int64, strict=False).cast(pl.String)
        return integers.zip_with(is_integer, texts)
    except pl.exceptions.PolarsError as exc:
        reason = f"column {column.name!r} has neither numbers nor texts, but {column.dtype}"
        raise DataError(f"{path}: {reason}; convert it, or leave it out") from exc


def has_types(path: Path) -> bool:
    """Return whether the columns of a table have types, as those of a Parquet file and of JSON."""
    return path.suffix == ".parquet" or is_json(path)


def uncompressed(path: Path) -> bytes:
    """Return the bytes of a file, unpacked if its name ends in .gz; raises DataError."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as exc:
        raise DataError(f"{path} cannot be read: {exc}") from exc


def _check_header(path: Path, header: Sequence[str], required: Sequence[str], optional: Sequence[str]) -> None:
    for name in (*required, *optional):
        if f"{name}_duplicated_0" in header:  # polars' name of the second column of this name
            raise DataError(f"{path}, line 1: column {name!r} appears twice; keep one of them")
        if name in required and name not in header:
            expected = " ".join(required) + "".join(f" [{name}]" for name in optional)
            raise DataError(f"{path}, line 1: column {name!r} is missing; the header must name {expected}")


def write_parquet(frame: pl.DataFrame, path: Path) -> None:
    """Write the table; raises OSError when the file cannot be written, for example on a full disk."""
    try:
        frame.write_parquet(path)
    except pl.exceptions.PolarsError as exc:
        raise OSError(f"'{path}' cannot be written: {exc}") from exc


def sink_parquet(table: pl.LazyFrame, path: Path) -> None:
    """Write the rows of a query in their order, without holding all of them in memory; raises OSError."""
    try:
        table.sink_parquet(path, row_group_size=ROW_GROUP, engine="streaming")
    except pl.exceptions.PolarsError as exc:
        raise OSError(f"'{path}' cannot be written: {exc}") from exc
