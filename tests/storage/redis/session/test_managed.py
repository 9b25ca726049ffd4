"""Managed Redis: no CONFIG, little INFO, and automatic failover."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from redis.exceptions import ReadOnlyError

from benchmarks.harness.faults.tcp_proxy import TcpProxy
from storage.archive.writer import ArchiveWriter
from storage.archiver.archiver import archive_log
from storage.archiver.redis_source import RedisSource
from storage.errors import StorageUnavailable
from storage.redis.connections.client import RedisServers
from storage.redis.connections.nodes import Command, ReplicaAcks
from tests.storage.oracles.random_events import click
from tests.storage.redis.servers import RedisServer, new_replica, new_server
from tests.storage.redis.stores import (
    PATIENT,
    assert_state_is_fold_of_log,
    ids,
    in_other_partitions,
    opened,
    poll_until,
    refusal,
    until_applied,
)
from tests.waiting import until

# What Amazon ElastiCache says that it does not know, and what others keep from users by their rights.
UNKNOWN = ("ACL", "BGREWRITEAOF", "BGSAVE", "CONFIG", "DEBUG", "MIGRATE", "REPLICAOF", "SAVE", "SHUTDOWN", "SYNC")
OF_OTHERS = ["+@all", "-@admin", "-@dangerous", "-config", "-acl"]


class Managed:
    """Starts servers, and lets services in as users who may do little.

    kind  unknown: the server does not know the commands; forbidden: the user may not use them; silent: nor INFO
    """

    def __init__(self, kind: str, stack: ExitStack) -> None:
        self.kind = kind
        self.program = "valkey-server" if kind == "unknown" else "redis-server"
        self._stack = stack

    def start(self, *options: str) -> RedisServer:
        unknown = [word for command in UNKNOWN if self.kind == "unknown" for word in ("--rename-command", command, "")]
        server = new_server(self.program, *unknown, *options)
        self._stack.callback(server.stop)
        self.let_in(server)
        return server

    def let_in(self, server: RedisServer) -> None:
        if self.kind != "unknown":
            info = ["+info"] if self.kind == "forbidden" else []
            server.client.execute_command("ACL SETUSER", "lisarec", *OF_OTHERS, *info)


@pytest.fixture(params=["unknown", "forbidden", "silent"])
def managed(request: pytest.FixtureRequest) -> Iterator[Managed]:
    with ExitStack() as stack:
        yield Managed(request.param, stack)


@pytest.fixture
def forbidding() -> Iterator[Managed]:
    """A server whose operators may change settings while it runs."""
    with ExitStack() as stack:
        yield Managed("forbidden", stack)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def archive(url: str, directory: Path) -> bool:
    with RedisSource.open(url) as log, ArchiveWriter.open(directory) as writer:
        log.memory_usage()
        counts = archive_log(log, writer, datetime.now(UTC) + timedelta(seconds=1), keep_tail_s=0, keep_days=None)
    return counts.archived > 0


def test_a_managed_server_works_and_unknown_settings_are_logged_once(
    managed: Managed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = managed.start()

    async def law() -> None:
        async with opened(server.url, archive_dir=tmp_path) as store:
            await store.append("main", [click("1"), click("2"), click("1", "visitor")])
            await assert_state_is_fold_of_log(store)
            await store.undo("main", "u", "2")
            await store.merge("main", "u", "visitor")
            await store.append("main", [click("1", "erased")])
            await store.erase("main", "erased")
            assert await asyncio.to_thread(archive, server.url, tmp_path)
            assert await ids(store) == ["1", "2", "undo 2", "visitor/1"]
            assert await ids(store, "erased") == []
        (said,) = warnings(caplog)
        assert "appendfsync is always" in said
        assert ("appendonly is yes" in said) == ("maxmemory-policy is noeviction" in said) == (managed.kind == "silent")

    asyncio.run(law())


@pytest.mark.parametrize("managed", ["unknown", "forbidden"], indirect=True)
def test_a_server_without_an_append_only_file_works_with_a_warning(
    managed: Managed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its persistence is known only to its operators."""
    server = managed.start("--appendonly", "no", "--maxmemory-policy", "volatile-lru")

    async def law() -> None:
        async with opened(server.url, archive_dir=tmp_path) as store:
            await store.append("main", [click("1"), click("1", "v")])
            await store.erase("main", "v")
            await asyncio.to_thread(archive, server.url, tmp_path)
            await store.append("main", [click("2")])
        assert sorted(warning.partition(":")[0] for warning in warnings(caplog)) == [
            "Redis does not tell whether its appendfsync is always. Make sure that it is, or that what acknowledges "
            "events is as durable",
            "Redis may lose acknowledged events",
        ]

    asyncio.run(law())


def test_an_emptied_server_is_refused(managed: Managed) -> None:
    server = managed.start()

    async def law() -> None:
        known, other = in_other_partitions(2)
        async with opened(server.url) as store:
            await store.append("main", [click("1", known)])
            server.restart_with(None)
            managed.let_in(server)
            assert "has lost acknowledged events" in await refusal(store, other)

    asyncio.run(law())


