"""Migration of slots in a Redis Cluster."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

import pytest
from redis.crc import key_slot

from benchmarks.harness.redis_cluster import command
from storage.archive.writer import ArchiveWriter
from storage.archiver.archiver import archive_log
from storage.archiver.redis_source import RedisSource
from storage.errors import StorageUnavailable
from storage.redis.store import RedisStore
from storage.state.event import Event
from tests.storage.oracles.naive_fold import assert_state_is, fold
from tests.storage.oracles.random_events import click, fresh_user, make_newer
from tests.storage.redis.servers import RedisCluster
from tests.storage.redis.stores import (
    GENERATION,
    assert_state_is_fold_of_log,
    ids,
    opened,
    until_applied,
    user_of,
    users_by_node,
)
from tests.waiting import PATIENCE_S


@pytest.fixture
def address(cluster: RedisCluster) -> str:
    return cluster.new_address()


class TestSlots:
    def test_migrating_slots_under_load_loses_and_duplicates_nothing(self, cluster: RedisCluster, address: str) -> None:
        """Known and new users in migrating partitions; every event is sent twice."""
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

    def test_merges_during_slot_migration_keep_every_event_once(self, cluster: RedisCluster, address: str) -> None:
        """Visitor and user are on different nodes, both slots move, and both get events and undos."""
        one_node, other_node, _ = users_by_node(cluster, address, 8).values()
        pairs = list(zip(one_node, other_node, strict=True))

        async def keep_sending(store: RedisStore, visitor: str, user_id: str, is_over: asyncio.Event) -> int:
            sent = 0
            while not is_over.is_set():
                sent += 1
                await until_applied(store, [click(f"v{sent}", visitor, sent % 12), click(f"u{sent}", user_id)])
            return sent

        async def merge(store: RedisStore, visitor: str, user_id: str) -> None:
            async with asyncio.timeout(PATIENCE_S):
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
                    log = [entry.record for entry in await two.events("main", user_id, limit=10**6)]
                    logged = [event.entry_id for event in log]
                    posted = {f"u{n}" for n in range(1, sent + 1)} | {f"{visitor}/v{n}" for n in range(1, sent + 1)}
                    assert len(logged) == len(set(logged))
                    taken_back = {f"{visitor}/v1", f"undo {visitor}/v1"}
                    assert set(logged) == posted | taken_back
                    assert await ids(two, visitor) == logged
                    (state,) = await two.states("main", [visitor], GENERATION)
                    counted = [one for one in log if isinstance(one, Event) and one.entry_id not in taken_back]
                    assert_state_is(state, fold(GENERATION, counted))

        asyncio.run(law())

    async def test_a_node_accepts_events_while_it_receives_its_first_slot(self, own_cluster: RedisCluster) -> None:
        """All keys are there, and other nodes still redirect to it."""
        node, user_id = own_cluster.add_node(), fresh_user()
        head = user_of(own_cluster.url, user_id).head
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

    async def test_users_without_events_are_recognised_during_slot_migration(
        self, cluster: RedisCluster, address: str
    ) -> None:
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

    def test_the_archiver_archives_and_trims_every_node(
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
                    log = [entry.record for entry in await store.events("main", user_id)]
                    assert_state_is(state, fold(newer, log))

        asyncio.run(law())
