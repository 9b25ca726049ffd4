"""Statements for many rows return every row, however few statements there are."""

import sqlite3
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

import storage.sqlite.batches
from storage.errors import StorageError
from storage.sqlite.batches import PROBE, execute_in_batches, require_aggregates, rows_with_blobs

ECHO = """
SELECT json_group_array(json_array(column1, column2, length(column3))), CAST(group_concat(column3, '') AS BLOB)
FROM ({rows})
"""
TEXTS = st.text(st.characters(codec="utf-8"))
ROWS = st.lists(st.tuples(TEXTS, st.integers(-(2**63), 2**63 - 1) | st.none(), st.binary() | st.none()))


@given(ROWS, st.sampled_from([(1,), (3, 1), (64, 8, 1)]))
def test_aggregated_rows_keep_their_order(rows: list[tuple[object, ...]], sizes: tuple[int, ...]) -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        assert rows_with_blobs(execute_in_batches(db, ECHO, rows, sizes=sizes)) == [list(row) for row in rows]


def test_rows_beyond_one_statement_keep_their_order() -> None:
    rows = [(f"{number}", None, b"\0" * (number % 5)) for number in range(600)]
    with closing(sqlite3.connect(":memory:")) as db:
        assert rows_with_blobs(execute_in_batches(db, ECHO, rows)) == [list(row) for row in rows]


def test_an_unsuitable_sqlite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        require_aggregates(db)
        for probe in (PROBE.replace("group_concat(column1, '')", "'a'"), PROBE.replace("json_array(", "no_json(")):
            monkeypatch.setattr(storage.sqlite.batches, "PROBE", probe)
            with pytest.raises(StorageError, match=r"SQLite 3\.38 or newer"):
                require_aggregates(db)


def test_statements_contain_as_many_rows_as_fit() -> None:
    statements: list[str] = []
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.execute("CREATE TABLE numbers (number INTEGER)")
        db.set_trace_callback(statements.append)
        execute_in_batches(db, "INSERT INTO numbers {rows}", [(number,) for number in range(600)])
        assert len(statements) == 2 + 1 + 3
        assert [number for (number,) in db.execute("SELECT number FROM numbers ORDER BY rowid")] == list(range(600))
