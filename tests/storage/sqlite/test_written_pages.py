"""Pages written by a commit, which determine the throughput of the embedded store."""

from __future__ import annotations

import asyncio
import sqlite3
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from uuid_utils import uuid7

from storage.sqlite.database import FILE_NAME
from storage.sqlite.store import SQLiteStore
from tests.storage.oracles.random_events import click, make_generation

USERS = 1_000
LOG_HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24


def test_ids_of_a_batch_change_few_index_pages(tmp_path: Path) -> None:
    async def append(*users: int) -> Counter[str]:
        """Append an event for each user; return the pages in a WAL that was empty at opening."""
        store = await SQLiteStore.open(tmp_path, [make_generation()])
        try:
            await store.append("main", [click(str(uuid7()), f"user{number}") for number in users])
            return Counter(_tables_of_pages(tmp_path / FILE_NAME))
        finally:
            await store.close()

    for _ in range(20):
        asyncio.run(append(*range(USERS)))
    pages = asyncio.run(append(*range(0, USERS, 10)))
    assert pages["log_by_user"] > 20  # it is in order of users
    assert 0 < pages["log_by_event"] < 20  # and about a hundred, if the index were in order of users


def _tables_of_pages(file: Path) -> Iterator[str]:
    """Yield the table or index of each page in the write-ahead log, see https://www.sqlite.org/walformat.html."""
    with closing(sqlite3.connect(file)) as db:
        tables = dict(db.execute("SELECT pageno, name FROM dbstat"))
        (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
    log = file.with_name(f"{FILE_NAME}-wal").read_bytes()
    salt = log[16:24]
    pages = set()
    for start in range(LOG_HEADER_BYTES, len(log), FRAME_HEADER_BYTES + page_bytes):
        page, own_salt = struct.unpack_from(">I4x8s", log, start)
        if own_salt != salt:  # of an earlier log
            break
        pages.add(page)
    yield from (tables[page] for page in pages)
