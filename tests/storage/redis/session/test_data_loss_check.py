"""Detection of data loss: a Redis that lost events, or would lose them, gets no events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path

import pytest

from storage.errors import PartlyRead, StorageError, StorageUnavailable
from storage.items.trends import Visit
from storage.records import NamedGeneration
from storage.redis.session import data_loss_check
from storage.redis.session.data_loss_check import ServerTrust
from storage.redis.store import RedisStore
from tests.storage.oracles.random_events import click, make_generation
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import (
    GENERATION,
    assert_state_is_fold_of_log,
    ids,
    in_other_partitions,
    opened,
    poll_until,
    refusal,
    until_applied,
    user_of,
)
from tests.waiting import PATIENCE_S


async def until_distrusted(store: RedisStore) -> str:
    await poll_until(store, lambda: store.failure is not None)
    return str(store.failure)


def delete_all_but_meta(server: RedisServer) -> None:
    server.client.delete(*(key for key in server.client.scan_iter("*") if key != b"lisarec:meta"))


def noted_partitions(server: RedisServer) -> set[str]:
    noted = server.client.hkeys("lisarec:meta")
    return {field.decode().removeprefix("newest:") for field in noted if field.startswith(b"newest:")}


def partitions_of(users: Sequence[str]) -> set[str]:
    return {str(user_of("", user_id).partition_number) for user_id in users}


class TestLostData:
    async def test_an_emptied_server_refuses_all_events(
        self, server: RedisServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        known, *others = in_other_partitions(30)
        async with opened(server.url) as store:
            await store.append("main", [click("e", known)])
            server.restart_with(None)
            for user_id in (*others, known):  # the first one opens the connection
                assert "has lost acknowledged events" in await refusal(store, user_id)
            assert (await store.states("main", [known], GENERATION)) == [None]
            named = NamedGeneration("june", GENERATION.tag)
            changes = [store.generations.activate(named), store.generations.set_experiment("{}")]
            changes += [
                store.add_tallies("main", {("shown",): 3}),
                store.add_visits("main", [Visit("a", b"1234", 1)]),
                store.orders.add("main", {"a": 1}),
            ]
            for change in changes:
                with pytest.raises(
                    StorageUnavailable, match="has lost acknowledged events"
                ):  # it would be gone with these data
                    await change
            assert not list(server.client.scan_iter("lisarec:{items:*"))
            assert "accept-loss" in await until_distrusted(store)
            assert len([one for one in caplog.records if "has lost acknowledged events" in one.getMessage()]) <= 2
        async with opened(server.url) as later:  # another process, which remembers nothing
            with pytest.raises(StorageUnavailable, match="has lost acknowledged events"):
                await later.append("main", [click("f", others[0])])

    async def test_older_files_are_detected_before_any_acknowledgement(
        self, server: RedisServer, tmp_path: Path
    ) -> None:
        ada, bob = in_other_partitions(2)
        async with opened(server.url) as store:
            await store.append("main", [click("1", ada), click("1", bob)])
            older = server.copy_data(tmp_path / "older")
            await store.append("main", [click("2", ada)])
            newer = server.copy_data(tmp_path / "newer")
            server.restart_with(older)
            for user_id in (bob, ada):
                assert "has lost acknowledged events" in await refusal(store, user_id)
            with pytest.raises(StorageUnavailable, match="has lost acknowledged events"):  # nor is half of a log shown
                await ids(store, ada)
            server.restart_with(newer)  # the right ones: nobody has to say so
            await until_applied(store, [click("3", ada), click("3", bob)])
            assert (await ids(store, ada), await ids(store, bob)) == (["1", "2", "3"], ["1", "3"])
            assert store.failure is None

    async def test_reused_sequence_numbers_do_not_hide_a_loss(self, any_server: RedisServer, tmp_path: Path) -> None:
        """Another process continues from the older files beyond the position of this one."""
        async with opened(any_server.url) as store:
            await store.append("main", [click("1")])
            older = any_server.copy_data(tmp_path / "older")
            await store.append("main", [click("2")])
            any_server.restart_with(older)
            async with opened(any_server.url) as forgetful:
                await forgetful.append("main", [click("3"), click("4"), click("5")])
            assert "has lost acknowledged events" in await refusal(store, "u")
            await store.accept_loss()
            assert (await ids(store))[:4] == ["1", "3", "4", "5"]

    @pytest.mark.parametrize("stays", [True, False], ids=["the older files stay", "the newer files come back"])
    async def test_events_logged_before_a_new_server_is_examined_count_once(
        self, any_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, stays: bool
    ) -> None:
        """A write may use a new connection first: it is logged and not acknowledged."""

        monkeypatch.setattr(data_loss_check, "EXAMINE_EVERY_S", 3_600.0)  # only new connections count
        async with opened(any_server.url) as store:
            await store.append("main", [click("1"), click("1", "v")])
            older = any_server.copy_data(tmp_path / "older")
            await store.append("main", [click("2", "v")])
            newer = any_server.copy_data(tmp_path / "newer")
            any_server.restart_with(older)
            async with opened(any_server.url), asyncio.timeout(PATIENCE_S):  # another process gives it the scripts
                while any_server.client.zcard(user_of(any_server.url, "u").id_index) == 1:
                    with pytest.raises(StorageUnavailable):
                        await store.append("main", [click("3")])
            if stays:
                await refusal(store, "v")
                await store.accept_loss()
            else:
                any_server.restart_with(newer)
                with pytest.raises(StorageUnavailable):
                    await store.ping()
                await store.ping()  # by a new connection
            await until_applied(store, [click("3"), click("3", "v")])
            assert await ids(store) == ["1", "3"]
            assert await ids(store, "v") == (["1", "3"] if stays else ["1", "2", "3"])
            for user_id in "uv":
                await assert_state_is_fold_of_log(store, user_id)

    async def test_an_entry_that_a_check_has_found_before_its_reply_needs_no_other_check(
        self, server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise rounds that overlap could cause a check of all partitions for each other, without an end."""
        monkeypatch.setattr(data_loss_check, "EXAMINE_EVERY_S", 3_600.0)
        acknowledge, checked_logs = ServerTrust.acknowledge, list[int]()

        def logs_read() -> int:
            calls: int = server.client.info("commandstats")["cmdstat_xrevrange"]["calls"]
            return calls

        async def after_a_check(trust: ServerTrust, entry_ids: Mapping[str, bytes | None]) -> dict[str, StorageError]:
            await trust.accept_loss()  # all servers count as new ones
            assert not await trust.refusals(entry_ids)
            before = logs_read()
            refused = await acknowledge(trust, entry_ids)
            checked_logs.append(logs_read() - before)
            return refused

        async with opened(server.url) as store:
            monkeypatch.setattr(ServerTrust, "acknowledge", after_a_check)
            for event_id in "12":
                await store.append("main", [click(event_id)])
        assert checked_logs == [0, 0]

    async def test_a_flushed_store_is_detected(self, any_server: RedisServer) -> None:
        async with opened(any_server.url) as store:
            await store.append("main", [click("1")])
            any_server.client.flushall()
            assert "has lost acknowledged events" in await until_distrusted(store)
            with pytest.raises(StorageUnavailable):
                await store.append("main", [click("2")])
            assert any_server.client.dbsize() <= 1

    async def test_erasure_finds_states_of_generations_missing_in_older_files(
        self, any_server: RedisServer, tmp_path: Path
    ) -> None:
        later = make_generation(tag=b"gen two\0")
        async with opened(any_server.url) as store:
            await store.append("main", [click("1")])
            older = any_server.copy_data(tmp_path / "older")
            store.serve_generations([GENERATION, later])
            await store.append("main", [click("2")])
            any_server.restart_with(older)
            await refusal(store, "u")
            async with opened(any_server.url) as command:
                await command.repair(accept_loss=True)
            await until_applied(store, [click("3")])
            state = user_of(any_server.url, "u").state(later)
            assert any_server.client.exists(state)
            async with opened(any_server.url) as other:
                await other.erase("main", "u")
            assert not any_server.client.exists(state)

    async def test_a_restart_without_loss_needs_no_operator(self, server: RedisServer) -> None:
        users = in_other_partitions(5)
        async with opened(server.url) as store:
            for number in range(4):
                await until_applied(store, [click(str(number), user_id) for user_id in users])
                server.kill()
                server.start()
            await until_applied(store, [click("last", users[0])])
            assert store.failure is None
            for user_id in users[1:]:
                assert await ids(store, user_id) == ["0", "1", "2", "3"]


