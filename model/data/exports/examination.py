"""A shop's table, line by line, and the findings of its checks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from model.data.formats.delimited_text import SAVE_OTHERWISE, WINDOWS_1252, DelimitedText, delimited_text
from model.data.interactions import DataError
from model.data.table import VECTOR, Table, has_types, read_table, uncompressed

EXAMPLES = 3  # of each finding
SHOWN_CHARS = 80  # of a cell
LETTER = rb"[0-9A-Za-z\x80-\xff]"
ACCENT = rb"(?:[\xc3\xc5]|\xc2[\xb3\xb9](?=[a-z]))"  # in UTF-8; ł and ą become ³ and ¹
WORD_WITH_ACCENT = re.compile(rb"(?<!%b)%b*%b%b+" % (LETTER, LETTER, ACCENT, LETTER))
MEND_OR_LEAVE_OUT = "correct these lines, or skip them with --skip-bad-lines"
MEND_TO_KEEP = "correct these lines to keep them"


@dataclass(frozen=True)
class Finding:
    """A finding about a table.

    fix       what to do; empty if nothing is to be done
    count     the number of lines with the problem; 0 for a problem of the whole table
    examples  the first of these lines, with their cells
    stops     whether it makes the table, or the line, unreadable
    assumes   whether the cells were read in one of two ways
    """

    problem: str
    fix: str
    count: int = 0
    examples: Sequence[str] = ()
    stops: bool = True
    assumes: bool = False


class Examination:
    """A table, and the findings about it.

    frame     its columns as texts
    dtypes    of its columns, in a Parquet file or JSON
    left_out  columns that have neither numbers nor texts, in a Parquet file or JSON
    bad       whether each row is unreadable
    findings  in the order in which they were found
    remedy    what to do about unreadable lines

    skips_bad_lines  whether unreadable lines are left out
    """

    def __init__(self, table: Table, *, skips_bad_lines: bool = False) -> None:
        self.path = table.path
        self.frame = table.frame
        self.dtypes = table.dtypes
        self.left_out = table.left_out
        self.bad = pl.repeat(False, len(table.frame), dtype=pl.Boolean, eager=True)
        self.findings: list[Finding] = []
        self.remedy = MEND_TO_KEEP if skips_bad_lines else MEND_OR_LEAVE_OUT
        self._table = table

    @property
    def stops(self) -> bool:
        """Whether the whole table is unreadable."""
        return any(finding.stops and not finding.count for finding in self.findings)

    @property
    def is_lost(self) -> bool:
        """Whether the table has lines, but no readable one."""
        return bool(len(self.bad)) and bool(self.bad.all())

    @property
    def lost_share(self) -> float:
        """The share of unreadable lines among the lines that are not empty."""
        lost = sum(finding.count for finding in self.findings if finding.stops)
        return lost / max(1, lost + len(self.bad) - int(self.bad.sum()))

    @property
    def good(self) -> pl.DataFrame:
        """The readable rows."""
        return self.frame.filter(~self.bad)

    def note(self, problem: str, fix: str = "", *, stops: bool = False) -> None:
        """Add a finding about the table as a whole."""
        self.findings.append(Finding(problem, fix, stops=stops))

    def find(
        self,
        rows: pl.Series,
        problem: str,
        fix: str,
        *,
        column: str | None = None,
        stops: bool = True,
        assumes: bool = False,
    ) -> None:
        """Add a finding about the rows where a condition holds, if there are any.

        A row that is unreadable for one reason does not count for another one.

        column  the column whose cells are shown as examples
        """
        rows = rows.fill_null(False) & ~self.bad
        found = rows.arg_true().to_list()
        if not found:
            return
        examples = [self._example(row, column) for row in found[:EXAMPLES]]
        self.findings.append(Finding(problem, fix, len(found), examples, stops, assumes))
        if stops:
            self.bad = self.bad | rows

    def leave_out(self, rows: pl.Series, problem: str) -> None:
        """Add a finding like `find`, and leave the rows out of the readable ones."""
        self.find(rows, problem, "", stops=False)
        self.bad = self.bad | rows.fill_null(False)

    def set_column(self, name: str, cells: pl.Series) -> None:
        """Set the cells of a column."""
        self.frame = self.frame.with_columns(cells.alias(name))

    def _example(self, row: int, column: str | None) -> str:
        if column is None:
            return self._table.place(row)
        return f"{self._table.place(row)}: {(self.frame[column][row] or '')[:SHOWN_CHARS]!r}"


def opened(path: Path, *, skips_empty_lines: bool, skips_bad_lines: bool) -> Examination:
    """Read all columns of a table as texts, even if lines are broken; raises DataError when that is not possible."""
    if not path.is_file():
        raise DataError(f"{str(path)!r} is not a file")
    if has_types(path):
        table = read_table(path, (), (VECTOR,), has_others=True)
        return Examination(_with_vectors_as_texts(table), skips_bad_lines=skips_bad_lines)
    raw = uncompressed(path)
    text = delimited_text(path, raw)
    try:
        frame, is_ragged = text.frame(), False
    except DataError:
        frame, is_ragged = text.ragged_frame(), True
    table = Table(path, frame, hashlib.sha256(raw).hexdigest(), text.first_line - 1)
    found = Examination(table, skips_bad_lines=skips_bad_lines)
    if text.encoding != "UTF-8":
        found.note(f"the encoding is {text.encoding}", _fix_of_encoding(text))
    if is_ragged:
        _find_broken_lines(found, text)
    empty = frame.select(empty=pl.all_horizontal(pl.all().fill_null("") == ""))["empty"]
    if skips_empty_lines:
        found.leave_out(empty, "the line is empty and is skipped")
    else:
        found.find(empty, "the line is empty", "remove these lines, or skip them with --skip-bad-lines")
    _find_repeated_headers(found)
    if text.separator == "\t":
        _find_quoted_cells(found)
    return found


def _fix_of_encoding(text: DelimitedText) -> str:
    """Return what to do if the letters are not those of Windows-1252, as which any text of Greek or Hebrew passes."""
    if text.encoding != WINDOWS_1252 or (word := WORD_WITH_ACCENT.search(text.raw)) is None:
        return ""
    return f"if the letters of {word[0].decode()[:SHOWN_CHARS]!r} are wrong, {SAVE_OTHERWISE}"


def _with_vectors_as_texts(table: Table) -> Table:
    if table.frame.schema.get(VECTOR, pl.String) == pl.String:
        return table
    texts = [None if vector is None else json.dumps(vector) for vector in table.frame[VECTOR].to_list()]
    return replace(table, frame=table.frame.with_columns(pl.Series(VECTOR, texts, pl.String)))


def _find_broken_lines(found: Examination, text: DelimitedText) -> None:
    broken = [(row, fields) for row, fields in text.broken_lines() if fields]  # an empty line has none
    width, rows = found.frame.width, len(found.frame)
    is_broken = pl.repeat(False, rows, dtype=pl.Boolean, eager=True)
    if broken:
        is_broken = is_broken.scatter([row for row, _ in broken if row < rows], True)
    lengths = ", ".join(map(str, sorted({fields for _, fields in broken})[:5]))
    found.find(
        is_broken,
        f"the line has {lengths} fields, but the header has {width}",
        f"quote fields that contain {text.separator!r}, or export the table again",
    )


def _find_repeated_headers(found: Examination) -> None:
    same = [
        pl.col(name).fill_null("").str.strip_chars() == name.partition("_duplicated_")[0].strip()
        for name in found.frame.columns
    ]
    found.find(found.frame.select(same=pl.all_horizontal(same))["same"], "the header is repeated", found.remedy)


def _find_quoted_cells(found: Examination) -> None:
    """Find cells in quotes, which belong to the cells of a tab-separated table."""
    for name in found.frame.columns:
        found.find(
            found.frame[name].str.contains(r'^".*"$'),
            f"{name} has quotes around the cell, and keeps them",
            "export tab-separated tables without quotes, or with commas or semicolons as .csv",
            column=name,
            stops=False,
        )
