"""What only the Redis store has: a server that fails in its own ways, rounds, commits that are refused, keys."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio.connection import AbstractConnection

import storage.redis
import storage.redis_requests
from storage.errors import PartlyApplied, StorageBusy, StorageError, StorageUnavailable
from storage.redis import RedisStore
from storage.redis_layout import Keyspace
from storage.state import Generation
from storage.state_event import Event
from tests.storage.append_shared import HOT_USERS, shared_event
from tests.storage.catalogue import click, fresh_user, make_generation
from tests.storage.naive_fold import assert_state_is, fold
from tests.storage.redis_servers import RedisServer, expected_servers, free_port, new_server, redis_users

GENERATION = make_generation()
ROOT = Path(__file__).parents[2]
RECOVERY_S = 10.0
PREFIX = "lisarec"


@pytest.fixture(params=expected_servers())
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = new_server(request.param)
    yield server
    server.stop()


@pytest.fixture
def any_server() -> Iterator[RedisServer]:
    """For what does not depend on the kind of server."""
    server = new_server("redis-server")
    yield server
    server.stop()


@asynccontextmanager
async def opened(
    server: RedisServer, generations: Sequence[Generation] = (GENERATION,), **options: Any
) -> AsyncIterator[RedisStore]:
    store = await RedisStore.open(server.url, generations, **{"socket_timeout_s": 0.5} | options)
    try:
        yield store
    finally:
        await store.close()


async def ids(store: RedisStore, user_id: str = "u") -> list[str]:
    return [entry.event.event_id for entry in await store.events("main", user_id, limit=10**6)]


async def assert_state_is_fold_of_log(store: RedisStore, user_id: str = "u") -> None:
    log = [entry.event for entry in await store.events("main", user_id, limit=10**6)]
    assert len({event.event_id for event in log}) == len(log)
    assert_state_is((await store.states("main", [user_id], GENERATION))[0], fold(GENERATION, log))


async def recovery_s(call: Callable[[], Awaitable[object]]) -> float:
    """How long it takes until the call succeeds."""
    started_s = time.monotonic()
    while time.monotonic() < started_s + RECOVERY_S:
        with suppress(StorageUnavailable):
            await call()
            return time.monotonic() - started_s
        await asyncio.sleep(0.05)
    raise AssertionError(f"no recovery within {RECOVERY_S} s")


def in_other_partitions(count: int) -> list[str]:
    """User ids, each in a partition of its own."""
    users = (fresh_user() for _ in range(10_000))
    apart = {Keyspace(PREFIX, storage.redis.PARTITIONS).user("main", user_id).partition: user_id for user_id in users}
    return list(apart.values())[:count]


class TestFailures:
    def test_a_server_killed_under_load_loses_nothing_acknowledged_and_is_found_again(
        self, server: RedisServer
    ) -> None:
        async def law() -> None:
            acknowledged: list[str] = []
            stopping = False

            async def keep_appending(lane: int, store: RedisStore) -> None:
                number = 0
                while not stopping:
                    event_id = f"{lane}-{number}"
                    with suppress(StorageUnavailable):
                        await store.append("main", [click(event_id, f"user{number % 7}", number % 12)])
                        acknowledged.append(event_id)
                        number += 1
                    await asyncio.sleep(0)

            async with opened(server) as store:
                lanes = [asyncio.ensure_future(keep_appending(lane, store)) for lane in range(8)]
                for _ in range(3):
                    await asyncio.sleep(0.15)
                    server.kill()
                    before = len(acknowledged)
                    await asyncio.sleep(0.05)
                    await asyncio.to_thread(server.start)
                    assert await recovery_s(store.ping) < RECOVERY_S
                    await asyncio.sleep(0.15)
                    assert len(acknowledged) > before
                stopping = True
                await asyncio.gather(*lanes)
                users = [f"user{number}" for number in range(7)]
                logged = [event_id for user_id in users for event_id in await ids(store, user_id)]
                assert len(acknowledged) == len(set(acknowledged))
                assert set(acknowledged) <= set(logged)
                for user_id in users:
                    await assert_state_is_fold_of_log(store, user_id)

        asyncio.run(law())

    def test_a_frozen_server_is_given_up_in_bounded_time_and_found_again(self, server: RedisServer) -> None:
        async def law() -> None:
            async with opened(server, socket_timeout_s=0.3) as store:
                await store.append("main", [click("before")])
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
                assert time.monotonic() - started_s < 2
                server.thaw()
                assert await recovery_s(lambda: store.append("main", [click("after")])) < 2
                assert await ids(store) == ["before", "after"]
                await assert_state_is_fold_of_log(store)

        asyncio.run(law())

    def test_a_connection_that_breaks_while_it_is_written_to_is_a_store_that_is_away(
        self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """uvloop, on which the service runs, says so with a RuntimeError, which redis-py passes on."""
        send = AbstractConnection.send_packed_command
        breaks = True

        async def send_after_the_break(connection: AbstractConnection, *args: Any, **options: Any) -> None:
            if breaks and connection._writer is not None:
                connection._writer.transport.abort()
            await send(connection, *args, **options)

        async def law() -> None:
            nonlocal breaks
            async with opened(any_server) as store:
                await store.append("main", [click("e1")])
                monkeypatch.setattr(AbstractConnection, "send_packed_command", send_after_the_break)
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

    def test_a_full_server_refuses_events_whole_and_can_be_read(self, server: RedisServer) -> None:
        async def law() -> None:
            async with opened(server) as store:
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

        asyncio.run(law())

    def test_a_replica_refuses_events_and_can_be_read(self, server: RedisServer) -> None:
        async def law() -> None:
            async with opened(server) as store:
                await store.append("main", [click("before")])
                server.client.replicaof("127.0.0.1", "1")
                for count in (1, 5):
                    with pytest.raises(StorageUnavailable, match=r"READONLY|read only"):
                        await store.append(
                            "main", [click(f"e{n}", user) for n, user in enumerate(["u", *"abcd"][:count])]
                        )
                async with opened(server) as another:  # opened while it is read-only
                    await assert_state_is_fold_of_log(another)
                server.client.replicaof("NO", "ONE")
                await store.append("main", [click("after")])
                assert await ids(store) == ["before", "after"]

        asyncio.run(law())

    def test_scripts_that_the_server_has_lost_are_given_to_it_again(self, server: RedisServer) -> None:
        async def law() -> None:
            users = in_other_partitions(20)
            async with opened(server) as store:
                for round_ in range(3):
                    server.client.script_flush()
                    answers = await store.append("main", [click(f"e{round_}", user_id) for user_id in users])
                    assert not any(answer.duplicate for answer in answers)
                    server.client.script_flush()
                    assert len(await ids(store, users[0])) == round_ + 1
                await assert_state_is_fold_of_log(store, users[0])

        asyncio.run(law())

    def test_a_server_that_is_not_there_yet_is_waited_for(
        self, any_server: RedisServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def law() -> None:
            any_server.kill()
            async with opened(any_server) as store:
                assert "not there yet" in caplog.text
                for call in (store.append("main", [click("e")]), store.states("main", ["u"], GENERATION), store.ping()):
                    with pytest.raises(StorageUnavailable):
                        await call
                any_server.start()
                await store.append("main", [click("e")])
                assert await ids(store) == ["e"]

        asyncio.run(law())

    def test_a_request_that_is_applied_in_part_says_in_which_and_may_be_sent_again(self, server: RedisServer) -> None:
        async def law() -> None:
            users = in_other_partitions(5)
            events = [click(f"e{number}", user_id) for user_id in users for number in range(2)]
            broken = Keyspace(PREFIX, storage.redis.PARTITIONS).user("main", users[3]).log
            async with opened(server) as store:
                server.client.set(broken, "not a stream")
                with pytest.raises(PartlyApplied) as partly:
                    await store.append("main", events)
                assert partly.value.applied == (0, 1, 2, 3, 4, 5, 8, 9)
                server.client.delete(broken)
                assert [await ids(store, user_id) for user_id in users[2:]] == [["e0", "e1"], [], ["e0", "e1"]]
                answers = await store.append("main", events)
                assert [position for position, answer in enumerate(answers) if not answer.duplicate] == [6, 7]
                for user_id in users:
                    await assert_state_is_fold_of_log(store, user_id)

        asyncio.run(law())

    def test_a_lost_log_entry_fails_only_who_needs_it(self, any_server: RedisServer) -> None:
        async def law() -> None:
            broken, sound = in_other_partitions(2)
            async with opened(any_server) as store:
                await store.append("main", [click("e", broken), click("e", sound)])
                user = Keyspace(PREFIX, storage.redis.PARTITIONS).user("main", broken)
                any_server.client.xtrim(user.log, maxlen=0, approximate=False)
                any_server.client.delete(*user.states([GENERATION]))
                for call in (store.events("main", broken), store.states("main", [broken], GENERATION)):
                    with pytest.raises(StorageError, match="lost its entry 1"):
                        await call
                requests = [store.append("main", [click("e2", user_id)]) for user_id in (broken, sound)]
                failed, applied = await asyncio.gather(*requests, return_exceptions=True)
                assert isinstance(failed, StorageError)
                assert not isinstance(applied, BaseException)

        asyncio.run(law())


class TestManyWriters:
    def test_processes_with_hot_users_and_resends_count_every_event_once(self, server: RedisServer) -> None:
        processes, events = 4, 1200
        command = [sys.executable, "-m", "tests.storage.append_shared", f"redis:{server.url} {PREFIX}"]
        writers = [
            subprocess.Popen([*command, *map(str, (n, processes, events))], stdout=subprocess.PIPE, cwd=ROOT)
            for n in range(processes)
        ]
        counted = [int(writer.communicate(timeout=60)[0]) for writer in writers]
        assert sum(counted) == events

        async def law() -> None:
            sent = [shared_event(number) for number in range(events)]
            async with opened(server) as store:
                for user_id in (*HOT_USERS, *(f"cold{number}" for number in range(0, 200, 5))):
                    assert set(await ids(store, user_id)) == {e.event_id for e in sent if e.user_id == user_id}
                    await assert_state_is_fold_of_log(store, user_id)

        asyncio.run(law())

    def test_a_refused_commit_is_folded_again_on_what_came_in_between(
        self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between reading and committing somebody else appends so much that the ring forgets the event's id."""

        async def law() -> None:
            others = [click("contended", item=3), *(click(f"other{number}", item=4) for number in range(30))]
            async with opened(any_server) as store, opened(any_server) as other:
                interfere_once(monkeypatch, store, other, others)
                answers = await store.append("main", [click("contended", item=3), click("own", item=5)])
                assert [answer.duplicate for answer in answers] == [True, False]
                assert await ids(store) == [*(event.event_id for event in others), "own"]
                await assert_state_is_fold_of_log(store)

        asyncio.run(law())

    def test_a_refused_user_holds_up_nobody_else_of_the_partition(
        self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def law() -> None:
            async with opened(any_server, partitions=1) as store, opened(any_server, partitions=1) as other:
                interfere_once(monkeypatch, store, other, [click("other", "a")])
                answers = await store.append("main", [click("own", "a"), click("own", "b"), click("other", "a")])
                assert [answer.duplicate for answer in answers] == [False, False, True]
                logs = {user_id: await store.events("main", user_id) for user_id in "ab"}
                assert [entry.event.event_id for entry in logs["a"]] == ["other", "own"]
                assert [entry.seq for entry in logs["b"]] == [2]
                assert [entry.seq for entry in logs["a"]] == [1, 3]
                for user_id in "ab":
                    await assert_state_is_fold_of_log(store, user_id)

        asyncio.run(law())

    def test_a_resend_with_another_time_is_still_a_duplicate(self, any_server: RedisServer) -> None:
        """The index of the log decides, not the ring with its low-water mark."""

        async def law() -> None:
            async with opened(any_server) as store:
                await store.append("main", [click(f"e{number}") for number in range(100)])
                again = [click(f"e{number}", timestamp_us=1_800_000_000_000_000) for number in range(100)]
                assert all(answer.duplicate for answer in await store.append("main", again))
                await assert_state_is_fold_of_log(store)

        asyncio.run(law())

    def test_who_is_always_too_slow_gives_up(self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(storage.redis_requests, "GIVE_UP_AFTER_S", 1.0)

        async def law() -> None:
            async with opened(any_server) as store, opened(any_server) as other:
                interfere_once(monkeypatch, store, other, [click("other")], for_s=1.1)
                with pytest.raises(StorageUnavailable, match="others were faster"):
                    await store.append("main", [click("own")])
                assert await ids(store) == ["other"]

        asyncio.run(law())


def interfere_once(
    monkeypatch: pytest.MonkeyPatch, store: RedisStore, other: RedisStore, events: Sequence[Event], for_s: float = 0
) -> None:
    """Let the other store append the events after the store has read and before it commits."""
    read_folds = store._read_folds

    async def read_and_be_overtaken(parts: Any, serving: Any) -> Any:
        folds = await read_folds(parts, serving)
        monkeypatch.undo()
        await other.append("main", events)
        await asyncio.sleep(for_s)
        return folds

    monkeypatch.setattr(store, "_read_folds", read_and_be_overtaken)


def test_a_state_that_is_read_while_its_user_is_erased_is_of_what_came_since(
    any_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = make_generation(tag=b"gen two\0", seed=1)

    async def law(then: list[Event]) -> None:
        async with opened(any_server) as store, opened(any_server) as other:
            await store.append("main", [click(f"e{number}") for number in range(5)])
            read_log = store._log

            def erased_first(*place: Any, **bounds: Any) -> AsyncIterator[Any]:
                async def read() -> AsyncIterator[Any]:
                    monkeypatch.undo()
                    await other.erase("main", "u")
                    if then:
                        await other.append("main", then)
                    async for entry in read_log(*place, **bounds):
                        yield entry

                return read()

            monkeypatch.setattr(store, "_log", erased_first)
            (value,) = await store.states("main", ["u"], newer)
            assert_state_is(value, fold(newer, then))

    asyncio.run(law([]))
    asyncio.run(law([click("new", item=3)]))


class TestRounds:
    def test_a_state_far_behind_is_caught_up_while_events_go_on(self, any_server: RedisServer) -> None:
        long_log = [click(f"e{number}", item=number % 12) for number in range(5 * storage.redis.FAR_BEHIND)]
        newer = make_generation(tag=b"gen two\0", seed=1)

        def through_seq() -> int:
            (*_, key) = [b"", *any_server.client.keys(f"*:state:{newer.tag.hex()}:main/u")]
            return int(any_server.client.get(key)[:16]) if key else 0

        async def law() -> None:
            async with opened(any_server) as store:
                for start in range(0, len(long_log), 1000):
                    await store.append("main", long_log[start : start + 1000])
            async with opened(any_server, [newer, GENERATION]) as store:
                answers = await store.append("main", [click("new"), click("new too", "other")])
                assert [answer.duplicate for answer in answers] == [False, False]
                while through_seq() < len(long_log):
                    await asyncio.sleep(0.01)
                await store.append("main", [click("last")])
                head = any_server.client.get(Keyspace(PREFIX, storage.redis.PARTITIONS).user("main", "u").head)
                assert through_seq() == int(head)  # again every event keeps it fresh
                for generation in (newer, GENERATION):
                    (value,) = await store.states("main", ["u"], generation)
                    assert_state_is(value, fold(generation, [*long_log, click("new"), click("last")]))

        asyncio.run(law())

    def test_a_new_generation_catches_up_while_old_ones_go_on_appending(self, any_server: RedisServer) -> None:
        newer = make_generation(tag=b"gen two\0", seed=1)
        long_log = [click(f"e{number}", item=number % 12) for number in range(10 * storage.redis.FAR_BEHIND)]

        async def law() -> None:
            async with opened(any_server) as old:
                for start in range(0, len(long_log), 1000):
                    await old.append("main", long_log[start : start + 1000])
                done = asyncio.Event()

                async def go_on_appending() -> list[str]:
                    appended = []
                    while not done.is_set():
                        appended.append(f"old{len(appended)}")
                        await old.append("main", [click(appended[-1])])
                    return appended

                busy = asyncio.create_task(go_on_appending())
                new = await RedisStore.open(any_server.url, [newer])
                async with asyncio.timeout(RECOVERY_S):
                    await new.append("main", [click("new")])
                    await new.close()
                done.set()
                appended = await busy
            async with opened(any_server) as store:
                wanted = {event.event_id for event in long_log} | {"new", *appended}
                log = [entry.event for entry in await store.events("main", "u", limit=10**6)]
                assert len(log) == len(wanted)
                assert {event.event_id for event in log} == wanted
                for generation in (GENERATION, newer):
                    (value,) = await store.states("main", ["u"], generation)
                    assert_state_is(value, fold(generation, log))

        asyncio.run(law())

    def test_a_server_that_is_too_slow_is_not_waited_for(
        self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(storage.redis_requests, "GIVE_UP_AFTER_S", 0.5)
        monkeypatch.setattr(storage.redis, "MAX_ROUND", 1)

        async def law() -> None:
            async with opened(any_server) as store:
                read_folds = store._read_folds

                async def slowly(parts: Any, serving: Any) -> Any:
                    await asyncio.sleep(0.1 if parts else 0)
                    return await read_folds(parts, serving)

                monkeypatch.setattr(store, "_read_folds", slowly)
                waiting = [store.append("main", [click("e", user_id)]) for user_id in in_other_partitions(50)]
                begin_s = asyncio.get_running_loop().time()
                answers = await asyncio.gather(*waiting, return_exceptions=True)
                assert asyncio.get_running_loop().time() - begin_s < 4  # all of them in turn would take 5 s
                assert isinstance(answers[0], list)
                assert isinstance(answers[-1], StorageUnavailable)

        asyncio.run(law())

    def test_what_arrives_together_shares_round_trips(self, any_server: RedisServer) -> None:
        def calls(command: str) -> int:
            return int(any_server.client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])

        async def law() -> None:
            async with opened(any_server) as store:
                users = in_other_partitions(50)
                await asyncio.gather(*(store.append("main", [click("e", user_id)]) for user_id in users))
                assert (calls("mget"), calls("exec"), calls("evalsha")) == (2, 0, 1)  # one MGET is the script's
                await asyncio.gather(*(store.states("main", [user_id], GENERATION) for user_id in users))
                assert calls("mget") == 3

        asyncio.run(law())

    def test_a_full_queue_refuses_at_once_and_answers_what_it_accepted(self, any_server: RedisServer) -> None:
        async def law() -> None:
            async with opened(any_server, max_waiting=10, socket_timeout_s=5) as store:
                any_server.freeze()
                first = asyncio.ensure_future(store.append("main", [click("first")]))
                await asyncio.sleep(0.05)
                accepted = [asyncio.ensure_future(store.append("main", [click(f"e{number}")])) for number in range(10)]
                await asyncio.sleep(0)
                with pytest.raises(StorageBusy):
                    await store.append("main", [click("too much")])
                any_server.thaw()
                await asyncio.gather(first, *accepted)
                assert await ids(store) == ["first", *(f"e{number}" for number in range(10))]

        asyncio.run(law())

    def test_a_waiter_cancelled_in_the_queue_is_taken_back(self, any_server: RedisServer) -> None:
        async def law() -> None:
            async with opened(any_server, socket_timeout_s=5) as store:
                any_server.freeze()
                first = asyncio.ensure_future(store.append("main", [click("first")]))
                await asyncio.sleep(0.05)
                waiting = [asyncio.ensure_future(store.append("main", [click(f"e{number}")])) for number in range(3)]
                await asyncio.sleep(0)
                first.cancel()  # its round has begun: it is applied, nobody hears of it
                waiting[1].cancel()
                any_server.thaw()
                await asyncio.gather(waiting[0], waiting[2])
                assert await ids(store) == ["first", "e0", "e2"]

        asyncio.run(law())

    @pytest.mark.parametrize(
        "odd", [click("odd", timestamp_us=2**70), click("odd\ud800"), click("odd", user_id="u\ud800")], ids=repr
    )
    def test_an_event_that_cannot_be_stored_fails_alone(self, any_server: RedisServer, odd: Event) -> None:
        async def law() -> None:
            async with opened(any_server) as store:
                requests = [[click("a")], [click("half applied?"), odd], [click("b")]]
                outcomes = await asyncio.gather(
                    *(store.append("main", events) for events in requests), return_exceptions=True
                )
                assert [isinstance(outcome, StorageError) for outcome in outcomes] == [False, True, False]
                assert await ids(store) == ["a", "b"]

        asyncio.run(law())


class TestData:
    @pytest.mark.parametrize("damage", ["gone", "short", "other layout", "not a number", "of the future"])
    def test_a_state_that_is_gone_or_unusable_is_folded_again(self, any_server: RedisServer, damage: str) -> None:
        def do_damage() -> None:
            (key,) = any_server.client.keys("*:state:*")
            value = any_server.client.get(key)
            match damage:
                case "gone":
                    any_server.client.delete(key)
                case "short":
                    any_server.client.set(key, value[:-1])
                case "other layout":
                    any_server.client.set(key, value[:16] + b"\x63" + value[17:])
                case "not a number":
                    any_server.client.set(key, b"?" * 16 + value[16:])
                case "of the future":
                    any_server.client.set(key, b"%016d" % 10**9 + value[16:])

        async def law() -> None:
            events = [click(f"e{number}", item=number % 12) for number in range(600)]  # more than a page of the log
            async with opened(any_server) as store:
                await store.append("main", events)
                (value,) = await store.states("main", ["u"], GENERATION)
                do_damage()
                assert await store.states("main", ["u"], GENERATION) == [value]
                do_damage()
                await store.append("main", [click("one more")])
                await assert_state_is_fold_of_log(store)

        asyncio.run(law())

    def test_states_without_events_for_long_expire_and_are_folded_again(self, any_server: RedisServer) -> None:
        async def law() -> None:
            async with opened(any_server) as store:
                await store.append("main", [click("e")])
                (key,) = any_server.client.keys("*:state:*")
                assert any_server.client.ttl(key) == -1
            async with opened(any_server, state_ttl_days=7) as store:
                await store.append("main", [click("e2")])
                assert 6 * 86_400 < any_server.client.ttl(key) <= 7 * 86_400
                any_server.client.pexpire(key, 1)
                await asyncio.sleep(0.05)
                assert await store.states("main", ["u"], GENERATION, max_missing=0) == [None]
                await assert_state_is_fold_of_log(store)
                assert 6 * 86_400 < any_server.client.ttl(key) <= 7 * 86_400  # what was folded again expires too

        asyncio.run(law())

    def test_a_state_takes_the_same_memory_whatever_the_history(self, server: RedisServer) -> None:
        async def law() -> None:
            async with opened(server) as store:
                usage = []
                for start, end in ((0, 10), (10, 3000)):
                    for page in range(start, end, 1000):
                        numbers = range(page, min(page + 1000, end))
                        await store.append("main", [click(f"e{n}", item=n % 12) for n in numbers])
                    (key,) = server.client.keys("*:state:*")
                    usage.append(server.client.memory_usage(key))
                assert usage[0] == usage[1] < 3700

        asyncio.run(law())

    @given(st.lists(st.tuples(st.text("ab/:%{}@.", min_size=1), st.text("ab/:%{}@.", min_size=1)), unique=True))
    def test_no_two_users_of_any_tenants_share_a_key(self, names: list[tuple[str, str]]) -> None:
        users = [Keyspace(PREFIX, 4).user(*name) for name in names]
        keys = [key for user in users for key in (user.head, user.index, *user.states([GENERATION]))]
        assert len(set(keys)) == len(keys)
        hash_tags = [key[key.index("{") + 1 : key.index("}")] for key in keys]
        assert set(hash_tags) <= {"p0", "p1", "p2", "p3"}

    def test_prefixes_are_apart(self, any_server: RedisServer) -> None:
        async def law() -> None:
            async with opened(any_server, prefix="one") as one, opened(any_server, prefix="two") as two:
                await one.append("main", [click("e")])
                assert await two.states("main", ["u"], GENERATION) == [None]
                assert {key.split(b":")[0] for key in any_server.client.scan_iter()} == {b"one", b"two"}

        asyncio.run(law())


class TestOpening:
    def test_another_number_of_partitions_or_a_newer_layout_is_refused(self, any_server: RedisServer) -> None:
        async def law() -> None:
            async with opened(any_server):
                pass
            with pytest.raises(StorageError, match=r"partitions.*another key prefix"):
                await RedisStore.open(any_server.url, [GENERATION], partitions=64)
            any_server.client.hset(f"{PREFIX}:meta", "layout", 4)
            with pytest.raises(StorageError, match="layout"):
                await RedisStore.open(any_server.url, [GENERATION])

        asyncio.run(law())

    def test_an_old_server_is_refused(self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(storage.redis, "OLDEST_SERVER", (99, 0))
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
            async with opened(server):
                assert not caplog.records
            server.client.config_set(setting, value)
            async with opened(server):
                (record,) = caplog.records
                assert f"{setting} is {value}" in record.getMessage()

        asyncio.run(law())

    def test_users_and_passwords_are_used_and_not_told(self, any_server: RedisServer) -> None:
        any_server.client.acl_setuser(
            "app", enabled=True, passwords=["+s3cret:/@"], keys=["lisarec:*"], categories=["+@all", "-@dangerous"]
        )
        host = f"127.0.0.1:{any_server.port}"

        async def law() -> None:
            # this user may ask for neither INFO nor CONFIG
            store = await RedisStore.open(f"redis://app:s3cret%3A%2F%40@{host}", [GENERATION])
            await store.append("main", [click("e")])
            await store.close()
            with pytest.raises(StorageUnavailable) as refused:
                await RedisStore.open(f"redis://app:wr0ng@{host}", [GENERATION])
            assert "wr0ng" not in str(refused.value)

        asyncio.run(law())

    def test_tls_is_used_and_verified(self, tmp_path: Path) -> None:
        certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
        new_key = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
        names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run([*new_key.split(), *names], check=True, capture_output=True)
        tls = [
            "--tls-port",
            port := free_port(),
            "--tls-cert-file",
            certificate,
            "--tls-key-file",
            key,
            "--tls-auth-clients",
            "no",
        ]
        server = new_server("redis-server", *map(str, tls), "--tls-ca-cert-file", str(certificate))

        async def law() -> None:
            url = redis_users().url(port).replace("redis://", "rediss://")
            store = await RedisStore.open(f"{url}?ssl_ca_certs={certificate}", [GENERATION])
            await store.append("main", [click("e")])
            await store.close()
            untrusting = await RedisStore.open(url, [GENERATION])
            with pytest.raises(StorageUnavailable, match="certificate"):
                await untrusting.ping()
            await untrusting.close()

        try:
            asyncio.run(law())
        finally:
            server.stop()

    @pytest.mark.parametrize(
        ("url", "options"),
        [("http://localhost", {}), ("redis://localhost", {"prefix": "a{b"}), ("redis://localhost", {"prefix": ""})],
    )
    def test_what_cannot_be_used_is_refused(self, url: str, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"redis://|prefix"):
            asyncio.run(RedisStore.open(url, [GENERATION], **options))
