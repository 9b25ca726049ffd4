"""Acknowledgement only after replication."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import pytest

from storage.errors import PartlyApplied, StorageError, StorageUnavailable
from storage.redis.connections.nodes import ReplicaAcks
from storage.redis.layout.head import Head, MergeStage
from storage.redis.scripts.events import COMMIT
from tests.storage.oracles.random_events import click
from tests.storage.redis.overtaken import overtake
from tests.storage.redis.servers import RedisCluster, RedisServer, new_replica, new_server
from tests.storage.redis.stores import (
    assert_state_is_fold_of_log,
    ids,
    opened,
    until_applied,
    user_of,
    users_by_node,
)
from tests.waiting import PATIENCE_S


class TestReplicas:
    @pytest.fixture
    def pair(self) -> Iterator[tuple[RedisServer, RedisServer]]:
        """A server and its replica."""
        primary = new_server("redis-server")
        replica = new_replica("redis-server", primary)
        yield primary, replica
        replica.stop()
        primary.stop()

    def test_events_are_acknowledged_after_replication(self, pair: tuple[RedisServer, RedisServer]) -> None:
        """Also resends of logged events; replicated ones are distinguished from others."""
        primary, replica = pair
        acks = ReplicaAcks(replicas=1, timeout_s=0.3)
        events = [click("e", user_id) for user_id in "abcdefgh"]  # several partitions: a transaction

        async def law() -> None:
            async with opened(primary.url, acks=acks) as store:
                await until_applied(store, [click("before", "a")])
                replica.freeze()
                for attempt in (events, events, events[:1]):
                    with pytest.raises(
                        StorageUnavailable, match="only 0 of 1 Redis replicas have the write"
                    ) as refused:
                        await store.append("main", attempt)
                    assert not isinstance(refused.value, PartlyApplied)
                    assert refused.value.failure_cause == "unconfirmed"
                for _ in range(2):
                    with pytest.raises(StorageUnavailable):
                        await store.erase("main", "h")
                assert await ids(store, "a") == ["before", "e"]  # logged all the same
                replica.thaw()
                await until_applied(store, events)
                assert await ids(store, "a") == ["before", "e"]
                primary.kill()
                async with opened(replica.url) as left:
                    assert await ids(left, "a") == ["before", "e"]
                    for user_id in "abcdefg":
                        await assert_state_is_fold_of_log(left, user_id)

        asyncio.run(law())

    def test_results_of_a_refused_commit_wait_for_replication(
        self, pair: tuple[RedisServer, RedisServer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        primary, replica = pair

        async def law() -> None:
            acks = ReplicaAcks(replicas=1, timeout_s=0.3)
            async with opened(primary.url, acks=acks) as store, opened(primary.url) as other:
                await until_applied(store, [click("before")])
                replica.freeze()
                overtake(monkeypatch, COMMIT.sha, lambda: other.append("main", [click("other")]))
                with pytest.raises(StorageUnavailable, match="only 0 of 1 Redis replicas have the write"):
                    await store.append("main", [click("other"), click("own")])
                assert await ids(store) == ["before", "other"]
            replica.thaw()
            patient = ReplicaAcks(replicas=1, timeout_s=PATIENCE_S)
            async with opened(primary.url, acks=patient) as store:
                answers = await store.append("main", [click("other"), click("own")])
                assert [answer.duplicate for answer in answers] == [True, False]

        asyncio.run(law())

    def test_undo_and_merge_are_acknowledged_after_replication(self, pair: tuple[RedisServer, RedisServer]) -> None:
        """Also repeated ones; no visitor is removed whose copies may be lost."""
        primary, replica = pair
        acks = ReplicaAcks(replicas=1, timeout_s=0.3)
        lacks = "only 0 of 1 Redis replicas have the write"

        async def law() -> None:
            async with opened(primary.url, acks=acks) as store:
                await until_applied(store, [click(f"e{n}", user_id, n) for n in range(3) for user_id in "uv"])
                replica.freeze()
                for _ in range(2):
                    with pytest.raises(StorageUnavailable, match=lacks):
                        await store.undo("main", "u", "e1")
                    with pytest.raises(StorageUnavailable, match=lacks):
                        await store.merge("main", "u", "v")
                assert Head.of(primary.client.get(user_of(primary.url, "v").head)).merge is MergeStage.DECIDED
                replica.thaw()
                async with asyncio.timeout(PATIENCE_S):
                    while True:
                        with suppress(StorageUnavailable):
                            assert not await store.undo("main", "u", "e1")
                            await store.merge("main", "u", "v")
                            break
                primary.kill()
                async with opened(replica.url) as left:
                    posted = ["e0", "e1", "e2", "undo e1", "v/e0", "v/e1", "v/e2"]
                    assert await ids(left, "u") == posted
                    assert await ids(left, "v") == posted

        asyncio.run(law())

    def test_each_cluster_node_waits_for_its_own_replica(self) -> None:
        cluster = RedisCluster(timeout_ms=15_000, has_replicas=True)

        async def law() -> None:
            address = cluster.url
            by_node = users_by_node(cluster, address, 2)
            users = [user_id for some in by_node.values() for user_id in some]
            async with opened(address, acks=ReplicaAcks(replicas=1, timeout_s=0.3)) as store:
                await until_applied(store, [click("before", user_id) for user_id in users])
                cluster.replicas[0].freeze()
                without, acknowledged = set(by_node[cluster.primaries[0]]), set[str]()
                async with asyncio.timeout(PATIENCE_S):
                    while acknowledged != set(users) - without:  # the other replicas may be slow
                        with pytest.raises(StorageUnavailable) as refused:
                            await store.append("main", [click("e", user_id) for user_id in users])
                        applied = refused.value.results if isinstance(refused.value, PartlyApplied) else {}
                        acknowledged = {users[position] for position in applied}
                        assert not acknowledged & without
                cluster.replicas[0].thaw()
                await until_applied(store, [click("e", user_id) for user_id in users])
                for user_id in users:
                    assert await ids(store, user_id) == ["before", "e"]

        try:
            asyncio.run(law())
        finally:
            cluster.stop()

    def test_events_are_acknowledged_after_the_replica_has_synced(self) -> None:
        """A copy in memory does not count, nor does a server that does not sync."""
        primary = new_server("valkey-server", "--appendfsync", "everysec")
        replica = new_replica("valkey-server", primary)
        replica.client.config_set("appendonly", "no")

        async def law() -> None:
            async with opened(primary.url, acks=ReplicaAcks(replicas=1, timeout_s=0.3)) as store:
                await until_applied(store, [click("before")])  # in memory it is
            async with opened(primary.url, acks=ReplicaAcks(replicas=1, timeout_s=2, synced=True)) as store:
                with pytest.raises(StorageUnavailable, match="only 0 of 1 Redis replicas have the write"):
                    await store.append("main", [click("e")])
                replica.client.config_set("appendonly", "yes")
                await until_applied(store, [click("e")])
                primary.client.config_set("appendonly", "no")
                with pytest.raises(StorageError):
                    await store.append("main", [click("f")])
            primary.kill()
            replica.kill()  # what was acknowledged is on its disk
            replica.start()
            replica.client.replicaof("NO", "ONE")
            async with opened(replica.url) as left:
                assert (await ids(left, "u"))[:2] == ["before", "e"]

        try:
            asyncio.run(law())
        finally:
            replica.stop()
            primary.stop()

    def test_a_server_without_replicas_syncs_before_acknowledgement(self) -> None:
        """Even one configured to sync every second."""
        server = new_server("valkey-server", "--appendfsync", "everysec")
        assert "has not synced the write yet" in str(ReplicaAcks(synced=True).failure_in([0, 0]))

        async def law() -> None:
            async with opened(server.url, acks=ReplicaAcks(timeout_s=10, synced=True)) as store:
                assert not (await store.append("main", [click("e")]))[0].duplicate
                server.client.config_set("appendonly", "no")
                with pytest.raises(StorageError):
                    await store.append("main", [click("f")])

        try:
            asyncio.run(law())
        finally:
            server.stop()

    def test_a_server_without_waitaof_is_refused(self, cluster: RedisCluster) -> None:
        version = tuple(map(int, cluster.primaries[0].client.info("server")["redis_version"].split(".")[:2]))

        async def law() -> None:
            async with opened(cluster.new_address(), acks=ReplicaAcks(1, 0.1, synced=True)) as store:
                await store.append("main", [click("e")])

        refusal = (
            "cannot tell what its replicas have synced"
            if version < (7, 2)
            else "only 0 of 1 Redis replicas have the write"
        )
        with pytest.raises(StorageError, match=refusal):
            asyncio.run(law())
