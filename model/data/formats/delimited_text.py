"""Tables of delimited text, from data directories and shops' programs: separators, encodings, days as numbers."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.data.interactions import DataError

SEPARATORS = ("\t", ";", ",", "|")
QUOTED = re.compile(r'"[^"]*"')
CHUNK = 1 << 20
SPREADSHEET = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # the beginnings of .xlsx and .ods, and of .xls
JSON = re.compile(rb"(\xef\xbb\xbf)?\s*(\[\s*)?\{")
SEPARATOR_LINE = re.compile(rb'(?:\xef\xbb\xbf)?"?sep=([\t;,|])"?\r?\n(?=\s*\S)', re.IGNORECASE)  # for spreadsheets
WINDOWS_1252 = "Windows-1252"
SAVE_OTHERWISE = "save it as CSV (UTF-8) or Parquet"
COMPACT_DAY = r"^((?:19|20)\d{2})(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])"
COMPACT_TIME = COMPACT_DAY + r"([01]\d|2[0-3])([0-5]\d)([0-5]\d)?"  # after the year 2570 in any unit of Unix times


@dataclass(frozen=True)
class DelimitedText:
    """A text of lines with separated fields, the first of which is a header.

    raw         the text, in UTF-8 whatever the encoding of the file
    separator   between fields; with tabs, fields cannot be quoted
    encoding    of the file, for messages
    first_line  the number of the header's line in the file
    """

    path: Path
    raw: bytes
    separator: str
    encoding: str = "UTF-8"
    first_line: int = 1

    def frame(self) -> pl.DataFrame:
        """Return the columns as texts; raises DataError, which names the first broken line."""
        try:
            frame = self._read(truncate=False)
        except pl.exceptions.PolarsError as exc:
            raise self._first_problem(str(exc)) from exc
        if frame.width > 1 and frame[:, -1].null_count() and not self._is_complete(frame):
            with suppress(csv.Error):  # for a field of more than 128 KiB, which polars reads
                if ragged := self._first_ragged_line():
                    raise ragged
        return frame

    def _is_complete(self, frame: pl.DataFrame) -> bool:
        """Return whether no line is too short, as far as the number of separators says. None is too long."""
        may_quote = self.separator != "\t" and b'"' in self.raw
        separators = (frame.width - 1) * (len(frame) + 1)  # with the header
        return not may_quote and self.raw.count(self.separator.encode()) == separators

    def ragged_frame(self) -> pl.DataFrame:
        """Return the columns, null where a line has too few fields; excess fields of a line are left out.

        raises  DataError  when the text cannot be parsed at all
        """
        try:
            return self._read(truncate=True)
        except pl.exceptions.PolarsError as exc:
            raise self._first_problem(str(exc)) from exc

    def broken_lines(self) -> Iterator[tuple[int, int]]:
        """Iterate over the rows, from 0, with too few or too many fields, and how many; an empty line has 0.

        raises  DataError  when the text is not UTF-8, or a quote is not closed
        """
        try:
            lines = self._lines()
            _, header = next(lines)
            for row, (_, fields) in enumerate(lines):
                if len(fields) != len(header):
                    yield row, len(fields)
        except (UnicodeDecodeError, csv.Error) as exc:
            raise self._unreadable(exc) from exc

    def _read(self, *, truncate: bool) -> pl.DataFrame:
        return pl.read_csv(
            self.raw,
            separator=self.separator,
            infer_schema=False,
            quote_char=None if self.separator == "\t" else '"',
            encoding="utf8",
            truncate_ragged_lines=truncate,
        )

    def first_lines(self) -> NDArray[np.int64]:
        """Return the number of the line at which each row begins: (rows,). Cells in quotes may have several lines.

        raises  csv.Error  for a field of more than 128 KiB
        """
        return np.fromiter((line for line, _ in self._lines()), np.int64)[1:]

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """Iterate over the header and the rows: the number of the line at which each begins, and its fields."""
        text, line = io.TextIOWrapper(io.BytesIO(self.raw), "utf-8", newline=""), self.first_line
        if self.separator == "\t":
            rows = csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
        else:
            rows = csv.reader(text, delimiter=self.separator)
        for fields in rows:
            yield line, fields
            line = self.first_line + rows.line_num

    def _first_problem(self, otherwise: str) -> DataError:
        try:
            return self._first_ragged_line() or DataError(f"{self.path} cannot be read: {otherwise[:200]}")
        except (UnicodeDecodeError, csv.Error) as exc:
            return self._unreadable(exc)

    def _first_ragged_line(self) -> DataError | None:
        """Read the file line by line to name the first one that has too few or too many fields, if there is one."""
        lines = self._lines()
        _, header = next(lines)
        for line, fields in lines:
            if len(fields) != len(header):
                return DataError(f"{self.path}, line {line}: {len(fields)} fields, but the header has {len(header)}")
        return None

    def _unreadable(self, exc: UnicodeDecodeError | csv.Error) -> DataError:
        if isinstance(exc, csv.Error):
            return DataError(f"{self.path}: {exc}")
        lines = enumerate(io.BytesIO(self.raw), start=self.first_line)
        number = next(number for number, line in lines if not _is_utf8(line))
        or_rename = "" if ".csv" in self.path.name else ", or name it .csv if it is Windows-1252"
        return DataError(f"{self.path}, line {number}: not UTF-8 text; save it as UTF-8{or_rename}")


def delimited_text(path: Path, raw: bytes) -> DelimitedText:
    """Return the text in UTF-8, with the separator of its header; raises DataError if it is empty or no table.

    A byte order mark marks UTF-16. A .csv file most of whose non-ASCII bytes are not UTF-8 is read as Windows-1252,
    which spreadsheets write, or refused if it cannot be that. A text with a few broken characters stays unchanged.
    """
    if not raw.strip():
        raise DataError(f"{path} is empty; it needs a header and at least one line")
    if raw.startswith(SPREADSHEET):
        raise DataError(f"{path} is a spreadsheet; {SAVE_OTHERWISE}")
    encoding = "UTF-8"
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            raw, encoding = raw.decode("utf-16").encode(), "UTF-16"
        except UnicodeDecodeError:
            raise DataError(f"{path} is truncated UTF-16 text; export it again") from None
    elif ".csv" in path.name and not raw.isascii() and not _is_utf8(raw) and _is_mostly_broken(raw):
        raw, encoding = _from_windows_1252(path, raw), WINDOWS_1252
    if JSON.match(raw):
        raise DataError(f"{path} is JSON; name it .json or .jsonl")
    if named := SEPARATOR_LINE.match(raw):
        return DelimitedText(path, raw[named.end() :], named[1].decode(), encoding, first_line=2)
    return DelimitedText(path, raw, _separator_of(path, raw), encoding)


def _from_windows_1252(path: Path, raw: bytes) -> bytes:
    """Return the text in UTF-8. Raise DataError for bytes that Windows-1252 lacks, such as those of Shift-JIS."""
    try:
        return raw.decode("cp1252").encode()
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        raise DataError(f"{path}, line {line}: neither UTF-8 nor Windows-1252 text; {SAVE_OTHERWISE}") from None


def _separator_of(path: Path, raw: bytes) -> str:
    """Return the most frequent separator of the header, outside quotes; without one, that of the file's name."""
    usual = "," if ".csv" in path.name else "\t"
    header = QUOTED.sub("", raw[:CHUNK].partition(b"\n")[0].decode("utf-8", errors="replace"))
    if usual == "\t" and usual in header:
        return usual  # column titles may contain the other separators
    return max((usual, *SEPARATORS), key=header.count)


def _is_utf8(raw: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for begin in range(0, len(raw), CHUNK):
            decoder.decode(raw[begin : begin + CHUNK])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _is_mostly_broken(raw: bytes) -> bool:
    """Return whether most non-ASCII bytes are not UTF-8."""
    beyond = len(raw) - len(raw.decode("ascii", errors="ignore"))
    lost = len(raw) - len(raw.decode("utf-8", errors="ignore").encode())
    return 2 * lost > beyond


def are_compact_days(cells: pl.Series) -> bool:
    """Return whether all numbers of a column can be days such as 20251224, which is in August 1970 as Unix seconds."""
    numbers = cells.cast(pl.Float64, strict=False)
    if not numbers.is_between(19_000_101, 20_991_231).all() or not numbers.count():
        return False
    return bool(cells.filter(numbers.is_not_null()).str.contains(COMPACT_DAY + r"(\.0+)?$").all())
