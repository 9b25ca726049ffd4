"""Backup files written or changed by other programs are refused with the invalid line."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path
from typing import Any

import pytest

from storage.errors import StorageError
from storage.maintenance.backup import restore
from storage.maintenance.backup_format import HEADER, MAX_LINE, encoded_line, read_records
from storage.state.record_encoding import to_json
from tests.storage.contract.stores import new_address, opened
from tests.storage.oracles.random_events import START_US, click, make_generation


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["main", "e", "u", "item1", 7, START_US, None], "wrong type of value in type"),
        (["main", "e", 7, "item1", "click", "today", None], "in user_id, timestamp_us"),
        ([None, "e", "u", "", "impression", START_US, None, None, None, [], ["item1", 2]], "in tenant, items"),
        (["main", "e", "u", "item1", "click", START_US, None, "1.5", None, [], [], 7], "in value, order_id"),
        ({"undo": ["main", "u", 7, START_US]}, "in event_id"),
        ({"undo": ["main", "u"]}, "not a log entry"),
        ({"item": ["main", "item1", None, None, None, [7]]}, "'items'"),
    ],
)
def test_a_value_of_another_type_restores_nothing(tmp_path: Path, wrong: Any, said: str) -> None:
    async def law() -> None:
        path = tmp_path / "log.gz"
        lines = HEADER, to_json("main", click("first", "u")), wrong, {"entries": 2}
        path.write_bytes(gzip.compress(b"".join(map(encoded_line, lines))))
        async with opened(new_address("sqlite", tmp_path / "state"), make_generation()) as store:
            with pytest.raises(StorageError, match=f"log.gz' is not a readable backup: line 3: .*{said}"):
                await restore(store, path)
            assert [page.entries for page in [page async for page in store.log()]] == [[]]

    asyncio.run(law())


@pytest.mark.parametrize("before", [b"", encoded_line(HEADER)])
@pytest.mark.parametrize("line", [b"[" * 1_000_000, b"0" * MAX_LINE])
def test_a_line_of_excessive_size_or_depth_is_refused(tmp_path: Path, before: bytes, line: bytes) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(before + line + b"\n"))
    with pytest.raises(
        StorageError, match=r"log.gz' is not a readable backup: .*(recursion depth|more than 16,777,216)"
    ):
        list(read_records(path))