@pytest.mark.parametrize("managed", ["unknown", "forbidden"], indirect=True)
def test_a_server_with_eviction_is_refused_from_the_start(managed: Managed) -> None:
    server = managed.start("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")

    async def law() -> None:
        async with opened(server.url) as store:
            assert "maxmemory-policy is allkeys-lru. Set it to noeviction" in await refusal(store, "u")

    asyncio.run(law())


def test_evicted_keys_are_detected_after_the_policy_is_fixed(forbidding: Managed) -> None:
    """Even if no log was evicted."""
    server = forbidding.start("--lfu-log-factor", "0", "--lfu-decay-time", "0")

    async def law() -> None:
        async with opened(server.url) as store:
            await store.append("main", [click("1")])
            server.client.config_set("maxmemory-policy", "allkeys-lfu")
            for key in server.client.scan_iter("*"):
                server.client.touch(*[key] * 255)  # used more often than the others
            server.client.mset({f"other-{number}": "x" * 1000 for number in range(100)})
            await poll_until(store, lambda: "allkeys-lfu" in str(store.failure))
            server.client.config_set("maxmemory", server.client.info("memory")["used_memory"] - 20_000)
            await poll_until(store, lambda: server.client.info("stats")["evicted_keys"])
            server.client.config_set("maxmemory", 0)
            server.client.config_set("maxmemory-policy", "noeviction")
            await poll_until(store, lambda: "it has evicted" in str(store.failure))
        async with opened(server.url) as later:  # another process, which has seen nothing
            assert "it has evicted" in await refusal(later, "u")
            await later.repair(accept_loss=True)
            await until_applied(later, [click("2")])
            assert await ids(later) == ["1", "2"]

    asyncio.run(law())


def test_a_promoted_replica_that_lagged_is_refused(managed: Managed) -> None:
    """Behind the same address, as in managed services: connections are cut and reopened."""
    primary = managed.start("--repl-diskless-sync-delay", "0")
    replica = new_replica(managed.program, primary)
    managed.let_in(replica)

    async def law() -> None:
        known, other = in_other_partitions(2)
        proxy = TcpProxy("address of the service", ("127.0.0.1", primary.port), lambda: False, print)
        _, port = await proxy.listen(("127.0.0.1", 0))
        async with opened(primary.url.replace(str(primary.port), str(port))) as store:
            await store.append("main", [click("1", known), click("1", other)])
            await until(lambda: replica.client.dbsize() == primary.client.dbsize())
            replica.client.replicaof("NO", "ONE")
            await store.append("main", [click("2", known)])
            proxy.target = ("127.0.0.1", replica.port)
            primary.kill()
            for user_id in (other, known):
                assert "has lost acknowledged events" in await refusal(store, user_id)
            with pytest.raises(StorageUnavailable, match="has lost acknowledged events"):
                await ids(store, known)
            await store.repair(accept_loss=True)
            await until_applied(store, [click("3", known), click("3", other)])
            assert await ids(store, known) == ["1", "3"]
        proxy.close()

    try:
        asyncio.run(law())
    finally:
        replica.stop()


def test_a_demoted_primary_is_left_for_the_new_one(forbidding: Managed) -> None:
    """In a planned failover the name resolves to the new primary, and old connections stay open."""
    primary = forbidding.start("--repl-diskless-sync-delay", "0")
    replica = new_replica(forbidding.program, primary)
    forbidding.let_in(replica)

    async def law() -> None:
        proxy = TcpProxy("address of the service", ("127.0.0.1", primary.port), lambda: False, print)
        _, port = await proxy.listen(("127.0.0.1", 0))
        url = primary.url.replace(str(primary.port), str(port))
        others = RedisServers(url, **PATIENT, acks=ReplicaAcks())  # as of rate limits, without a check for losses

        async def is_written() -> bool:
            (reply,) = await others.execute_all([Command.of("INCR", "calls")])
            return not isinstance(reply, ReadOnlyError)

        async with opened(url) as store:
            users = in_other_partitions(2)
            await store.append("main", [click("1", user_id) for user_id in users])
            await until(lambda: replica.client.dbsize() == primary.client.dbsize())
            replica.client.replicaof("NO", "ONE")
            primary.client.replicaof("127.0.0.1", replica.port)
            with pytest.raises(StorageUnavailable, match="read only replica"):
                await store.append("main", [click("2", users[0])])
            assert not await is_written()
            proxy.target = ("127.0.0.1", replica.port)
            await until_applied(store, [click("3", user_id) for user_id in users])
            assert [await ids(store, user_id) for user_id in users] == [["1", "3"]] * 2
            await until(is_written)
        await others.close()
        proxy.close()

    try:
        asyncio.run(law())
    finally:
        replica.stop()
