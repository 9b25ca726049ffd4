from pathlib import Path

import pytest

import storage.redis
import storage.sqlite
import storage.sqlite_log
from tests.storage.stores import STORES, new_address


@pytest.fixture(params=STORES)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty store, for `stores.open_store`; the tests run once for each kind of store."""
    return new_address(request.param, tmp_path / "store")


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and save in pages so small that users and partitions cross their ends."""
    monkeypatch.setattr(storage.sqlite, "LOG_PAGE", 7)
    monkeypatch.setattr(storage.sqlite_log, "LOG_PAGE", 7)
    monkeypatch.setattr(storage.redis, "STREAM_PAGE", 3)
    monkeypatch.setattr(storage.sqlite, "SAVED_AT_ONCE", 4)
    monkeypatch.setattr(storage.redis, "KEPT_AT_ONCE", 2)
