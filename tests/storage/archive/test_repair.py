"""What a store has lost or damaged is made again from log and archive, or a loss is accepted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from storage.errors import StorageError, StorageUnavailable
from storage.redis.layout import Keyspace
from storage.redis.store import RedisStore
from tests.storage.archive.archived_redis import assert_nothing_is_missing_or_twice, opened, turn
from tests.storage.contract.stores import FEW_PARTITIONS
from tests.storage.oracles.random_events import click
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import GENERATION

USERS = [f"user-{number}" for number in range(40)]
MERGED, INTO, UNDONE = USERS[:3]


def ids_of(user_id: str, count: int) -> list[str]:
    return [f"{user_id}-{number}" for number in range(count)]


async def append_all(store: RedisStore, begin: int, end: int) -> int:
    """Append these events of every user; return how many were new."""
    events = [click(f"{user_id}-{number}", user_id) for user_id in USERS for number in range(begin, end)]
    return sum(not result.duplicate for result in await store.append("main", events))


async def seen_of(store: RedisStore) -> dict[str, Any]:
    """Everything that a reader sees of the users."""
    logs = {user_id: [entry.record for entry in await store.events("main", user_id, limit=1000)] for user_id in USERS}
    states = await store.states("main", USERS, GENERATION)
    return {"logs": logs, "states": states}


def user_keys(server: RedisServer, kind: str) -> list[bytes]:
    return list(server.client.scan_iter(f"lisarec:{{p*}}:{kind}:*"))


def damage_everything(server: RedisServer) -> None:
    """Every second head is gone, the others and their indexes are damaged."""
    heads = user_keys(server, "head")
    server.client.delete(*heads[::2], *user_keys(server, "state")[::3])
    for number, head in enumerate(heads[1::2]):
        server.client.set(head, [b"", b"\xff" * 16, b"1" * 15, b"9" * 42 + b"!x"][number % 4])
        server.client.delete(head.replace(b":head:", b":index:"))


class TestDamage:
    @pytest.mark.parametrize("is_archived", [False, True], ids=["in Redis", "archived"])
    def test_all_that_readers_see_is_as_before(self, server: RedisServer, tmp_path: Path, is_archived: bool) -> None:
        directory = tmp_path / "archive" if is_archived else None

        async def law() -> None:
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

        asyncio.run(law())

    def test_states_of_nobody_are_removed(self, any_server: RedisServer) -> None:
        async def law() -> None:
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

        asyncio.run(law())


class TestLoss:
    @pytest.mark.parametrize("is_empty", [True, False], ids=["empty", "older"])
    def test_what_the_archive_has_comes_back(self, server: RedisServer, tmp_path: Path, is_empty: bool) -> None:
        directory = tmp_path / "archive"

        async def law() -> None:
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
                with pytest.raises(StorageUnavailable, match="has lost events"):
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

        asyncio.run(law())

    def test_services_that_remember_more_go_on_once_it_is_accepted(
        self, any_server: RedisServer, tmp_path: Path
    ) -> None:
        async def law() -> None:
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
                async with asyncio.timeout(30):
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
                with pytest.raises(StorageUnavailable, match="has lost events"):
                    await append_all(service, 3, 4)

        asyncio.run(law())
