"""Failures specific to Redis servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis.exceptions import ClusterDownError

from storage.errors import PartlyApplied, StorageError, StorageUnavailable
from storage.records import AppendResult
from storage.redis.connections.lean_calls import LeanConnection
from storage.redis.connections.nodes import Command, NodeClients
from storage.redis.layout.keys import Keyspace
from storage.redis.store import PARTITIONS, RedisStore
from tests.storage.archive import archived_redis
from tests.storage.contract.stores import FEW_PARTITIONS
from tests.storage.oracles.random_events import click
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import (
    GENERATION,
    PREFIX,
    assert_state_is_fold_of_log,
    ids,
    in_other_partitions,
    opened,
    refusal,
    until_applied,
    until_it_succeeds,
)
from tests.waiting import until

FROZEN_TIMEOUT_S = 0.3


class TestFailures:
    async def test_a_server_killed_under_load_loses_nothing_and_is_reconnected(self, server: RedisServer) -> None:
        acknowledged: list[str] = []
        refused: list[str] = []
        stopping = False

        async def keep_appending(lane: int, store: RedisStore) -> None:
            number = 0
            while not stopping:
                event_id = f"{lane}-{number}"
                try:
                    await store.append("main", [click(event_id, f"user{number % 7}", number % 12)])
                except StorageUnavailable:
                    refused.append(event_id)
                else:
                    acknowledged.append(event_id)
                    number += 1
                await asyncio.sleep(0)

        async def until_more(noted: list[str]) -> None:
            enough = len(noted) + 8
            await until(lambda: len(noted) > enough)

        async with opened(server.url) as store:
            lanes = [asyncio.ensure_future(keep_appending(lane, store)) for lane in range(8)]
            for _ in range(3):
                await until_more(acknowledged)
                server.kill()
                await until_more(refused)
                await asyncio.to_thread(server.start)
                await until_it_succeeds(store.ping)
                await until_more(acknowledged)
            stopping = True
            await asyncio.gather(*lanes)
            users = [f"user{number}" for number in range(7)]
            logged = [event_id for user_id in users for event_id in await ids(store, user_id)]
            assert len(acknowledged) == len(set(acknowledged))
            assert set(acknowledged) <= set(logged)
            for user_id in users:
                await assert_state_is_fold_of_log(store, user_id)

    def test_a_frozen_server_times_out_and_is_reconnected(self, server: RedisServer) -> None:
        async def law() -> None:
            async with opened(server.url) as patient, opened(server.url, socket_timeout_s=FROZEN_TIMEOUT_S) as store:
                await until_applied(store, [click("before")])
                server.freeze()
                started_s = time.monotonic()
                calls: list[Awaitable[object]] = [
                    *(store.append("main", [click(f"e{number}", f"user{number}")]) for number in range(200)),
                    *(store.states("main", ["u"], GENERATION) for _ in range(20)),
                    store.append("main", [click(f"many{number}", f"user{number}") for number in range(1000)]),
                    store.events("main", "u"),
                    store.ping(),
                ]
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
                assert {type(outcome) for outcome in outcomes} == {StorageUnavailable}
                assert time.monotonic() - started_s < len(calls) * FROZEN_TIMEOUT_S / 2  # not one after the other
                server.thaw()
                await until_applied(store, [click("after")])
                assert await ids(patient) == ["before", "after"]
                await assert_state_is_fold_of_log(patient)

        asyncio.run(law())

    def test_a_connection_broken_during_a_write_is_storage_unavailable(
        self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """uvloop raises a RuntimeError, which redis-py passes on."""
        connect, send = asyncio.open_connection, LeanConnection.send_packed_command
        writers: list[asyncio.StreamWriter] = []
        breaks = True

        async def connect_and_note(*args: Any, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await connect(*args, **options)
            writers.append(writer)
            return reader, writer

        async def send_after_the_break(connection: LeanConnection, *args: Any, **options: Any) -> None:
            if breaks:
                for writer in writers:
                    writer.transport.abort()
            await send(connection, *args, **options)

        async def law() -> None:
            nonlocal breaks
            monkeypatch.setattr(asyncio, "open_connection", connect_and_note)
            async with opened(any_server.url) as store:
                await store.append("main", [click("e1")])
                monkeypatch.setattr(LeanConnection, "send_packed_command", send_after_the_break)
                for call in (
                    store.append("main", [click("e2")]),
                    store.states("main", ["u"], GENERATION),
                    store.events("main", "u"),
                ):
                    with pytest.raises(StorageUnavailable):
                        await call
                breaks = False
                await store.append("main", [click("e2")])
                assert await ids(store) == ["e1", "e2"]

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(law())

    async def test_a_full_server_refuses_whole_requests_and_stays_readable(self, server: RedisServer) -> None:
        async with opened(server.url) as store:
            await store.append("main", [click("before", user_id) for user_id in ("u", "v")])
            server.client.config_set("maxmemory", 1)
            for events in (
                [click("one")],
                [click(f"e{number}", user_id) for number in range(9) for user_id in "uv"],
            ):
                with pytest.raises(StorageUnavailable, match="maxmemory"):
                    await store.append("main", events)
            server.client.delete(*server.client.keys("*:state:*"))  # must be folded again, and cannot be kept
            for user_id in ("u", "v"):
                assert await ids(store, user_id) == ["before"]
                await assert_state_is_fold_of_log(store, user_id)
            server.client.config_set("maxmemory", 0)
            await store.append("main", [click("after")])
            assert await ids(store) == ["before", "after"]
            await assert_state_is_fold_of_log(store)

    async def test_a_replica_refuses_events_and_stays_readable(self, server: RedisServer) -> None:
        async with opened(server.url) as store:
            await store.append("main", [click("before")])
            server.client.replicaof("127.0.0.1", "1")
            for count in (1, 5):
                with pytest.raises(StorageUnavailable, match=r"READONLY|read only"):
                    await store.append("main", [click(f"e{n}", user) for n, user in enumerate(["u", *"abcd"][:count])])
            async with opened(server.url) as another:  # opened while it is read-only
                await assert_state_is_fold_of_log(another)
            server.client.replicaof("NO", "ONE")
            await store.append("main", [click("after")])
            assert await ids(store) == ["before", "after"]

    async def test_lost_scripts_are_loaded_again(self, server: RedisServer) -> None:
        users = in_other_partitions(20)
        async with opened(server.url) as store:
            for round_ in range(3):
                server.client.script_flush()
                answers = await store.append("main", [click(f"e{round_}", user_id) for user_id in users])
                assert not any(answer.duplicate for answer in answers)
                server.client.script_flush()
                assert len(await ids(store, users[0])) == round_ + 1
            await assert_state_is_fold_of_log(store, users[0])

    async def test_a_server_that_starts_later_is_waited_for(
        self, any_server: RedisServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        any_server.kill()
        async with opened(any_server.url) as store:
            assert "not available yet" in caplog.text
            for call in (store.append("main", [click("e")]), store.states("main", ["u"], GENERATION), store.ping()):
                with pytest.raises(StorageUnavailable):
                    await call
            any_server.start()
            await store.append("main", [click("e")])
            assert await ids(store) == ["e"]

    async def test_a_partly_applied_request_names_the_part_and_can_be_retried(self, server: RedisServer) -> None:
        users = in_other_partitions(5)
        events = [click(f"e{number}", user_id) for user_id in users for number in range(2)]
        broken = Keyspace(PREFIX, PARTITIONS).user("main", users[3]).log
        async with opened(server.url) as store:
            server.client.set(broken, "not a stream")
            with pytest.raises(PartlyApplied) as partly:
                await store.append("main", events)
            assert partly.value.results == dict.fromkeys((0, 1, 2, 3, 4, 5, 8, 9), AppendResult())
            server.client.delete(broken)
            assert [await ids(store, user_id) for user_id in users[2:]] == [["e0", "e1"], [], ["e0", "e1"]]
            answers = await store.append("main", events)
            assert [position for position, answer in enumerate(answers) if not answer.duplicate] == [6, 7]
            for user_id in users:
                await assert_state_is_fold_of_log(store, user_id)

    async def test_a_lost_log_entry_fails_only_its_readers(self, any_server: RedisServer) -> None:
        broken, sound = in_other_partitions(2)
        async with opened(any_server.url) as store:
            await store.append("main", [click("e", broken), click("e", sound)])
            user = Keyspace(PREFIX, PARTITIONS).user("main", broken)
            any_server.client.xtrim(user.log, maxlen=0, approximate=False)
            any_server.client.delete(*user.states([GENERATION]))
            for call in (store.events("main", broken), store.states("main", [broken], GENERATION)):
                with pytest.raises(StorageError, match="lost its entry 1"):
                    await call
            requests = [store.append("main", [click("e2", user_id)]) for user_id in (broken, sound)]
            failed, applied = await asyncio.gather(*requests, return_exceptions=True)
            assert isinstance(failed, StorageError)
            assert not isinstance(applied, BaseException)


class TestMissingData:
    """Temporarily or permanently missing data are not taken for data that never existed."""

    async def test_a_node_that_has_not_joined_its_cluster_is_not_trusted(
        self, any_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """For seconds after its start, a node reports its state without reading keys."""
        send = NodeClients.send

        async def refuse_keys(
            nodes: NodeClients, places: Any, commands: Sequence[Command], replies: list[Any], **options: bool
        ) -> None:
            await send(nodes, places, commands, replies, **options)
            for place, command in enumerate(commands):
                if str(command.args[0]).startswith("X"):
                    replies[place] = ClusterDownError("The cluster is down")

        new, *others = in_other_partitions(3)
        async with opened(any_server.url) as store:
            older = any_server.copy_data(tmp_path / "older")
            await store.append("main", [click("1", user_id) for user_id in others])
            any_server.restart_with(older)
            monkeypatch.setattr(NodeClients, "send", refuse_keys)
            for _ in range(3):
                with pytest.raises(StorageUnavailable):
                    await store.append("main", [click("2", new)])
            monkeypatch.undo()
            assert "has lost acknowledged events" in await refusal(store, new)

    async def test_corrections_are_refused_while_data_are_missing(
        self, any_server: RedisServer, tmp_path: Path
    ) -> None:
        """Not reported as unknown events or users."""
        async with opened(any_server.url) as store:
            older = any_server.copy_data(tmp_path / "older")
            await store.append("main", [click("1", "ada"), click("1", "visitor"), click("1", "bob")])
            await store.merge("main", "ada", "visitor")
            newer = any_server.copy_data(tmp_path / "newer")
            any_server.restart_with(older)
            await refusal(store, "ada")
            for call in (
                lambda: store.undo("main", "ada", "1"),
                lambda: store.undo("main", "visitor", "1"),
                lambda: store.merge("main", "bob", "visitor"),
                lambda: store.merge("main", "visitor", "visitor"),
                lambda: store.erase("main", "ada"),
            ):
                with pytest.raises(StorageUnavailable, match="has lost acknowledged events"):
                    await call()
            any_server.restart_with(newer)
            await until_applied(store, [click("2", "ada")])
            assert await store.undo("main", "ada", "1")
            assert await ids(store, "visitor") == await ids(store, "ada")

    @pytest.mark.parametrize("is_archived", [False, True], ids=["in Redis", "archived"])
    async def test_an_erasure_waits_for_the_repair_of_a_possibly_merged_visitor(
        self, any_server: RedisServer, tmp_path: Path, is_archived: bool
    ) -> None:
        users = Keyspace(PREFIX, FEW_PARTITIONS)
        async with archived_redis.opened(any_server, tmp_path) as store:
            await store.append("main", [click("e", user_id) for user_id in ("visitor", "user")])
            await store.merge("main", "user", "visitor")
            if is_archived:
                await asyncio.to_thread(archived_redis.move_all, any_server, tmp_path)
            visitor = users.user("main", "visitor")
            any_server.client.delete(visitor.head, *([visitor.id_index] if is_archived else []))
            with pytest.raises(StorageError, match="lisarec repair"):
                await store.erase("main", "user")
            assert await store.repair() == 1
            await store.erase("main", "user")
            for user_id in ("visitor", "user"):
                assert await store.events("main", user_id) == []