class TestRestartedTogether:
    """Services and Redis restart together, so that no process remembers."""

    async def test_the_newest_entries_are_recorded_every_second_and_at_exit(self, any_server: RedisServer) -> None:
        users = in_other_partitions(5)
        async with opened(any_server.url) as store:
            await store.append("main", [click("1", user_id) for user_id in users])
            await poll_until(store, lambda: noted_partitions(any_server) >= partitions_of(users))
            later = in_other_partitions(20)
            await store.append("main", [click("2", user_id) for user_id in later])
        assert noted_partitions(any_server) >= partitions_of([*users, *later])

    @pytest.mark.parametrize("is_restarted", [True, False], ids=["restarted", "running"])
    async def test_events_are_refused_if_only_the_meta_key_is_left(
        self, any_server: RedisServer, is_restarted: bool
    ) -> None:
        users = in_other_partitions(10)
        async with opened(any_server.url) as store:
            await store.append("main", [click("1", user_id) for user_id in users])
        delete_all_but_meta(any_server)
        if is_restarted:
            any_server.kill()
            any_server.start()
        async with opened(any_server.url) as later:
            for user_id in users:
                assert "has lost acknowledged events" in await refusal(later, user_id)
            await later.accept_loss()
            await until_applied(later, [click("2", user_id) for user_id in users])
        async with opened(any_server.url) as last:  # what was accepted stays so
            await last.append("main", [click("3", user_id) for user_id in users])
            assert await ids(last, users[0]) == ["2", "3"]

    async def test_one_lost_log_is_detected(self, any_server: RedisServer) -> None:
        ada, bob = in_other_partitions(2)
        async with opened(any_server.url) as store:
            await store.append("main", [click("1", ada), click("1", bob)])
        user = user_of(any_server.url, ada)
        any_server.client.delete(user.log, user.seq, user.head, user.id_index, user.state(GENERATION))
        async with opened(any_server.url) as later:
            with pytest.raises(StorageUnavailable, match="has lost acknowledged events"):
                await later.append("main", [click("2", ada)])

    async def test_a_lost_meta_key_beside_logs_is_detected(self, any_server: RedisServer) -> None:
        async with opened(any_server.url) as store:
            await store.append("main", [click("1")])
        meta = any_server.client.dump("lisarec:meta")
        any_server.client.delete("lisarec:meta")
        async with opened(any_server.url) as later:
            for _ in range(2):
                assert "'lisarec:meta'" in await refusal(later, "u")
            any_server.client.restore("lisarec:meta", 0, meta, replace=True)
            await until_applied(later, [click("2")])
            any_server.client.delete("lisarec:meta")
        async with opened(any_server.url) as last:
            await refusal(last, "u")
            await last.accept_loss()
            await until_applied(last, [click("3")])
            assert await ids(last) == ["1", "2", "3"]

    async def test_a_late_process_does_not_undo_an_acceptance(self, any_server: RedisServer) -> None:
        async with opened(any_server.url) as store:
            await store.append("main", [click("1")])
            await poll_until(store, lambda: noted_partitions(any_server))
            await store.append("main", [click("2")])
            delete_all_but_meta(any_server)
            async with opened(any_server.url) as command:
                assert "has lost acknowledged events" in await refusal(command, "u")
                await command.accept_loss()
        # the first one has noted, when it ended, what it knew before
        async with opened(any_server.url) as later:
            await until_applied(later, [click("new")])


