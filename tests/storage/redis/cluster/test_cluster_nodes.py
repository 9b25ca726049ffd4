"""Failures of single nodes of a Redis Cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from redis.crc import key_slot

from benchmarks.harness.redis_cluster import SLOTS, command, wait_until
from benchmarks.harness.service_process import free_port
from storage.errors import PartlyApplied, PartlyRead, StorageError, StorageUnavailable
from storage.redis.layout.keys import Keyspace
from storage.redis.session.data_loss_check import EXAMINE_EVERY_S
from storage.redis.store import PARTITIONS, RedisStore
from tests.storage.oracles.random_events import click, fresh_user
from tests.storage.redis.servers import RedisCluster, RedisServer, new_server, redis_users, running_cluster
from tests.storage.redis.stores import (
    GENERATION,
    assert_state_is_fold_of_log,
    ids,
    opened,
    poll_until,
    refusal,
    until_applied,
    until_it_succeeds,
    user_of,
    users_by_node,
)
from tests.waiting import PATIENCE_S


def slots_known(node: RedisServer) -> int:
    """Number of slots with a known owner, as the node sees it."""
    return int(command(node.client, "CLUSTER INFO")["cluster_slots_assigned"])


async def refused_for_loss(call: Callable[[], Awaitable[object]]) -> None:
    """Call until the store reports a data loss; the call must never succeed."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with pytest.raises(StorageUnavailable) as refused:
                await call()
            if "has lost acknowledged events" in str(refused.value):
                return


class TestNodesFail:
    def test_users_on_other_nodes_are_served_while_a_node_is_down(self, own_cluster: RedisCluster) -> None:
        address = own_cluster.url
        by_node = users_by_node(own_cluster, address, 2)
        first = own_cluster.owner(Keyspace("lisarec", PARTITIONS).meta)  # without it nobody could begin
        dead = next(node for node in by_node if node is not first)
        lost = by_node.pop(dead)
        served = [user_id for some in by_node.values() for user_id in some]

        async def law() -> None:
            async with opened(address) as store:
                await store.append("main", [click("before", user_id) for user_id in (*lost, *served)])
                dead.kill()
                for number in range(3):
                    for user_id in served:
                        await store.append("main", [click(f"meanwhile{number}", user_id)])
                        await assert_state_is_fold_of_log(store, user_id)
                    for call in (
                        store.append("main", [click("lost", lost[0])]),
                        store.states("main", lost, GENERATION),
                        store.events("main", lost[0]),
                        store.ping(),
                    ):
                        with pytest.raises(StorageUnavailable):
                            await call
                mixed = [click("mixed", user_id) for user_id in (lost[0], served[0], lost[1], served[1])]
                with pytest.raises(PartlyApplied) as applied:
                    await store.append("main", mixed)
                assert list(applied.value.results) == [1, 3]
                with pytest.raises(PartlyRead) as read:
                    await store.states("main", [*lost, *served, "nobody"], GENERATION)
                assert served == [user_id for user_id in read.value.values if user_id != "nobody"]
                async with opened(address) as another:  # begins by asking a node that is away
                    meanwhile = [f"meanwhile{number}" for number in range(3)]
                    assert await ids(another, served[0]) == ["before", *meanwhile, "mixed"]
                await asyncio.to_thread(dead.start)
                await until_applied(store, mixed)
                for user_id in lost:
                    assert await ids(store, user_id) == ["before", "mixed"]
                for user_id in (*lost, *served):
                    await assert_state_is_fold_of_log(store, user_id)

        asyncio.run(law())

    def test_an_unassigned_slot_is_an_unavailable_server(self, own_cluster: RedisCluster) -> None:
        user_id = fresh_user()
        head = user_of(own_cluster.url, user_id).head
        slot, owner = key_slot(head.encode()), own_cluster.owner(head)
        command(owner.client, "CLUSTER", "DELSLOTS", slot)

        def is_forgotten() -> bool:  # a message that was under way may give a node's slot back to its owner
            holders = [node for node in own_cluster.primaries if slots_known(node) > SLOTS - 1]
            for node in holders:
                command(node.client, "CLUSTER", "DELSLOTS", slot)
            return not holders

        wait_until(is_forgotten)

        async def law() -> None:
            async with opened(own_cluster.url) as store:
                for call in (store.ping(), store.append("main", [click("e", user_id)])):
                    with pytest.raises(StorageUnavailable):
                        await call
                command(owner.client, "CLUSTER", "ADDSLOTS", slot)
                await until_it_succeeds(store.ping)

        asyncio.run(law())

    def test_a_hung_node_delays_no_users_on_others(self, own_cluster: RedisCluster) -> None:
        address = own_cluster.url
        (frozen, (lost, _)), (_, (served, _)), _ = users_by_node(own_cluster, address, 2).items()

        async def law() -> None:
            async with opened(address) as store:
                await store.append("main", [click("before", user_id) for user_id in (lost, served)])
                frozen.freeze()
                hanging = [
                    asyncio.create_task(store.append("main", [click("hangs", lost)])),
                    asyncio.create_task(store.states("main", [lost], GENERATION)),
                    *(asyncio.create_task(store.events("main", lost)) for _ in range(20)),
                ]
                for number in range(20):
                    await store.append("main", [click(f"e{number}", served)])
                    await assert_state_is_fold_of_log(store, served)
                assert not any(task.done() for task in hanging)
                frozen.thaw()
                outcomes = await asyncio.gather(*hanging, return_exceptions=True)
                assert all(isinstance(outcome, list | StorageUnavailable) for outcome in outcomes)
                await until_applied(store, [click("hangs", lost)])
                assert await ids(store, lost) == ["before", "hangs"]

        asyncio.run(law())

    def test_any_node_leads_to_the_cluster_and_other_servers_are_refused(self, cluster: RedisCluster) -> None:
        prefix = cluster.new_address().partition(" ")[2]
        nobody = free_port()
        alone = new_server("redis-server")

        async def law() -> None:
            users = [fresh_user() for _ in range(20)]
            for number, node in enumerate(cluster.primaries):
                async with opened(f"{redis_users().cluster_url([nobody, node.port])} {prefix}") as store:
                    await store.append("main", [click(f"e{number}", user_id) for user_id in users])
                    assert {len(await ids(store, user_id)) for user_id in users} == {number + 1}
            with pytest.raises(StorageError, match="not in a cluster"):
                await RedisStore.open(redis_users().cluster_url([nobody, alone.port]), [GENERATION])

        try:
            asyncio.run(law())
        finally:
            alone.stop()

    def test_unsafe_settings_of_any_node_are_reported(
        self, own_cluster: RedisCluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)

        async def law() -> list[str]:
            caplog.clear()
            async with opened(own_cluster.url):
                return [record.getMessage() for record in caplog.records]

        assert asyncio.run(law()) == []
        own_cluster.primaries[1].client.config_set("appendfsync", "everysec")
        own_cluster.primaries[2].client.config_set("cluster-require-full-coverage", "yes")
        lossy, stopping = asyncio.run(law())
        assert "appendfsync is everysec, not always" in lossy
        assert "cluster-require-full-coverage is yes" in stopping


