"""Failures of the embedded store: the response names their kind; log and metrics have the details.

tests/app/http/test_redis_failures.py holds the same for Redis.
"""

from __future__ import annotations

import itertools
import logging
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

import storage.sqlite.database
from app.http.error_responses import STORAGE_REASONS
from storage.errors import FailureCause
from storage.sqlite.database import FILE_NAME
from tests.app.conftest import Client

SMALL_BYTES = 1 << 20
EVENTS = 500  # in one request


def events(begin: int = 0, count: int = 1) -> list[dict[str, Any]]:
    return [{"user_id": f"user-{begin + n}", "item_id": "item-1", "event_id": f"e{begin + n}"} for n in range(count)]


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on a small disk; SQLite's max_page_count if no file system can be mounted."""
    directory = tmp_path / "small"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "tmpfs", str(directory)]
    if subprocess.run(mount, check=False, capture_output=True).returncode == 0:
        yield directory
        subprocess.run(["umount", "--lazy", directory], check=True)
        return
    connect = storage.sqlite.database.connect

    def connect_bounded(path: Path) -> sqlite3.Connection:
        connection = connect(path)
        connection.execute(f"PRAGMA max_page_count = {SMALL_BYTES // 4096}")
        return connection

    monkeypatch.setattr(storage.sqlite.database, "connect", connect_bounded)
    yield directory


class StoreLog:
    """Log records about store failures."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog

    def lines(self, cause: FailureCause) -> list[str]:
        messages = [record.getMessage() for record in self._caplog.records]
        return [line for line in messages if line.startswith(f"the store fails ({cause})")]


@pytest.fixture
def store_log(caplog: pytest.LogCaptureFixture) -> StoreLog:
    return StoreLog(caplog)


def errors(client: Client, cause: FailureCause) -> float:
    (line,) = [line for line in client.get("/metrics").text.splitlines() if f'errors_total{{cause="{cause}"}}' in line]
    return float(line.split()[1])


def assert_reported(client: Client, log: StoreLog, refusal: httpx.Response, cause: FailureCause, reason: str) -> None:
    """Assert that the response names only the kind of failure, and the log the store's message."""
    error = refusal.json()["error"]
    assert (refusal.status_code, error["code"]) == (503, "storage_unavailable")
    assert error["message"] == f"{STORAGE_REASONS[cause]}; retry the same request later"
    assert int(refusal.headers["retry-after"]) >= 1
    assert errors(client, cause) >= 1
    assert reason in log.lines(cause)[0]
    assert reason not in refusal.text


def test_a_full_disk(start: Callable[..., Client], small_disk: Path, store_log: StoreLog) -> None:
    client = start(small_disk)
    refusal = next(
        answer
        for begin in itertools.count(0, EVENTS)
        if (answer := client.post("/v1/events", json=events(begin, EVENTS))).status_code != 200
    )
    assert_reported(client, store_log, refusal, "disk_full", "database or disk is full")
    assert client.recommend("user-0")["source"] == "personalised"
    client.close()


def test_a_damaged_file(start: Callable[..., Client], tmp_path: Path, store_log: StoreLog) -> None:
    client = start(tmp_path)
    client.post("/v1/events", json=events(count=EVENTS))
    client.close()
    path = tmp_path / FILE_NAME
    with path.open("r+b") as file, closing(sqlite3.connect(path)) as db:
        for (page,) in db.execute("SELECT rootpage FROM sqlite_schema WHERE tbl_name IN ('log', 'states')").fetchall():
            file.seek((page - 1) * 4096)
            file.write(b"\xff" * 4096)
    client = start(tmp_path)
    refusal = client.post("/v1/events", json=events(begin=EVENTS))
    assert_reported(client, store_log, refusal, "damaged", "malformed")
    before = errors(client, "damaged")
    assert client.recommend("user-0")["source"] == "popular"
    assert errors(client, "damaged") == before + 1
    client.close()


def test_a_locked_file(
    start: Callable[..., Client], tmp_path: Path, store_log: StoreLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.sqlite.database, "BUSY_TIMEOUT_S", 0.2)
    client = start(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as stranger:
        stranger.execute("BEGIN EXCLUSIVE")
        refusal = client.post("/v1/events", json=events())
        assert_reported(client, store_log, refusal, "locked", "database is locked")
    assert client.post("/v1/events", json=events()).status_code == 200
    client.close()


def test_a_cause_is_logged_once_a_second_and_every_failure_is_counted(client: Client, store_log: StoreLog) -> None:
    client.close_store()
    begin_s = time.monotonic()
    requests = 60
    for _ in range(requests):
        assert client.post("/v1/events", json=events()).status_code == 503
    assert 1 <= len(store_log.lines("closed")) <= 1 + (time.monotonic() - begin_s)
    assert errors(client, "closed") >= requests


def test_every_cause_has_a_message() -> None:
    assert set(STORAGE_REASONS) == set(get_args(FailureCause))
