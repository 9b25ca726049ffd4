"""What only a cluster has: slots that move and nodes that fail one by one; and waiting for copies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

import storage.redis
from benchmarks.cluster import command
from storage.archive import ArchiveWriter
from storage.archiver import archive_log
from storage.archiver_redis_source import RedisSource
from storage.errors import PartlyApplied, PartlyRead, StorageError, StorageUnavailable
from storage.redis import RedisStore
from storage.redis_layout import Head, Keyspace, Move, User
from storage.redis_servers import Copies
from storage.state import Generation
from tests.storage.catalogue import click, fresh_user, make_generation, make_newer
from tests.storage.naive_fold import assert_state_is, fold
from tests.storage.redis_servers import (
    RedisCluster,
    RedisServer,
    free_port,
    new_replica,
    new_server,
    redis_users,
    running_cluster,
)

GENERATION = make_generation()
RECOVERY_S = 30.0
PARTITIONS = storage.redis.PARTITIONS


@asynccontextmanager
async def opened(
    address: str, generations: Sequence[Generation] = (GENERATION,), **options: Any
) -> AsyncIterator[RedisStore]:
    url, _, prefix = address.partition(" ")
    store = await RedisStore.open(url, generations, prefix=prefix or "lisarec", **{"socket_timeout_s": 1.0} | options)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(scope="module")
def cluster() -> RedisCluster:
    return running_cluster()


@pytest.fixture
def address(cluster: RedisCluster) -> str:
    return cluster.new_address()


@pytest.fixture
def own_cluster() -> Iterator[RedisCluster]:
    """One to break."""
    cluster = RedisCluster(timeout_ms=1_000)
    yield cluster
    cluster.stop()


def user_of(address: str, user_id: str) -> User:
    return Keyspace(address.partition(" ")[2] or "lisarec", PARTITIONS).user("main", user_id)


def users_by_node(cluster: RedisCluster, address: str, each: int) -> dict[RedisServer, list[str]]:
    users: dict[RedisServer, list[str]] = {node: [] for node in cluster.primaries}
    while any(len(some) < each for some in users.values()):
        user_id = fresh_user()
        some = users[cluster.owner(user_of(address, user_id).head)]
        if len(some) < each:
            some.append(user_id)
    return users


async def ids(store: RedisStore, user_id: str) -> list[str]:
    return [entry.event.event_id for entry in await store.events("main", user_id, limit=10**6)]


async def assert_state_is_fold_of_log(store: RedisStore, user_id: str) -> None:
    log = [entry.event for entry in await store.events("main", user_id, limit=10**6)]
    assert len({event.event_id for event in log}) == len(log)
    assert_state_is((await store.states("main", [user_id], GENERATION))[0], fold(GENERATION, log))


async def until_applied(store: RedisStore, events: list[Any]) -> None:
    """As a client does: send the same again until it is acknowledged."""
    async with asyncio.timeout(RECOVERY_S):
        while True:
            try:
                await store.append("main", events)
            except StorageUnavailable:
                await asyncio.sleep(0.05)
            else:
                return


class TestSlots:
    def test_slots_that_move_under_load_lose_and_double_nothing(self, cluster: RedisCluster, address: str) -> None:
        """Known users and new ones, of the partitions that move; every event is sent twice."""
        before = cluster.redirections()

        async def law() -> None:
            known = [fresh_user() for _ in range(2)]
            partitions = [user_of(address, user_id).partition for user_id in known]
            new = (user for _ in range(9999) if user_of(address, user := fresh_user()).partition in partitions)
            users = [*known, *islice(new, 12)]
            is_over = False
            sent = 0

            async def keep_sending(store: RedisStore, lane: int) -> None:
                nonlocal sent
                while not is_over:
                    number, sent = sent, sent + 1
                    await until_applied(store, [click(f"e{number}", users[number % len(users)], number % 12)])
                    await until_applied(store, [click(f"e{number}", users[number % len(users)], number % 12)])
                    with suppress(StorageUnavailable):
                        await store.states("main", users[lane : lane + 3], GENERATION)

            async with opened(address) as one, opened(address) as two:
                await until_applied(one, [click("first", user_id) for user_id in known])
                lanes = [asyncio.create_task(keep_sending((one, two)[lane % 2], lane)) for lane in range(6)]
                loop = asyncio.get_running_loop()

                def let_it_be_used() -> None:
                    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result()

                for _ in range(2):
                    for user_id in known:
                        await asyncio.to_thread(cluster.move, user_of(address, user_id).head, let_it_be_used)
                is_over = True
                await asyncio.gather(*lanes)
                logged = [event_id for user_id in users for event_id in await ids(two, user_id)]
                assert sorted(logged) == sorted([*["first"] * len(known), *(f"e{number}" for number in range(sent))])
                for user_id in users:
                    await assert_state_is_fold_of_log(one, user_id)

        asyncio.run(law())
        after = cluster.redirections()
        for kind in ("MOVED", "ASK", "TRYAGAIN"):
            assert after.get(kind, 0) > before.get(kind, 0)

    def test_users_who_become_others_while_slots_move_keep_every_event_once(
        self, cluster: RedisCluster, address: str
    ) -> None:
        """Visitor and user are on different nodes, both slots move, and events and undos go on for both of them."""
        one_node, other_node, _ = users_by_node(cluster, address, 8).values()
        pairs = list(zip(one_node, other_node, strict=True))

        async def keep_sending(store: RedisStore, visitor: str, user_id: str, is_over: asyncio.Event) -> int:
            sent = 0
            while not is_over.is_set():
                sent += 1
                await until_applied(store, [click(f"v{sent}", visitor, sent % 12), click(f"u{sent}", user_id)])
            return sent

        async def merge(store: RedisStore, visitor: str, user_id: str) -> None:
            async with asyncio.timeout(RECOVERY_S):
                for _ in range(2):  # the second changes nothing
                    while True:
                        with suppress(StorageUnavailable):
                            await store.merge("main", user_id, visitor)
                            await store.undo("main", user_id, f"{visitor}/v1")
                            break
                        await asyncio.sleep(0.05)

        async def law() -> None:
            is_over = asyncio.Event()
            async with opened(address) as one, opened(address) as two:
                await until_applied(one, [click("v1", visitor, 1) for visitor, _ in pairs])
                sending = [asyncio.create_task(keep_sending(one, *pair, is_over)) for pair in pairs]
                waiting = list(pairs)
                merging: list[asyncio.Task[None]] = []
                loop = asyncio.get_running_loop()

                async def begin_a_merge() -> None:
                    if waiting:
                        merging.append(asyncio.create_task(merge((one, two)[len(waiting) % 2], *waiting.pop())))
                    await asyncio.sleep(0.01)

                def meanwhile() -> None:
                    asyncio.run_coroutine_threadsafe(begin_a_merge(), loop).result()

                for user_id in pairs[0] + pairs[-1]:
                    await asyncio.to_thread(cluster.move, user_of(address, user_id).head, meanwhile)
                assert merging
                assert not waiting
                await asyncio.gather(*merging)
                is_over.set()
                for (visitor, user_id), sent in zip(pairs, await asyncio.gather(*sending), strict=True):
                    log = [entry.event for entry in await two.events("main", user_id, limit=10**6)]
                    logged = [event.event_id for event in log]
                    posted = {f"u{n}" for n in range(1, sent + 1)} | {f"{visitor}/v{n}" for n in range(1, sent + 1)}
                    assert len(logged) == len(set(logged))
                    taken_back = {f"{visitor}/v1", f"!undo {visitor}/v1"}
                    assert set(logged) == posted | taken_back
                    assert await ids(two, visitor) == logged
                    (state,) = await two.states("main", [visitor], GENERATION)
                    assert_state_is(state, fold(GENERATION, [one for one in log if one.event_id not in taken_back]))

        asyncio.run(law())

    def test_a_node_that_gets_its_first_slot_takes_events_before_it_has_it(self, own_cluster: RedisCluster) -> None:
        """All keys are there already, and the others still send everybody who asks."""
        node, user_id = own_cluster.add_node(), fresh_user()
        head = user_of(own_cluster.url, user_id).head

        async def law() -> None:
            async with opened(own_cluster.url) as store:
                await store.append("main", [click("before", user_id)])
                loop = asyncio.get_running_loop()

                def append() -> None:
                    if not command(source, "CLUSTER", "COUNTKEYSINSLOT", key_slot(head.encode())):
                        appended = store.append("main", [click("meanwhile", user_id)])
                        asyncio.run_coroutine_threadsafe(appended, loop).result()

                source = own_cluster.owner(head).client
                await asyncio.to_thread(own_cluster.move, head, append, node)
                assert await ids(store, user_id) == ["before", "meanwhile"]
                await assert_state_is_fold_of_log(store, user_id)

        asyncio.run(law())

    def test_users_without_events_are_told_so_while_their_slot_moves(self, cluster: RedisCluster, address: str) -> None:
        async def law() -> None:
            known = fresh_user()
            partition = user_of(address, known).partition
            unknown = next(user for _ in range(9999) if user_of(address, user := fresh_user()).partition == partition)
            async with opened(address) as store:
                await store.append("main", [click("e", known)])
                loop = asyncio.get_running_loop()
                answers = []

                def ask() -> None:
                    states = store.states("main", [unknown, known], GENERATION)
                    answers.append(asyncio.run_coroutine_threadsafe(states, loop).result())

                await asyncio.to_thread(cluster.move, user_of(address, known).head, ask)
                assert len(answers) > 3
                for nothing, state in answers:
                    assert nothing is None
                    assert_state_is(state, fold(GENERATION, [click("e", known)]))

        asyncio.run(law())

    def test_the_archiver_takes_and_trims_every_node_s_part(
        self, cluster: RedisCluster, address: str, tmp_path: Path
    ) -> None:
        url, _, prefix = address.partition(" ")
        users = [user_id for some in users_by_node(cluster, address, 2).values() for user_id in some]

        def turn() -> int:
            now = datetime.now(UTC) + timedelta(seconds=1)
            with RedisSource.open(url, prefix) as log, ArchiveWriter.open(tmp_path) as writer:
                return archive_log(log, writer, now, keep_tail_s=0, keep_days=None).archived

        async def law() -> None:
            async with opened(address, archive_dir=tmp_path) as store:
                events = [click(f"e{number}", user_id, number) for user_id in users for number in range(3)]
                await store.append("main", events)
                assert await asyncio.to_thread(turn) == len(events)
                await store.append("main", [click("new", user_id) for user_id in users])
                assert await asyncio.to_thread(turn) == len(users)
                assert all(answer.duplicate for answer in await store.append("main", events))
                await store.erase("main", users[0])
                assert await asyncio.to_thread(turn) == 0
                assert await ids(store, users[0]) == []
                for user_id in users[1:]:
                    assert await ids(store, user_id) == ["e0", "e1", "e2", "new"]
                    newer = make_newer()
                    (state,) = await store.states("main", [user_id], newer)
                    log = [entry.event for entry in await store.events("main", user_id)]
                    assert_state_is(state, fold(newer, log))

        asyncio.run(law())


class TestNodesFail:
    def test_while_a_node_is_killed_the_others_users_are_served_and_written(self, own_cluster: RedisCluster) -> None:
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
                assert applied.value.applied == (1, 3)
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

    def test_a_node_that_hangs_holds_up_nobody_else(self, own_cluster: RedisCluster) -> None:
        address = own_cluster.url
        (frozen, (lost, _)), (_, (served, _)), _ = users_by_node(own_cluster, address, 2).items()

        async def law() -> None:
            async with opened(address, socket_timeout_s=RECOVERY_S) as store:
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

    def test_any_node_that_is_named_leads_to_all_and_a_server_that_is_none_is_refused(
        self, cluster: RedisCluster
    ) -> None:
        prefix = cluster.new_address().partition(" ")[2]
        nobody = free_port()
        alone = new_server("redis-server")

        async def law() -> None:
            users = [fresh_user() for _ in range(20)]
            for number, node in enumerate(cluster.primaries):
                async with opened(f"{redis_users().cluster_url([nobody, node.port])} {prefix}") as store:
                    await store.append("main", [click(f"e{number}", user_id) for user_id in users])
                    assert {len(await ids(store, user_id)) for user_id in users} == {number + 1}
            with pytest.raises(StorageError, match="in no cluster"):
                await RedisStore.open(redis_users().cluster_url([nobody, alone.port]), [GENERATION])

        try:
            asyncio.run(law())
        finally:
            alone.stop()

    def test_settings_of_any_node_that_lose_events_or_everybody_are_said(
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


class TestCopies:
    @pytest.fixture
    def pair(self) -> Iterator[tuple[RedisServer, RedisServer]]:
        """A server and a replica that follows it."""
        primary = new_server("redis-server")
        replica = new_replica("redis-server", primary)
        yield primary, replica
        replica.stop()
        primary.stop()

    def test_nothing_is_acknowledged_before_the_replica_has_it(self, pair: tuple[RedisServer, RedisServer]) -> None:
        """Nor what is sent again and was logged the first time; what was not waited for is told apart."""
        primary, replica = pair
        copies = Copies(replicas=1, timeout_s=0.3)
        events = [click("e", user_id) for user_id in "abcdefgh"]  # several partitions: a transaction

        async def law() -> None:
            async with opened(primary.url, copies=copies) as store:
                await until_applied(store, [click("before", "a")])
                replica.freeze()
                for attempt in (events, events, events[:1]):
                    with pytest.raises(StorageUnavailable, match="0 replicas of Redis have it, not 1") as refused:
                        await store.append("main", attempt)
                    assert not isinstance(refused.value, PartlyApplied)
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

    def test_undo_and_merge_are_not_acknowledged_before_the_replica_has_them(
        self, pair: tuple[RedisServer, RedisServer]
    ) -> None:
        """Nor what was done the first time, by whoever did it; and no visitor is done whose copies may be lost."""
        primary, replica = pair
        copies = Copies(replicas=1, timeout_s=0.3)
        lacks = "0 replicas of Redis have it, not 1"

        async def law() -> None:
            async with opened(primary.url, copies=copies) as store:
                await until_applied(store, [click(f"e{n}", user_id, n) for n in range(3) for user_id in "uv"])
                replica.freeze()
                for _ in range(2):
                    with pytest.raises(StorageUnavailable, match=lacks):
                        await store.undo("main", "u", "e1")
                    with pytest.raises(StorageUnavailable, match=lacks):
                        await store.merge("main", "u", "v")
                assert Head.of(primary.client.get(user_of(primary.url, "v").head)).move is Move.DECIDED
                replica.thaw()
                async with asyncio.timeout(RECOVERY_S):
                    while True:
                        with suppress(StorageUnavailable):
                            assert not await store.undo("main", "u", "e1")
                            await store.merge("main", "u", "v")
                            break
                primary.kill()
                async with opened(replica.url) as left:
                    posted = ["e0", "e1", "e2", "!undo e1", "v/e0", "v/e1", "v/e2"]
                    assert await ids(left, "u") == posted
                    assert await ids(left, "v") == posted

        asyncio.run(law())

    def test_of_a_cluster_each_node_waits_for_its_own_replica(self) -> None:
        cluster = RedisCluster(timeout_ms=15_000, has_replicas=True)

        async def law() -> None:
            address = cluster.url
            by_node = users_by_node(cluster, address, 2)
            users = [user_id for some in by_node.values() for user_id in some]
            async with opened(address, copies=Copies(replicas=1, timeout_s=0.3)) as store:
                await until_applied(store, [click("before", user_id) for user_id in users])
                cluster.replicas[0].freeze()
                with pytest.raises(PartlyApplied) as applied:
                    await store.append("main", [click("e", user_id) for user_id in users])
                without = set(by_node[cluster.primaries[0]])
                assert {users[position] for position in applied.value.applied} == set(users) - without
                cluster.replicas[0].thaw()
                await until_applied(store, [click("e", user_id) for user_id in users])
                for user_id in users:
                    assert await ids(store, user_id) == ["before", "e"]

        try:
            asyncio.run(law())
        finally:
            cluster.stop()

    def test_nothing_is_acknowledged_before_the_replica_has_synced_it(self) -> None:
        """One that has it in memory only does not count, nor does a server that does not sync itself."""
        primary = new_server("valkey-server", "--appendfsync", "everysec")
        replica = new_replica("valkey-server", primary)
        replica.client.config_set("appendonly", "no")

        async def law() -> None:
            async with opened(primary.url, copies=Copies(replicas=1, timeout_s=0.3)) as store:
                await until_applied(store, [click("before")])  # in memory it is
            async with opened(primary.url, copies=Copies(replicas=1, timeout_s=0.3, synced=True)) as store:
                with pytest.raises(StorageUnavailable, match="0 replicas of Redis have it, not 1"):
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

    def test_a_server_without_replicas_has_synced_what_is_acknowledged(self) -> None:
        """Also one that is told to sync every second."""
        server = new_server("valkey-server", "--appendfsync", "everysec")
        assert "has not synced it yet" in str(Copies(synced=True).lacking([0, 0]))

        async def law() -> None:
            async with opened(server.url, copies=Copies(timeout_s=10, synced=True)) as store:
                assert not (await store.append("main", [click("e")]))[0].duplicate
                server.client.config_set("appendonly", "no")
                with pytest.raises(StorageError):
                    await store.append("main", [click("f")])

        try:
            asyncio.run(law())
        finally:
            server.stop()

    def test_a_server_that_cannot_wait_for_synced_copies_is_refused(self, cluster: RedisCluster) -> None:
        version = tuple(map(int, cluster.primaries[0].client.info("server")["redis_version"].split(".")[:2]))

        async def law() -> None:
            async with opened(cluster.new_address(), copies=Copies(1, 0.1, synced=True)) as store:
                await store.append("main", [click("e")])

        refusal = "cannot tell what its replicas have synced" if version < (7, 2) else "0 replicas of Redis have it"
        with pytest.raises(StorageError, match=refusal):
            asyncio.run(law())
