"""Accepting a data loss while services run, on a store that others have written to."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from storage.errors import StorageUnavailable
from storage.redis.scripts.corrections import APPEND, REPAIR, SET_ASIDE
from storage.redis.session.data_loss_check import EXAMINE_EVERY_S
from storage.redis.store import RedisStore
from tests.storage.archive.archived_redis import (
    USERS,
    append_all,
    assert_nothing_is_missing_or_twice,
    ids_of,
    opened,
    seen_of,
    turn,
)
from tests.storage.oracles.random_events import click
from tests.storage.redis.overtaken import overtake
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import assert_state_is_fold_of_log
from tests.waiting import PATIENCE_S


class TestAcceptedLoss:
    @pytest.mark.parametrize("more", [1, 5], ids=["fewer than archived", "more than archived"])
    def test_entries_logged_under_archived_numbers_move_behind_the_archive(
        self, any_server: RedisServer, tmp_path: Path, more: int
    ) -> None:
        directory, newcomers = tmp_path / "archive", [f"newcomer-{number}" for number in range(10)]

        async def late(store: RedisStore) -> list[bool]:
            users = [*USERS[::3], *newcomers]
            events = [click(f"late-{number}", user_id) for user_id in users for number in range(more)]
            return [result.duplicate for result in await store.append("main", events)]

        async def law() -> None:
            async with opened(any_server, directory) as store:
                await append_all(store, 0, 2)
                await asyncio.to_thread(turn, any_server, directory, keep_tail_s=1_000)
                older = any_server.copy_data(tmp_path / "older")
                await append_all(store, 2, 4)
                await asyncio.to_thread(turn, any_server, directory)
                archived = await seen_of(store)
                any_server.restart_with(older)
            async with opened(any_server, None) as forgetful:  # it cannot know
                await late(forgetful)
            async with opened(any_server, directory) as store:
                await store.repair(accept_loss=True)
                assert set(await late(store)) == {True}
                for user_id in (*USERS, *newcomers):
                    found = [entry.record.entry_id for entry in await store.events("main", user_id, limit=1000)]
                    own = [record.entry_id for record in archived["logs"].get(user_id, ())]
                    added = (
                        [f"late-{number}" for number in range(more)] if user_id not in USERS[1::3] + USERS[2::3] else []
                    )
                    assert found == own + added
                    await assert_state_is_fold_of_log(store, user_id)
                await asyncio.to_thread(turn, any_server, directory)
                assert set(await late(store)) == {True}
                assert await append_all(store, 0, 5) == len(USERS)
            turn(any_server, directory)
            assert_nothing_is_missing_or_twice(any_server, directory)

        asyncio.run(law())

    async def test_a_later_erasure_includes_merged_visitors(self, any_server: RedisServer, tmp_path: Path) -> None:
        """Through a chain of merges, before anything else reads the visitors."""
        chain = ("visitor", "customer", "account")
        async with opened(any_server, tmp_path) as store:
            await store.append("main", [click(f"of {user_id}", user_id) for user_id in chain])
            for visitor, user_id in pairwise(chain):
                await store.merge("main", user_id, visitor)
            await asyncio.to_thread(turn, any_server, tmp_path)
            any_server.client.flushall()
        async with opened(any_server, tmp_path) as store:
            await store.repair(accept_loss=True)
            await store.erase("main", chain[-1])
            for user_id in chain:
                assert await store.events("main", user_id) == []
            await asyncio.to_thread(turn, any_server, tmp_path)
            for user_id in chain:
                assert await store.events("main", user_id) == []
        assert not list(tmp_path.rglob("*.parquet"))

    async def test_a_repair_leaves_no_id_of_a_visitor_erased_during_it(
        self, any_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with opened(any_server, tmp_path) as store, opened(any_server, tmp_path) as command:
            await store.append("main", [click("e", user_id) for user_id in ("visitor", "user")])
            await store.merge("main", "user", "visitor")

            async def erase() -> None:
                await store.erase("main", "user")

            overtake(monkeypatch, "SADD", erase)
            await command.repair()
            assert not list(any_server.client.scan_iter("*:aliases:*"))

    def test_services_write_nothing_before_all_heads_are_rebuilt(
        self, any_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = tmp_path / "archive"

        async def law() -> None:
            async with opened(any_server, directory) as service, opened(any_server, directory) as command:
                await append_all(service, 0, 2)
                older = any_server.copy_data(tmp_path / "older")
                await append_all(service, 2, 4)
                await asyncio.to_thread(turn, any_server, directory)
                any_server.restart_with(older)
                tried = 0

                async def resend() -> None:
                    nonlocal tried
                    for _ in range(3):  # each time the service looks at the server again
                        await asyncio.sleep(EXAMINE_EVERY_S)
                        with pytest.raises(StorageUnavailable):
                            await append_all(service, 0, 4)
                        tried += 1

                overtake(monkeypatch, REPAIR.sha, resend)
                async with asyncio.timeout(PATIENCE_S):
                    while not tried:
                        with suppress(StorageUnavailable):  # the connection that the restart broke
                            await command.repair(accept_loss=True)
                assert tried == 3
                async with asyncio.timeout(PATIENCE_S):
                    while True:
                        with suppress(StorageUnavailable):
                            assert await append_all(service, 0, 5) == len(USERS)
                            break
                        await asyncio.sleep(0.05)
                for user_id in USERS:
                    found = await service.events("main", user_id)
                    assert [entry.record.entry_id for entry in found] == ids_of(user_id, 5)
                    await assert_state_is_fold_of_log(service, user_id)

        asyncio.run(law())

    @pytest.fixture
    def overwritten(self, any_server: RedisServer, tmp_path: Path) -> RedisServer:
        """Older files in which a service without the archive has reused archived numbers."""

        async def fill() -> None:
            async with opened(any_server, tmp_path / "archive") as store:
                await append_all(store, 0, 2)
                await asyncio.to_thread(turn, any_server, tmp_path / "archive", keep_tail_s=1_000)
                older = any_server.copy_data(tmp_path / "older")
                await append_all(store, 2, 4)
                await asyncio.to_thread(turn, any_server, tmp_path / "archive")
                any_server.restart_with(older)
            async with opened(any_server, None) as forgetful:
                await forgetful.append("main", [click("early", user_id) for user_id in USERS])

        asyncio.run(fill())
        return any_server

    @staticmethod
    async def assert_logged(store: RedisStore, *added: str) -> None:
        for user_id in USERS:
            found = [entry.record.entry_id for entry in await store.events("main", user_id)]
            assert found[:4] == ids_of(user_id, 4)
            assert sorted(found[4:]) == sorted(added)
            await assert_state_is_fold_of_log(store, user_id)

    @pytest.mark.parametrize("mark", [SET_ASIDE.sha, REPAIR.sha], ids=["set aside", "repair"])
    async def test_entries_logged_during_the_repair_follow_the_archive(
        self, overwritten: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
    ) -> None:
        """One call suffices, although a service without the archive keeps appending."""
        directory = tmp_path / "archive"
        late = [click("late", user_id) for user_id in (*USERS, "newcomer")]
        async with opened(overwritten, None) as forgetful, opened(overwritten, directory) as command:
            await forgetful.append("main", [click("early", USERS[0])])  # it has looked at what there is

            async def go_on() -> None:
                assert not any(result.duplicate for result in await forgetful.append("main", late))

            overtake(monkeypatch, mark, go_on)
            await command.repair(accept_loss=True)
            await self.assert_logged(command, "early", "late")
            assert {result.duplicate for result in await command.append("main", late)} == {True}
        turn(overwritten, directory)
        assert_nothing_is_missing_or_twice(overwritten, directory)

    @pytest.mark.parametrize(
        "mark", [SET_ASIDE.sha, "XADD", "HDEL", APPEND.sha], ids=["set aside", "xadd", "accept", "append"]
    )
    async def test_a_killed_command_loses_nothing(
        self, overwritten: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
    ) -> None:
        directory = tmp_path / "archive"

        async def die() -> None:
            raise StorageUnavailable("killed")

        async with opened(overwritten, directory) as command:
            overtake(monkeypatch, mark, die)
            with pytest.raises(StorageUnavailable, match="killed"):
                await command.repair(accept_loss=True)
        async with opened(overwritten, directory) as command:
            await command.repair(accept_loss=mark != APPEND.sha)
            await self.assert_logged(command, "early")
        turn(overwritten, directory)
        assert_nothing_is_missing_or_twice(overwritten, directory)
