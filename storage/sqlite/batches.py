"""Statements for many rows, which SQLite executes in batches."""

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from storage.errors import StorageError

PROBE = "SELECT json_group_array(json_array(length(column1))), CAST(group_concat(column1, '') AS BLOB) FROM ({rows})"
PROBED = [(b"a\0b",)]


def execute_in_batches(
    db: sqlite3.Connection,
    sql: str,
    rows: Sequence[Sequence[Any]],
    *,
    before: Sequence[Any] = (),
    after: Sequence[Any] = (),
    sizes: Sequence[int] = (256, 64, 8, 1),
) -> list[Any]:
    """Execute a statement for all of the rows, in order and in batches; return all result rows.

    Each statement, and each of its result rows, releases the interpreter's lock, and then waits until another thread
    gives it back. So a few statements for a hundred rows cost far less than a hundred statements, and results are best
    aggregated: see `rows_with_blobs`. Batches have only a few sizes, so that SQLite prepares few statements.

    sql     has {rows} where VALUES of a batch's rows belong
    before  parameters that precede those of the rows in the statement
    after   parameters that follow those of the rows
    sizes   of the batches, the largest first and the last one 1
    """
    results: list[Any] = []
    start = 0
    for size in sizes:
        while start + size <= len(rows):
            batch = rows[start : start + size]
            start += size
            place = f"({', '.join('?' * len(batch[0]))})"
            values = f"VALUES {', '.join([place] * size)}"
            parameters = [*before, *(value for row in batch for value in row), *after]
            results += db.execute(sql.format(rows=values), parameters)
    return results


def rows_with_blobs(aggregated: Iterable[tuple[str, bytes | None]]) -> list[list[Any]]:
    """Return the rows in aggregates of rows, each of which ends in a blob.

    aggregated  a JSON array of rows, in which the length of a blob stands for it, and the blobs one after the other
    """
    rows = []
    for text, blobs in aggregated:
        start = 0
        for row in orjson.loads(text):
            if (length := row[-1]) is not None:
                row[-1] = (blobs or b"")[start : start + length]
                start += length
            rows.append(row)
    return rows


def require_aggregates(db: sqlite3.Connection) -> None:
    """Raise StorageError if this SQLite cannot aggregate rows with blobs: before 3.37 it cut them at a zero byte."""
    try:
        found = rows_with_blobs(execute_in_batches(db, PROBE, PROBED))
    except sqlite3.OperationalError:  # compiled without JSON
        found = []
    if found != [list(row) for row in PROBED]:
        raise StorageError(
            f"this Python has SQLite {sqlite3.sqlite_version}, which is too old or lacks JSON; "
            "use one with SQLite 3.38 or newer, or Redis"
        )
