"""Shops' tables as data directories: copies with the standard columns, times and numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from app.jobs.datasets.bucket import own_directory
from model.data.exports.checks import examine, examine_items
from model.data.exports.examination import Examination, Finding
from model.data.exports.mapping import TableMapping
from model.data.interactions import DataError
from model.data.readers import is_parquet_of_events

MAX_LOST_SHARE = 0.1  # of the lines of a table, without a warning


def data_directory(data: Path, mapping: TableMapping, cache: Path) -> tuple[Path, list[str]]:
    """Return a data directory with these tables, and remarks about them.

    Without a mapping, the given directory itself is returned, and a Parquet file with the standard columns gets a link.
    Only this process uses a copy, until the process ends.

    raises  DataError  which lists all problems of the tables
            OSError    when the copy cannot be written
    """
    if mapping.is_plain and not data.is_file():
        return data, []
    if mapping.is_plain and is_parquet_of_events(data):
        directory = _own_directory(cache)
        (directory / "interactions.parquet").symlink_to(data.resolve())
        return directory, []
    found = examine(data, mapping)
    _require_readable(found.values(), mapping)
    return _written(found, cache), _remarks(found.values())


def table_of_items(file: Path, mapping: TableMapping, cache: Path) -> tuple[Path, list[str]]:
    """Do what `data_directory` does, for a table of items."""
    if mapping.is_plain:
        return file, []
    items = examine_items(file, mapping)
    _require_readable([items], mapping)
    unread = [
        f"warning: {file}: column {name!r} has neither numbers nor texts, and is not read" for name in items.left_out
    ]
    return _written({"items": items}, cache) / "items.csv", [*_remarks([items]), *unread]


def blocking(found: Examination, mapping: TableMapping) -> list[Finding]:
    """Return the findings that stop a table. Those of lines do if lines may not be skipped, or none is left."""
    may_skip = mapping.skips_bad_lines and not found.is_lost
    return [one for one in found.findings if one.stops and not (one.count and may_skip)]


def warnings(found: Iterable[Examination]) -> list[str]:
    """Return a warning for each table of which much is left out."""
    return [
        f"warning: {one.path}: {one.lost_share:.0%} of the lines are unreadable and are skipped"
        for one in found
        if one.lost_share > MAX_LOST_SHARE
    ]


def in_words(finding: Finding) -> str:
    """Return a finding as a text: its count, its examples and its fix."""
    lines = "" if not finding.count else "1 line: " if finding.count == 1 else f"{finding.count:,} lines: "
    examples = f" ({'; '.join(finding.examples)})" if finding.examples else ""
    return f"{lines}{finding.problem}{examples}{f' -> {finding.fix}' if finding.fix else ''}"


def _require_readable(tables: Iterable[Examination], mapping: TableMapping) -> None:
    problems = [f"{one.path}: {in_words(finding)}" for one in tables for finding in blocking(one, mapping)]
    if problems:
        raise DataError("\n  ".join(["these tables are unreadable:", *problems]))


def _written(found: Mapping[str, Examination], cache: Path) -> Path:
    directory = _own_directory(cache)
    for stem, table in found.items():
        table.good.write_csv(directory / f"{stem}.csv")
    return directory


def _own_directory(cache: Path) -> Path:
    return own_directory(cache / "data" / "mapped")


def _remarks(tables: Collection[Examination]) -> list[str]:
    """Return what a command says about its tables: lines that are left out, and columns read in one of two ways."""
    left_out = [
        f"{table.path}: {rows:,} of {len(table.bad):,} lines are skipped; 'lisarec check' lists them"
        for table in tables
        if (rows := int(table.bad.sum()))
    ]
    assumed = [
        f"warning: {table.path}: {in_words(finding)}"
        for table in tables
        for finding in table.findings
        if finding.assumes
    ]
    return [*left_out, *warnings(tables), *assumed]
