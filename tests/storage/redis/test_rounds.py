"""Rounds of the Redis store: batching, waiting and bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

import storage.redis.requests
import storage.redis.session.cooperative_loops
import storage.redis.writer
from storage.errors import PartlyRead, StorageBusy, StorageError, StorageUnavailable
from storage.redis.connections.client import RedisServers
from storage.redis.connections.nodes import Command
from storage.redis.layout.keys import Keyspace
from storage.redis.log.user_log import UserLog
from storage.redis.states import MAX_MISSING_IN_ROUND, READ_TOGETHER, RedisStates
from storage.redis.store import PARTITIONS, RedisOptions, RedisStore
from storage.state.event import Event
from tests.storage.contract.stores import begun
from tests.storage.oracles.naive_fold import assert_state_is, fold
from tests.storage.oracles.random_events import click, make_generation
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import GENERATION, PATIENT, PREFIX, ids, in_other_partitions, opened, user_of
from tests.waiting import PATIENCE_S, until


class TestRounds:
    def test_a_lagging_state_is_caught_up_under_load(self, any_server: RedisServer) -> None:
        long_log = [click(f"e{number}", item=number % 12) for number in range(5 * MAX_MISSING_IN_ROUND)]
        newer = make_generation(tag=b"gen two\0", seed=1)

        def through_seq() -> int:
            keys = any_server.client.keys(f"*:state:{newer.tag.hex()}:main/u")
            return int(any_server.client.get(keys[0])[:16]) if keys else 0

        async def law() -> None:
            async with opened(any_server.url) as store:
                for start in range(0, len(long_log), 1000):
                    await store.append("main", long_log[start : start + 1000])
            async with opened(any_server.url, [newer, GENERATION]) as store:
                answers = await store.append("main", [click("new"), click("new too", "other")])
                assert [answer.duplicate for answer in answers] == [False, False]
                await until(lambda: through_seq() >= len(long_log))
                await store.append("main", [click("last")])
                head = any_server.client.get(Keyspace(PREFIX, PARTITIONS).user("main", "u").head)
                assert through_seq() == int(head)  # again every event keeps it fresh
                for generation in (newer, GENERATION):
                    (value,) = await store.states("main", ["u"], generation)
                    assert_state_is(value, fold(generation, [*long_log, click("new"), click("last")]))

        asyncio.run(law())

    def test_full_rounds_of_other_users_are_written_while_one_is_committed(
        self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        running, most = list[set[str]](), [0]
        write_round = storage.redis.writer.EventWriter._write_round  # noqa: SLF001

        async def noted(writer: Any, parts: list[Any]) -> list[Any]:
            partitions = {part.partition for part in parts}
            assert all(partitions.isdisjoint(others) for others in running)
            running.append(partitions)
            most[0] = max(most[0], len(running))
            again = await write_round(writer, parts)
            running.remove(partitions)
            return again

        monkeypatch.setattr("storage.redis.writer.EventWriter._write_round", noted)
        logs = {
            f"user-{user}": [click(f"{user}-{number}", f"user-{user}", number % 12) for number in range(8)]
            for user in range(500)
        }
        requests = [[log[number] for log in logs.values()] for number in range(8)]

        async def law() -> None:
            async with opened(any_server.url) as store:
                answers = await asyncio.gather(*(store.append("main", events) for events in requests))
                assert not any(answer.duplicate for answer_list in answers for answer in answer_list)
                for user, log in logs.items():
                    (value,) = await store.states("main", [user], GENERATION)
                    assert_state_is(value, fold(GENERATION, log))

        asyncio.run(law())
        assert most[0] == storage.redis.writer.MAX_ROUNDS

    def test_many_events_are_encoded_and_committed_a_few_at_a_time(
        self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rounds, events = list[int](), [click(f"e{number}", f"user-{number}") for number in range(1_000)]

        def noted(serving: Any, commits: list[Any]) -> None:
            rounds.append(sum(part.size for commit in commits for part in commit.parts))
            storage.redis.requests.fold_new_entries(serving, commits)

        monkeypatch.setattr("storage.redis.writer.fold_new_entries", noted)

        async def law() -> None:
            async with opened(any_server.url) as store:
                appending = asyncio.create_task(store.append("main", events))
                turns = 0
                while not rounds and not appending.done():
                    turns += 1
                    await asyncio.sleep(0)
                assert turns >= len(events) // storage.redis.session.cooperative_loops.SLICE
                assert [answer.duplicate for answer in await appending] == [False] * len(events)

        asyncio.run(law())
        largest_part = len(events) // PARTITIONS * 3
        assert sum(rounds) == len(events)
        assert max(rounds) < storage.redis.writer.MAX_ROUND + largest_part

    def test_a_new_generation_catches_up_while_old_ones_append(self, any_server: RedisServer) -> None:
        newer = make_generation(tag=b"gen two\0", seed=1)
        long_log = [click(f"e{number}", item=number % 12) for number in range(10 * MAX_MISSING_IN_ROUND)]

        async def law() -> None:
            async with opened(any_server.url) as old:
                for start in range(0, len(long_log), 1000):
                    await old.append("main", long_log[start : start + 1000])
                done = asyncio.Event()

                async def go_on_appending() -> list[str]:
                    appended: list[str] = []
                    while not done.is_set():
                        appended.append(f"old{len(appended)}")
                        await old.append("main", [click(appended[-1])])
                    return appended

                busy = asyncio.create_task(go_on_appending())
                new = await RedisStore.open(any_server.url, [newer], options=RedisOptions(**PATIENT))
                async with asyncio.timeout(PATIENCE_S):
                    await new.append("main", [click("new")])
                    await new.close()
                done.set()
                appended = await busy
            async with opened(any_server.url) as store:
                wanted = {event.event_id for event in long_log} | {"new", *appended}
                log = [entry.record for entry in await store.events("main", "u", limit=10**6)]
                assert len(log) == len(wanted)
                assert {event.entry_id for event in log} == wanted
                for generation in (GENERATION, newer):
                    (value,) = await store.states("main", ["u"], generation)
                    assert_state_is(value, fold(generation, log))

        asyncio.run(law())

    def test_too_long_logs_are_folded_in_the_background(
        self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As after an undo, which requires another fold."""
        long_log = [click(f"e{number}", item=number % 12) for number in range(MAX_MISSING_IN_ROUND + 2)]
        pages_of, begun_at = UserLog.pages_of, list[tuple[object, int]]()

        def noted(log: UserLog, *args: Any, after: int = 0, **options: Any) -> AsyncIterator[Any]:
            begun_at.append((asyncio.current_task(), after))
            return pages_of(log, *args, after=after, **options)

        async def law() -> None:
            async with opened(any_server.url) as store:
                await store.append("main", long_log)
                monkeypatch.setattr(RedisStates, "catch_up", lambda *_: None)  # as if it had been undone elsewhere
                await store.undo("main", "u", "e3")
                monkeypatch.setattr(UserLog, "pages_of", noted)
                for _ in range(2):  # the second one finds the fold under way
                    values = await store.states("main", ["u"], GENERATION, max_missing=MAX_MISSING_IN_ROUND)
                    assert values == [None]
                own = [after for task, after in begun_at if task is asyncio.current_task()]
                assert len(own) == 1
                assert own[0] >= len(long_log)
                (value,) = await store.states("main", ["u"], GENERATION)
                assert_state_is(value, fold(GENERATION, [one for one in long_log if one.event_id != "e3"]))

        asyncio.run(law())

    def test_a_too_slow_server_times_out(self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(storage.redis.writer, "MAX_ROUND", 1)

        async def law() -> None:
            async with opened(any_server.url) as store:
                send = RedisServers.send
                sent = 0

                async def slowly(servers: RedisServers, commands: Sequence[Command], **options: Any) -> list[Any]:
                    nonlocal sent
                    sent += bool(commands)
                    await asyncio.sleep(0.05 if commands else 0)
                    return await send(servers, commands, **options)

                monkeypatch.setattr(RedisServers, "send", slowly)
                served, *others = in_other_partitions(150)
                first = await begun(store, click("e", served))
                monkeypatch.setattr(storage.redis.requests, "TIMEOUT_S", 1.0)
                waiting = [first, *(store.append("main", [click("e", user_id)]) for user_id in others)]
                answers = await asyncio.gather(*waiting, return_exceptions=True)
                assert sent < len(waiting)  # all of them in turn would be a read and a commit each
                assert isinstance(answers[0], list)
                assert isinstance(answers[-1], StorageUnavailable)

        asyncio.run(law())

    def test_concurrent_requests_share_round_trips(self, any_server: RedisServer) -> None:
        def calls(command: str) -> int:
            return int(any_server.client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])

        async def law() -> None:
            async with opened(any_server.url) as store:
                users = in_other_partitions(50)
                any_server.client.config_resetstat()  # without what opening has cost
                await asyncio.gather(*(store.append("main", [click("e", user_id)]) for user_id in users))
                assert (calls("mget"), calls("exec"), calls("evalsha")) == (2, 0, 1)  # one MGET is the script's
                await asyncio.gather(*(store.states("main", [user_id], GENERATION) for user_id in users))
                assert calls("mget") == 4  # the first one waits for nobody

        asyncio.run(law())

    def test_a_full_queue_refuses_at_once_and_answers_accepted_requests(
        self, any_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("storage.group_commit.MAX_WAITING", 10)

        async def law() -> None:
            async with opened(any_server.url) as store:
                any_server.freeze()
                first = await begun(store, click("first"))
                accepted = [asyncio.ensure_future(store.append("main", [click(f"e{number}")])) for number in range(10)]
                await asyncio.sleep(0)
                with pytest.raises(StorageBusy):
                    await store.append("main", [click("too much")])
                any_server.thaw()
                await asyncio.gather(first, *accepted)
                assert await ids(store) == ["first", *(f"e{number}" for number in range(10))]

        asyncio.run(law())

    def test_a_cancelled_waiter_leaves_the_queue(self, any_server: RedisServer) -> None:
        async def law() -> None:
            async with opened(any_server.url) as store:
                any_server.freeze()
                first = await begun(store, click("first"))
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
            async with opened(any_server.url) as store:
                requests = [[click("a")], [click("half applied?"), odd], [click("b")]]
                outcomes = await asyncio.gather(
                    *(store.append("main", events) for events in requests), return_exceptions=True
                )
                assert [isinstance(outcome, StorageError) for outcome in outcomes] == [False, True, False]
                assert await ids(store) == ["a", "b"]

        asyncio.run(law())


def test_damaged_users_fail_alone_in_a_batch(server: RedisServer) -> None:
    async def law() -> None:
        users = [f"user-{n}" for n in range(2 * READ_TOGETHER + 9)]
        damaged = {users[3], users[READ_TOGETHER], users[-1]}
        async with opened(server.url) as store:
            await store.append("main", [click(f"e-{n}", user_id) for n, user_id in enumerate(users) if n % 7])
            await store.merge("main", users[6], users[5])
            alone = {user_id: (await store.states("main", [user_id], GENERATION))[0] for user_id in users}
            assert None in alone.values()
            assert alone[users[5]] == alone[users[6]]
            assert await store.states("main", users, GENERATION) == list(alone.values())
            for user_id in damaged:
                server.client.set(user_of(server.url, user_id).head, "not a head")
            with pytest.raises(PartlyRead) as partly:
                await store.states("main", users, GENERATION)
            assert partly.value.values == {user_id: alone[user_id] for user_id in users if user_id not in damaged}

    asyncio.run(law())


def test_a_state_read_during_an_erasure_has_only_later_events(
    any_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = make_generation(tag=b"gen two\0", seed=1)

    async def law(then: list[Event]) -> None:
        async with opened(any_server.url) as store, opened(any_server.url) as other:
            await store.append("main", [click(f"e{number}") for number in range(5)])
            read_log = UserLog.pages_of

            async def erased_first(log: UserLog, *place: Any, **bounds: Any) -> AsyncIterator[Any]:
                monkeypatch.undo()
                await other.erase("main", "u")
                if then:
                    await other.append("main", then)
                async for page in read_log(log, *place, **bounds):
                    yield page

            monkeypatch.setattr(UserLog, "pages_of", erased_first)
            (value,) = await store.states("main", ["u"], newer)
            assert_state_is(value, fold(newer, then))

    asyncio.run(law([]))
    asyncio.run(law([click("new", item=3)]))