class TestNodesLoseData:
    def test_an_uninformed_process_does_not_undo_an_acceptance(
        self, cluster: RedisCluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The acceptance is recorded on another node than the lost data."""

        async def law() -> None:
            address = cluster.new_address()
            prefix = address.partition(" ")[2]
            of_meta = cluster.owner(f"{prefix}:meta")
            by_node = users_by_node(cluster, address, 1)
            node, (user_id,) = next(found for found in by_node.items() if found[0] is not of_meta)
            async with opened(address) as store:
                await store.append("main", [click("1", user_id)])
                node.client.delete(*node.client.scan_iter(f"{prefix}:*"))
                node.client.client_kill_filter(_type="normal", skipme=True)
                assert "has lost acknowledged events" in await refusal(store, user_id)
                async with opened(address) as command:
                    await command.accept_loss()
                    await command.append("main", [click("2", user_id)])  # it knows at once
                await asyncio.sleep(EXAMINE_EVERY_S)
                await refusal(store, user_id)
                async with opened(address) as later:
                    await later.append("main", [click("3", user_id)])
                await poll_until(store, lambda: "was accepted" in caplog.text)
                await until_applied(store, [click("4", user_id)])
                assert (await ids(store, user_id))[-3:] == ["2", "3", "4"]

        asyncio.run(law())

    @pytest.mark.parametrize("lost", ["a node", "the node of the meta"])
    def test_a_node_that_lost_its_data_is_detected(self, lost: str) -> None:
        async def law() -> None:
            cluster = running_cluster()
            address = cluster.new_address()
            prefix = address.partition(" ")[2]
            users = users_by_node(cluster, address, 3)
            async with opened(address) as store:
                await store.append("main", [click("1", user_id) for some in users.values() for user_id in some])
            of_meta = cluster.owner(f"{prefix}:meta")
            node = of_meta if lost == "the node of the meta" else next(one for one in users if one is not of_meta)
            for key in list(node.client.scan_iter(f"{prefix}:*")):
                node.client.delete(key)
            async with opened(address) as later:
                for other, own in users.items():
                    if other is node:
                        for user_id in own:
                            assert "has lost acknowledged events" in await refusal(later, user_id)
                    else:
                        await later.append("main", [click("2", user_id) for user_id in own])
                        assert await ids(later, own[0]) == ["1", "2"]

        asyncio.run(law())

    def test_merges_on_a_node_with_older_files_are_not_trusted(self, own_cluster: RedisCluster, tmp_path: Path) -> None:
        """The node has missed the erasure of a merge, so the user behind it may not be touched."""
        by_node = users_by_node(own_cluster, own_cluster.url, 1)
        (node, (visitor,)), (_, (ada,)), _ = by_node.items()

        async def law() -> None:
            async with opened(own_cluster.url) as store:
                await store.append("main", [click("1", visitor), click("1", ada)])
                await store.merge("main", ada, visitor)
                older = node.copy_data(tmp_path / "older")
                await store.erase("main", ada)
                await store.append("main", [click("2", visitor), click("2", ada)])
                newer = node.copy_data(tmp_path / "newer")
                node.restart_with(older)
                for call in (
                    lambda: store.erase("main", visitor),
                    lambda: store.events("main", visitor),
                    lambda: store.undo("main", visitor, "1"),
                    lambda: store.append("main", [click("3", visitor)]),
                ):
                    await refused_for_loss(call)
                assert await ids(store, ada) == ["2"]
                node.restart_with(newer)
                await until_applied(store, [click("4", visitor)])
                assert (await ids(store, visitor), await ids(store, ada)) == (["2", "4"], ["2"])

        asyncio.run(law())