class TestUnsafeSettings:
    @pytest.mark.parametrize(
        ("setting", "unsafe", "safe"),
        [("appendonly", "no", "yes"), ("maxmemory-policy", "allkeys-lru", "noeviction")],
    )
    async def test_block_events_until_corrected(
        self, server: RedisServer, setting: str, unsafe: str, safe: str
    ) -> None:
        async with opened(server.url) as store:
            await store.append("main", [click("1")])
            server.client.config_set(setting, unsafe)
            assert f"its {setting} is {unsafe}. Set it to {safe}" in await until_distrusted(store)
            for call in (
                lambda: store.append("main", [click("2")]),
                lambda: store.undo("main", "u", "1"),
                lambda: store.erase("main", "u"),
            ):
                with pytest.raises(StorageUnavailable, match=setting):
                    await call()
            assert (await store.states("main", ["u"], GENERATION)) != [None]
            server.client.config_set(setting, safe)
            await poll_until(store, lambda: store.failure is None)
            await store.append("main", [click("2")])
            assert await ids(store) == ["1", "2"]

    async def test_are_refused_at_startup(self, any_server: RedisServer) -> None:
        any_server.client.config_set("maxmemory-policy", "allkeys-lfu")
        async with opened(any_server.url) as store:
            with pytest.raises(StorageUnavailable, match="maxmemory-policy is allkeys-lfu"):
                await store.append("main", [click("1")])
            any_server.client.config_set("maxmemory-policy", "volatile-lru")  # never takes an event
            await until_applied(store, [click("1")])


