"""Test servers start like those of docker-compose.yml and keep their data across restarts."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from benchmarks.harness.redis_cluster import ClusterAdmin, cluster_client, wait_until
from tests.storage.redis.servers import (
    RedisCluster,
    RedisServer,
    expected_servers,
    find_servers,
    new_server,
    redis_users,
)

ENDINGS = [signal.SIGTERM, signal.SIGKILL]
KEYS = 30


@pytest.fixture(params=expected_servers())
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = new_server(request.param)
    yield server
    server.stop()


def test_valkey_has_the_documented_version() -> None:
    """VALKEY_MAJOR is set where .ci/install falls back to version 8."""
    program = find_servers().get("valkey-server")
    if program is None:
        pytest.skip("there is no valkey-server; .ci/install brings it")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    assert f" v={os.environ.get('VALKEY_MAJOR', '9')}." in version


def write(service: Any, name: str) -> None:
    """Write like the stores do: by commands and in a script."""
    service.set(f"{{{name}}}:plain", 1)
    service.eval("redis.call('SET', KEYS[1], 1)", 1, f"{{{name}}}:script")
    service.eval("redis.call('XADD', KEYS[1], '*', 'e', 1)", 1, f"{{{name}}}:log")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_restarted_server_keeps_every_key(server: RedisServer, ending: signal.Signals) -> None:
    with redis.Redis.from_url(server.url) as service:
        for number in range(KEYS):
            write(service, str(number))
        with service.pipeline(transaction=True) as pipe:
            pipe.set("first", 1).set("second", 1).execute()
    server.kill(ending)
    server.start()
    with redis.Redis.from_url(server.url) as service:
        assert service.dbsize() == 3 * KEYS + 2
        assert service.xlen("{0}:log") == 1


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_restarted_cluster_keeps_every_key(ending: signal.Signals) -> None:
    cluster = RedisCluster(timeout_ms=1_000)
    first, *_ = cluster.primaries
    try:
        with cluster_client(first.url) as service:
            for number in range(KEYS):
                write(service, str(number))
        for node in cluster.primaries:
            node.kill(ending)
        for node in cluster.primaries:
            node.start()
        admin = ClusterAdmin(redis_users())
        wait_until(lambda: all(admin.is_complete(node.port) for node in cluster.primaries))
        assert sum(node.client.dbsize() for node in cluster.primaries) == 3 * KEYS
    finally:
        cluster.stop()


def test_only_users_of_the_compose_file_may_log_in(server: RedisServer) -> None:
    with redis.Redis(port=server.port) as nobody, pytest.raises(redis.AuthenticationError):
        nobody.get("x")
    with redis.Redis.from_url(server.url) as service, pytest.raises(redis.exceptions.NoPermissionError):
        service.flushall()
