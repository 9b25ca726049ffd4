"""Opening the Redis store: checks, refusals and warnings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import storage.redis.requests
import storage.redis.session.redis_session
import storage.redis.writer
from benchmarks.harness.compose import replica_options
from benchmarks.harness.service_process import free_port
from storage.archiver.redis_source import RedisSource
from storage.errors import StorageError, StorageUnavailable
from storage.redis.connections.nodes import ReplicaAcks
from storage.redis.layout.keys import LAYOUT_VERSION
from storage.redis.store import RedisStore
from tests.storage.oracles.random_events import click
from tests.storage.redis.servers import RedisServer, make_certificate, new_server, redis_users, tls_cluster
from tests.storage.redis.stores import GENERATION, PREFIX, opened, until_applied


class TestOpening:
    def test_another_number_of_partitions_or_a_newer_layout_is_refused(self, any_server: RedisServer) -> None:
        async def law() -> None:
            async with opened(any_server.url):
                pass
            with pytest.raises(StorageError, match=r"partitions.*another key prefix"):
                await RedisStore.open(any_server.url, [GENERATION], partitions=64)
            any_server.client.hset(f"{PREFIX}:meta", "layout", LAYOUT_VERSION + 1)
            with pytest.raises(StorageError, match="layout"):
                await RedisStore.open(any_server.url, [GENERATION])

        asyncio.run(law())

    def test_an_earlier_layout_is_refused_with_a_remedy(self, any_server: RedisServer) -> None:
        async def law() -> None:
            async with opened(any_server.url):
                pass
            for layout in range(1, LAYOUT_VERSION):
                any_server.client.hset(f"{PREFIX}:meta", "layout", layout)
                with pytest.raises(StorageError, match=r"earlier lisarec.*backup.*restore.*another key prefix"):
                    await RedisStore.open(any_server.url, [GENERATION])

        asyncio.run(law())

    def test_an_old_server_is_refused(self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(storage.redis.session.redis_session, "OLDEST_SERVER", (99, 0))
        with pytest.raises(StorageError, match="too old"):
            asyncio.run(RedisStore.open(any_server.url, [GENERATION]))

    @pytest.mark.parametrize(
        ("setting", "value"),
        [("appendfsync", "everysec"), ("appendonly", "no"), ("maxmemory-policy", "allkeys-lru")],
    )
    def test_settings_that_lose_events_are_warned_of(
        self, server: RedisServer, caplog: pytest.LogCaptureFixture, setting: str, value: str
    ) -> None:
        async def law() -> None:
            async with opened(server.url):
                assert not caplog.records
            server.client.config_set(setting, value)
            async with opened(server.url):
                (record,) = caplog.records
                assert f"{setting} is {value}" in record.getMessage()

        asyncio.run(law())

    def test_users_and_passwords_are_used_and_not_shown(self, any_server: RedisServer) -> None:
        any_server.client.acl_setuser(
            "app", enabled=True, passwords=["+s3cret:/@"], keys=["lisarec:*"], categories=["+@all", "-@dangerous"]
        )
        host = f"127.0.0.1:{any_server.port}"

        async def law() -> None:
            # this user may ask for neither INFO nor CONFIG
            store = await RedisStore.open(f"redis://app:s3cret%3A%2F%40@{host}", [GENERATION])
            await store.append("main", [click("e")])
            await store.close()
            with pytest.raises(StorageUnavailable, match="Check the user in LISAREC_REDIS_URL") as refused:
                await RedisStore.open(f"redis://app:wr0ng@{host}", [GENERATION])
            assert "wr0ng" not in str(refused.value)

        asyncio.run(law())

    def test_tls_is_used_and_verified(self, tmp_path: Path) -> None:
        certificate, options = make_certificate(tmp_path)
        (other_directory := tmp_path / "other").mkdir()
        port = free_port()
        server = new_server("redis-server", "--tls-port", str(port), *options)

        async def law() -> None:
            url = redis_users().url(port).replace("redis://", "rediss://")
            async with opened(f"{url}?ssl_ca_certs={certificate}") as store:
                await store.append("main", [click("e")])
            other = f"{url}?ssl_ca_certs={make_certificate(other_directory)[0]}"
            elsewhere = f"{url.replace('127.0.0.1', 'localhost')}?ssl_ca_certs={certificate}"
            for refused, remedy in ((url, "ssl_ca_certs=FILE"), (other, "ssl_ca_certs=FILE"), (elsewhere, "Alt")):
                async with opened(refused) as store:
                    with pytest.raises(StorageUnavailable, match=remedy) as failed:
                        await store.ping()
                assert failed.value.failure_cause == "refused"
                with pytest.raises(StorageUnavailable, match=remedy), RedisSource.open(refused):
                    pass

        try:
            asyncio.run(law())
        finally:
            server.stop()

    def test_a_cluster_may_use_tls(self, tmp_path: Path) -> None:
        async def law() -> None:
            users = [f"user-{number}" for number in range(20)]  # on every node
            async with opened(url) as store:
                await store.append("main", [click("e", user_id) for user_id in users])
                assert all(await store.states("main", users, GENERATION))

        with tls_cluster(tmp_path) as url:
            asyncio.run(law())

    def test_server_replica_and_service_may_use_client_certificates(self, tmp_path: Path) -> None:
        certificate, options = make_certificate(tmp_path)
        options += ["--tls-auth-clients", "yes", "--tls-replication", "yes", "--repl-diskless-sync-delay", "0"]
        ports = free_port(), free_port()
        primary, replica = (new_server("redis-server", *options, "--tls-port", str(port)) for port in ports)
        replica.client.config_set("masteruser", "replica")
        replica.client.config_set("masterauth", replica_options(redis_users(), ports[0])[3])
        replica.client.replicaof("127.0.0.1", ports[0])
        url = f"{redis_users().url(ports[0]).replace('redis://', 'rediss://')}?ssl_ca_certs={certificate}"

        async def law() -> None:
            shown = f"{url}&ssl_certfile={certificate}&ssl_keyfile={tmp_path / 'key.pem'}"
            async with opened(shown, acks=ReplicaAcks(1)) as store:
                await until_applied(store, [click("e")])
            with pytest.raises(StorageUnavailable):
                async with opened(url) as nobody:
                    await nobody.ping()

        try:
            asyncio.run(law())
        finally:
            replica.stop()
            primary.stop()

    @pytest.mark.parametrize(
        ("url", "options"),
        [
            ("http://localhost", {}),
            ("redis://localhost", {"prefix": "a{b"}),
            ("redis://localhost", {"prefix": ""}),
            ("rediss://localhost?ssl_cacert=/etc/ssl/certs", {}),
            ("rediss://localhost?ssl_ca_certs=/nowhere/ca.crt", {}),
        ],
    )
    def test_unusable_servers_are_refused(self, url: str, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"redis://|prefix|unknown option.*ssl_cacert|'/nowhere/ca.crt'"):
            asyncio.run(RedisStore.open(url, [GENERATION], **options))