class TestDamagedUsers:
    @pytest.mark.parametrize(
        "damage",
        [
            lambda client, key: client.set(key, "not a head"),
            lambda client, key: client.set(key, b"\xff" * 16),
            lambda client, key: client.set(key, b"0" * 42 + b"=\xff"),
            lambda client, key: client.delete(key),
        ],
        ids=["text", "bytes", "merged into bytes", "deleted"],
    )
    async def test_a_damaged_head_fails_only_its_user(
        self, server: RedisServer, damage: Callable[[object, str], object]
    ) -> None:
        broken = user_of(server.url, "broken")
        sound = next(name for name in map(str, count()) if user_of("", name).partition == broken.partition)
        async with opened(server.url) as store:
            await store.append("main", [click("1", "broken"), click("1", sound)])
            damage(server.client, broken.head)
            requests = [store.append("main", [click("2", user_id)]) for user_id in ("broken", sound)]
            failed, applied = await asyncio.gather(*requests, return_exceptions=True)
            assert isinstance(failed, StorageError), failed
            assert "lisarec repair" in str(failed) or "no head" in str(failed)
            assert not isinstance(applied, BaseException)
            with pytest.raises(StorageError, match=r"lisarec repair"):
                await store.events("main", "broken")
            with pytest.raises(StorageError, match=r"lisarec repair"):
                await store.undo("main", "broken", "1")
            with pytest.raises(PartlyRead) as partly:
                await store.states("main", [sound, "broken"], GENERATION)
            assert list(partly.value.values) == [sound]
            assert await ids(store, sound) == ["1", "2"]

    async def test_a_lost_index_beside_a_sound_head_fails_only_its_user(self, server: RedisServer) -> None:
        broken = user_of(server.url, "broken")
        sound = next(name for name in map(str, count()) if user_of("", name).partition == broken.partition)
        async with opened(server.url) as store:
            await store.append("main", [click("1", "broken"), click("1", sound)])
            server.client.delete(broken.id_index)
            requests = [
                store.append("main", [click("1", user_id), click("2", user_id)]) for user_id in ("broken", sound)
            ]
            failed, applied = await asyncio.gather(*requests, return_exceptions=True)
            assert isinstance(failed, StorageError)
            assert failed.failure_cause == "damaged"
            assert not isinstance(applied, BaseException)
            for read in (store.events("main", "broken"), store.seen_items("main", "broken")):
                with pytest.raises(StorageError, match="no index"):
                    await read
            assert await store.repair() == 1
            assert [one.duplicate for one in await store.append("main", [click("1", "broken")])] == [True]
            assert await ids(store, "broken") == ["1"]
