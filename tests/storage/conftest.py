"""Fixtures of the tests of stores: addresses, servers and clusters."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import storage.redis.log.user_log
import storage.redis.states
import storage.sqlite.log
import storage.sqlite.store
from tests.storage.contract.stores import STORES, new_address
from tests.storage.redis.servers import RedisCluster, RedisServer, expected_servers, new_server, running_cluster


@pytest.fixture(params=STORES)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Address of an empty store for `stores.open_store`; tests run once per kind of store."""
    return new_address(request.param, tmp_path / "store")


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink pages, so that users and partitions cross their boundaries."""
    monkeypatch.setattr(storage.sqlite.log, "LOG_PAGE", 7)
    monkeypatch.setattr(storage.redis.log.user_log, "STREAM_PAGE", 3)
    monkeypatch.setattr(storage.redis.log.user_log, "USER_PAGE", 3)
    monkeypatch.setattr(storage.sqlite.log, "NEWEST_PAGE", 3)
    monkeypatch.setattr(storage.sqlite.store, "SAVED_AT_ONCE", 4)
    monkeypatch.setattr(storage.redis.states, "SAVED_AT_ONCE", 2)


@pytest.fixture(params=expected_servers())
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = new_server(request.param)
    yield server
    server.stop()


@pytest.fixture
def any_server() -> Iterator[RedisServer]:
    """A server for tests that do not depend on its kind."""
    server = new_server("redis-server")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def cluster() -> RedisCluster:
    return running_cluster()


@pytest.fixture(params=["redis-server", "valkey-server"])
def own_cluster(request: pytest.FixtureRequest) -> Iterator[RedisCluster]:
    """A cluster that the test may break."""
    cluster = RedisCluster(timeout_ms=1_000, server=request.param)
    yield cluster
    cluster.stop()
