"""Repair: lost and damaged data are rebuilt from log and archive, or a loss is accepted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from storage.archive.reader import ArchiveReader, ArchiveSnapshot
from storage.errors import PartlyApplied, StorageError, StorageUnavailable
from storage.redis.layout.keys import Keyspace, User
from storage.redis.log import lost_users
from tests.storage.archive.archived_redis import (
    NOW_MS,
    USERS,
    append_all,
    assert_nothing_is_missing_or_twice,
    ids_of,
    move_all,
    opened,
    seen_of,
    turn,
    uuid7,
)
from tests.storage.contract.stores import FEW_PARTITIONS
from tests.storage.oracles.random_events import click
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import GENERATION
from tests.waiting import PATIENCE_S

MERGED, INTO, UNDONE = USERS[:3]


def user_keys(server: RedisServer, kind: str) -> list[bytes]:
    return list(server.client.scan_iter(f"lisarec:{{p*}}:{kind}:*"))


def damage_everything(server: RedisServer) -> None:
    """Delete every second head; damage the others and their indexes."""
    heads = user_keys(server, "head")
    server.client.delete(*heads[::2], *user_keys(server, "state")[::3])
    for number, head in enumerate(heads[1::2]):
        server.client.set(head, [b"", b"\xff" * 16, b"1" * 15, b"9" * 42 + b"!x"][number % 4])
        server.client.delete(head.replace(b":head:", b":index:"))


Damage = Callable[[Any, User], object]


def lose_index(client: Any, user: User) -> None:
    client.delete(user.id_index)


def lose_an_id(client: Any, user: User) -> None:
    client.zremrangebyrank(user.id_index, 0, 0)


def misplace_an_id(client: Any, user: User) -> None:
    client.zincrby(user.id_index, 1000, client.zrange(user.id_index, 0, 0)[0])


def add_an_id(client: Any, user: User) -> None:
    client.zadd(user.id_index, {b"8 bytes.": 1})


def make_index_a_text(client: Any, user: User) -> None:
    client.set(user.id_index, "text")


def make_state_a_text(client: Any, user: User) -> None:
    client.set(user.state(GENERATION), "text")


def make_state_a_list(client: Any, user: User) -> None:
    client.delete(user.state(GENERATION))
    client.rpush(user.state(GENERATION), "text")


def cut_state_off(client: Any, user: User) -> None:
    client.set(user.state(GENERATION), client.getrange(user.state(GENERATION), 0, 100))


def put_state_ahead(client: Any, user: User) -> None:
    client.setrange(user.state(GENERATION), 0, "0" * 10 + "9" * 6)


def put_state_of_another_generation(client: Any, user: User) -> None:
    client.setrange(user.state(GENERATION), 16 + 8, b"gen two\0")


def lose_merge(client: Any, user: User) -> None:
    client.set(user.head, client.get(user.head)[:42])


def lose_archived_part(client: Any, user: User) -> None:
    client.set(user.head, client.get(user.head)[:16])


def lower_archived_part(client: Any, user: User) -> None:
    client.setrange(user.head, 16, "0" * 16)


def raise_archived_part(client: Any, user: User) -> None:
    client.setrange(user.head, 16, "0" * 10 + "9" * 6)


def lose_id_time(client: Any, user: User) -> None:
    client.setrange(user.head, 32, "0" * 10)


DAMAGES = [
    lose_index,
    lose_an_id,
    misplace_an_id,
    add_an_id,
    make_index_a_text,
    make_state_a_text,
    make_state_a_list,
    cut_state_off,
    put_state_ahead,
    put_state_of_another_generation,
    lose_merge,
]
DAMAGES_OF_ARCHIVED = [lose_archived_part, lower_archived_part, raise_archived_part, lose_id_time]


class TestDamage:
    @pytest.mark.parametrize("is_archived", [False, True], ids=["in Redis", "archived"])
    async def test_repair_restores_everything_that_readers_see(
        self, server: RedisServer, tmp_path: Path, is_archived: bool
    ) -> None:
        directory = tmp_path / "archive" if is_archived else None
        async with opened(server, directory) as store:
            await append_all(store, 0, 5)
            await store.undo("main", UNDONE, f"{UNDONE}-1")
            await store.erase("main", USERS[3])
            if directory is not None:
                await asyncio.to_thread(turn, server, directory)
            await append_all(store, 5, 7)
            await store.merge("main", INTO, MERGED)
            before = await seen_of(store)
            damage_everything(server)
            with pytest.raises(StorageError):
                await append_all(store, 0, 7)
            repaired = await store.repair()
            assert repaired == len(USERS)
            assert await seen_of(store) == before
            assert await append_all(store, 4, 8) == len(USERS) + 1  # of the erased user one more
            assert await store.repair() == 0
        if directory is not None:
            turn(server, directory)

    @pytest.mark.parametrize(
        ("damage", "is_archived"),
        [
            *((damage, is_archived) for damage in DAMAGES for is_archived in (False, True)),
            *((damage, True) for damage in DAMAGES_OF_ARCHIVED),
        ],
        ids=lambda value: getattr(value, "__name__", "archived" if value else "in Redis"),
    )
    async def test_each_damage_of_a_user_is_detected(
        self, any_server: RedisServer, tmp_path: Path, damage: Damage, is_archived: bool
    ) -> None:
        """Of users whose archived entries are partly in the tail, too."""
        directory = tmp_path / "archive"
        async with opened(any_server, directory) as store:
            await append_all(store, 0, 3)
            if is_archived:
                await asyncio.to_thread(turn, any_server, directory)
            await append_all(store, 3, 5)
            await store.append("main", [click(uuid7(NOW_MS, number), USERS[4]) for number in range(2)])
            if is_archived:
                await asyncio.to_thread(turn, any_server, directory)
            await append_all(store, 5, 6)
            if is_archived:
                await asyncio.to_thread(turn, any_server, directory, keep_tail_s=3600)
            await append_all(store, 6, 7)
            await store.merge("main", INTO, MERGED)
            before = await seen_of(store)
            assert await store.repair() == 0
            user = Keyspace("lisarec", FEW_PARTITIONS).user("main", MERGED if damage is lose_merge else USERS[4])
            damage(any_server.client, user)
            assert await store.repair() == 1
            assert await seen_of(store) == before
            assert await append_all(store, 0, 7) == 0
            resent = [click(uuid7(NOW_MS, number), USERS[4]) for number in range(2)]
            assert [result.duplicate for result in await store.append("main", resent)] == [True, True]
            assert await store.repair() == 0

    async def test_repair_finds_nothing_in_a_sound_store_under_load(
        self, any_server: RedisServer, tmp_path: Path
    ) -> None:
        """During events, archiving and erasures."""
        directory = tmp_path / "archive"
        async with opened(any_server, directory) as store, opened(any_server, directory) as command:
            await append_all(store, 0, 3)
            is_done = asyncio.Event()

            async def use() -> None:
                number = 3
                while not is_done.is_set():
                    await append_all(store, number, number + 1)
                    await asyncio.to_thread(turn, any_server, directory)
                    await store.erase("main", USERS[number % len(USERS)])
                    number += 1

            using = asyncio.ensure_future(use())
            for _ in range(20):
                assert await command.repair() == 0
            is_done.set()
            await using

    async def test_orphaned_states_are_removed(self, any_server: RedisServer) -> None:
        async with opened(any_server, None) as store:
            await store.append("main", [click("e", "somebody")])
            keys = Keyspace("lisarec", FEW_PARTITIONS)
            left = keys.user("main", "nobody").state(GENERATION)
            any_server.client.set(left, b"0" * 16)
            with pytest.raises(StorageError, match="lisarec repair"):
                await store.append("main", [click("e", "nobody")])
            await store.repair()
            assert not any_server.client.exists(left)
            await store.append("main", [click("e", "nobody")])


class TestLostUsers:
    """All keys of users with archived events are gone."""

    @pytest.fixture
    def lost(self, any_server: RedisServer, tmp_path: Path) -> RedisServer:
        async def fill() -> None:
            async with opened(any_server, tmp_path) as store:
                await append_all(store, 0, 3)

        asyncio.run(fill())
        move_all(any_server, tmp_path)
        for user_id in (*USERS[:5], *USERS[6:8]):
            user = Keyspace("lisarec", FEW_PARTITIONS).user("main", user_id)
            any_server.client.delete(user.head, user.id_index, user.state(GENERATION))
        return any_server

    async def test_get_no_second_log(self, lost: RedisServer, tmp_path: Path) -> None:
        async with opened(lost, tmp_path) as store:
            new = [click("e", f"new {number}") for number in range(20)]
            events = [click("e", USERS[0]), *new, click("e", USERS[1]), click("e", USERS[20])]
            with pytest.raises(PartlyApplied, match="lisarec repair") as partly:
                await store.append("main", events)
            assert set(partly.value.results) == set(range(len(events))) - {0, 21}
            for call in (
                lambda: store.append("main", [click("f", USERS[2])]),
                lambda: store.undo("main", USERS[2], f"{USERS[2]}-1"),
                lambda: store.merge("main", USERS[2], USERS[20]),
                lambda: store.merge("main", USERS[20], USERS[2]),
            ):
                with pytest.raises(StorageError, match="lisarec repair"):
                    await call()
            assert await store.repair() == 7
            assert await append_all(store, 0, 3) == 0
            for user_id in USERS:
                log = [entry.record.entry_id for entry in await store.events("main", user_id)]
                assert log[:3] == ids_of(user_id, 3)
            await store.append("main", [click("f", USERS[2])])

    def test_can_be_erased_from_the_archive(self, lost: RedisServer, tmp_path: Path) -> None:
        async def law() -> None:
            async with opened(lost, tmp_path) as store:
                await store.erase("main", USERS[0])
                await store.append("main", [click("a", USERS[0])])  # a new user, before the archiver's next turn
                await asyncio.to_thread(turn, lost, tmp_path)
                await store.append("main", [click("b", USERS[0])])
                await store.repair()
                assert [entry.record.entry_id for entry in await store.events("main", USERS[0])] == ["a", "b"]

        asyncio.run(law())
        tables = [pl.read_parquet(path) for path in tmp_path.rglob("*.parquet")]
        assert pl.concat(tables).filter(user_id=USERS[0])["event_id"].to_list() == ["a"]

    def test_delay_new_users_once_while_the_archive_is_unavailable(
        self, lost: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers, read, asked = threading.Event(), ArchiveReader.read, 0

        def hang(reader: ArchiveReader, query: Callable[[ArchiveSnapshot], Any]) -> Any:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise StorageUnavailable("it is away")
            assert answers.wait(PATIENCE_S)
            return read(reader, query)

        async def law() -> None:
            async with opened(lost, tmp_path) as store:
                await store.append("main", [click("e", USERS[20])])
                monkeypatch.setattr(ArchiveReader, "read", hang)
                monkeypatch.setattr(lost_users, "PROBE_EVERY_S", 0.05)
                monkeypatch.setattr(lost_users, "TIMEOUT_S", 2 * PATIENCE_S)
                number = 0

                async def append_new() -> None:
                    nonlocal number
                    number += 1
                    await store.append("main", [click("e", f"new {number}")])

                async with asyncio.timeout(PATIENCE_S):
                    while asked < 2 or number < 20:  # the second time in the background
                        await append_new()
                    answers.set()
                    before = asked
                    while asked == before:  # until it is asked about a user
                        await append_new()
                    with pytest.raises(StorageError, match="lisarec repair"):
                        await store.append("main", [click("e", USERS[0])])

        asyncio.run(law())


class TestLoss:
    @pytest.mark.parametrize("is_empty", [True, False], ids=["empty", "older"])
    async def test_archived_data_are_restored(self, server: RedisServer, tmp_path: Path, is_empty: bool) -> None:
        directory = tmp_path / "archive"
        async with opened(server, directory) as store:
            await append_all(store, 0, 2)
            await asyncio.to_thread(turn, server, directory)
            older = None if is_empty else server.copy_data(tmp_path / "older")
            await append_all(store, 2, 4)
            await asyncio.to_thread(turn, server, directory)
            archived = await seen_of(store)
            await append_all(store, 4, 5)
            server.restart_with(older)
        async with opened(server, directory) as store:  # it knows only what the archive tells
            with pytest.raises(StorageUnavailable, match="has lost acknowledged events"):
                await append_all(store, 5, 6)
            with pytest.raises(StorageError, match=r"lost|accept-loss"):
                await store.repair()
            await store.repair(accept_loss=True)
            assert await append_all(store, 0, 4) == 0
            seen = await seen_of(store)
            assert seen["logs"] == archived["logs"]
            assert seen["states"] == archived["states"]
            assert await append_all(store, 4, 6) == 2 * len(USERS)
            assert store.failure is None
        turn(server, directory)
        assert_nothing_is_missing_or_twice(server, directory)

    async def test_services_that_remember_more_continue_after_acceptance(
        self, any_server: RedisServer, tmp_path: Path
    ) -> None:
        async with opened(any_server, None) as service:
            await append_all(service, 0, 1)
            older = any_server.copy_data(tmp_path / "older")
            await append_all(service, 1, 2)
            any_server.restart_with(older)
            for _ in range(2):
                with pytest.raises(StorageUnavailable):
                    await append_all(service, 2, 3)
            async with opened(any_server, None) as command:
                await command.repair(accept_loss=True)
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        await append_all(service, 1, 3)
                        break
                    except StorageUnavailable:
                        await asyncio.sleep(0.05)
            for user_id in USERS:
                found = await service.events("main", user_id)
                assert [entry.record.entry_id for entry in found] == ids_of(user_id, 3)
            any_server.restart_with(older)  # which knows nothing of that acceptance
            with pytest.raises(StorageUnavailable):
                await append_all(service, 3, 4)
            with pytest.raises(StorageUnavailable, match="has lost acknowledged events"):
                await append_all(service, 3, 4)
