"""Undo, merge and erasure that are killed or overtaken before any of their steps."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from storage.errors import StorageUnavailable
from storage.protocol import UserStore
from storage.redis.scripts.corrections import NOTE_ALIAS
from storage.state.corrections import posted_as
from storage.state.event import Merge
from tests.storage.contract.fold_checks import assert_state_is_fold_of_log, log_of
from tests.storage.contract.stores import CLUSTER, new_address, opened
from tests.storage.oracles.random_events import VISITS, click, fresh_user, make_generation
from tests.storage.redis.overtaken import DyingAfter, OvertakenAt, overtake
from tests.storage.redis.servers import RedisServer, new_server

GENERATION = make_generation()
ROOT = Path(__file__).parents[3]


@pytest.fixture
def quick_server() -> Iterator[RedisServer]:
    """A server that does not sync."""
    server = new_server("redis-server", "--appendfsync", "no")
    yield server
    server.stop()


class TestKilled:
    def test_a_killed_merge_is_atomic_and_can_be_repeated(self, address: str) -> None:
        printed_words: list[list[str]] = []
        for kill in range(3):
            command = [sys.executable, "-m", "tests.storage.processes.merge_forever", address, f"k{kill}", "u"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
                assert process.stdout is not None
                printed_words += [process.stdout.readline().split() for _ in range(8 + 5 * kill)]
                process.send_signal(signal.SIGKILL)
                printed_words += [
                    line.split() for line in process.stdout.read().splitlines(True) if line.endswith("\n")
                ]

        async def law() -> None:
            visitors = {visitor for what, visitor in printed_words if what == "visited"}
            merged = {visitor for what, visitor in printed_words if what == "merged"}
            async with opened(address, GENERATION) as store:
                before = Counter(user_id for user_id, _ in await posted(store, "u"))
                assert set(before.values()) <= {VISITS}
                assert merged <= before.keys()
                await assert_state_is_fold_of_log(store, "u")
                for visitor in visitors:
                    assert len(await log_of(store, visitor)) >= VISITS
                    await store.merge("main", "u", visitor)
                after = Counter(user_id for user_id, _ in await posted(store, "u"))
                assert {visitor: after[visitor] for visitor in visitors} == dict.fromkeys(visitors, VISITS)
                await assert_state_is_fold_of_log(store, "u")

        asyncio.run(law())

    def test_an_interrupted_merge_is_completed_by_the_next_caller(
        self, address: str, request: pytest.FixtureRequest
    ) -> None:
        kind = request.node.callspec.params["address"]
        if address.startswith("sqlite"):
            return  # one transaction has no steps

        async def law() -> None:
            async with opened(address, GENERATION) as store:
                for step in range(100):
                    names = {how: (fresh_user(), fresh_user()) for how in ways_to_finish(step, kind)}
                    events = [click(f"e{n}", user_id, n) for user_id, _ in names.values() for n in range(4)]
                    events += [click(f"e{n}", visitor, n) for _, visitor in names.values() for n in range(3)]
                    await store.append("main", events)
                    for user_id, visitor in names.values():
                        await store.undo("main", visitor, "e1")
                        await store.properties.put_of_user("main", visitor, {"age": 1.0, "height": 1.0})
                        await store.properties.put_of_user("main", user_id, {"age": 2.0})
                    has_died = await die_while_merging(step, names.values())
                    for how, (user_id, visitor) in names.items():
                        assert len(await log_of(store, user_id)) in (4, 8)
                        await assert_state_is_fold_of_log(store, user_id)
                        await finished(how, store, user_id, visitor)
                        await assert_state_is_fold_of_log(store, user_id)
                        await assert_state_is_fold_of_log(store, visitor)
                    if not has_died:
                        assert step > 8
                        return
            raise AssertionError("there is no end to the steps")

        async def die_while_merging(step: int, names: Iterable[tuple[str, str]]) -> bool:
            """Merge visitors, dying at this step; return whether there are further steps."""
            has_died = False
            async with opened(address, GENERATION) as store:
                for user_id, visitor in names:
                    with DyingAfter(store, step) as died, suppress(StorageUnavailable):
                        await store.merge("main", user_id, visitor)
                    has_died = has_died or bool(died)
            return has_died

        asyncio.run(law())

    def test_an_interrupted_erasure_is_completed_by_repeating_it(self, quick_server: RedisServer) -> None:
        """By the requested id, at the end of a chain of merges."""
        address = f"redis:{quick_server.new_address()}"

        async def law() -> None:
            for step in range(100):
                user_id, between, asked_for, fourth = users = [fresh_user() for _ in range(4)]
                async with opened(address, GENERATION) as store:
                    await store.append("main", [click("e", name) for name in users])
                    for name in users:
                        await store.properties.put_of_user("main", name, {"name": name})
                    for name, visitor in ((between, asked_for), (user_id, between), (user_id, fourth)):
                        await store.merge("main", name, visitor)
                async with opened(address, GENERATION) as store:
                    with DyingAfter(store, step) as died, suppress(StorageUnavailable):
                        await store.erase("main", asked_for)
                    await store.erase("main", asked_for)
                    for name in users:
                        assert await log_of(store, name) == []
                        assert await store.states("main", [name], GENERATION) == [None]
                        assert await store.properties.of_user("main", name) == {}
                    left = [key + quick_server.client.dump(key) for key in quick_server.client.scan_iter()]
                    assert not any(name.encode() in one for one in left for name in users)
                if not died:
                    assert step > 8
                    return
            raise AssertionError("there is no end to the steps")

        asyncio.run(law())


class TestOvertaken:
    """A merge and an erasure interleave at any step, and appear serialised."""

    @pytest.mark.parametrize("has_events", [True, False], ids=["", "the user has no events"])
    @pytest.mark.parametrize("slower", ["merge", "erase"])
    def test_erased_data_stay_erased(self, quick_server: RedisServer, slower: str, has_events: bool) -> None:
        server, prefix = quick_server.client, fresh_user()
        address = f"redis:{quick_server.url} {prefix}"

        def entries_of(user_id: str) -> int:
            return sum(server.zcard(key) for key in server.keys(f"{prefix}:*:index:main/{user_id}"))

        def traces(*user_ids: str) -> list[bytes]:
            found = [key + b" " + server.dump(key) for key in server.keys(f"{prefix}:*:main/*")]
            return [one for one in found if any(user_id.encode() in one for user_id in user_ids)]

        async def meet(step: int, slow: UserStore, fast: UserStore) -> bool:
            user_id, visitor = f"{fresh_user()}-user", f"{fresh_user()}-visitor"

            def work(name: str, store: UserStore) -> Awaitable[object]:
                return store.merge("main", user_id, visitor) if name == "merge" else store.erase("main", user_id)

            own = [click("e0", user_id)] if has_events else []
            await fast.append("main", [*own, click("e1", visitor), click("e2", visitor)])
            await fast.properties.put_of_user("main", visitor, {"age": 1.0, "height": 1.0})
            if has_events:
                await fast.properties.put_of_user("main", user_id, {"age": 2.0})
            faster = "erase" if slower == "merge" else "merge"
            with OvertakenAt(slow, step, lambda: work(faster, fast)) as overtaken:
                await work(slower, slow)
            if overtaken:
                await overtaken.end()
                log = await posted(fast, user_id)
                left = entries_of(visitor)
                assert log in ([], [(visitor, "e1"), (visitor, "e2")])
                assert left == len(log) + 1 if left or log else traces(visitor) == []  # "into" is one more
                properties = await fast.properties.of_user("main", user_id)
                assert properties == ({"age": 1.0, "height": 1.0} if log else {})
                await fast.erase("main", user_id)
                assert traces(user_id, visitor) == []
                for name in (user_id, visitor):
                    assert await fast.properties.of_user("main", name) == {}
            return bool(overtaken)

        asyncio.run(meet_at_every_step(address, meet))

    @pytest.mark.parametrize("erased", ["visitor", "between", "user"])
    @pytest.mark.parametrize("slower", ["put", "erase"])
    def test_concurrent_properties_of_a_visitor_never_stay_with_others(
        self, quick_server: RedisServer, slower: str, erased: str
    ) -> None:
        address = f"redis:{quick_server.url} {fresh_user()}"

        async def meet(step: int, slow: UserStore, fast: UserStore) -> bool:
            names = {name: f"{fresh_user()}-{name}" for name in ("visitor", "between", "user")}
            visitor, between, user_id = names.values()
            await fast.properties.put_of_user("main", user_id, {"age": 2.0})
            await fast.merge("main", between, visitor)
            await fast.merge("main", user_id, between)

            def work(name: str, store: UserStore) -> Awaitable[object]:
                if name == "erase":
                    return store.erase("main", names[erased])
                return store.properties.put_of_user("main", visitor, {"age": 3.0})

            faster = "erase" if slower == "put" else "put"
            with OvertakenAt(slow, step, lambda: work(faster, fast)) as overtaken:
                await work(slower, slow)
            if overtaken:
                await overtaken.end()
                assert await fast.properties.of_user("main", user_id) == {}, step
                assert await fast.properties.of_user("main", between) == {}
                assert await fast.properties.of_user("main", visitor) in ({}, {"age": 3.0})
            return bool(overtaken)

        asyncio.run(meet_at_every_step(address, meet))

    @pytest.mark.parametrize("erased", ["visitor", "between", "user"])
    @pytest.mark.parametrize("slower", ["append", "erase"])
    def test_concurrent_events_of_a_visitor_never_stay_with_others(
        self, quick_server: RedisServer, slower: str, erased: str
    ) -> None:
        """In a chain of two merges; erasing one of the three users erases and separates all."""
        server, prefix = quick_server.client, fresh_user()
        address = f"redis:{quick_server.url} {prefix}"

        async def meet(step: int, slow: UserStore, fast: UserStore) -> bool:
            names = {name: f"{fresh_user()}-{name}" for name in ("visitor", "between", "user")}
            visitor, between, user_id = names.values()
            await fast.append("main", [click("e0", user_id), click("e1", visitor)])
            await fast.merge("main", between, visitor)
            await fast.merge("main", user_id, between)

            def work(name: str, store: UserStore) -> Awaitable[object]:
                if name == "erase":
                    return store.erase("main", names[erased])
                return store.append("main", [click("e1", visitor), click("e2", visitor)])

            faster = "erase" if slower == "append" else "append"
            with OvertakenAt(slow, step, lambda: work(faster, fast)) as overtaken:
                await work(slower, slow)
            if overtaken:
                await overtaken.end()
                assert await posted(fast, user_id) == await posted(fast, between) == []
                assert await posted(fast, visitor) in ([], [(visitor, "e1"), (visitor, "e2")])
                await fast.erase("main", visitor)
                left = [key + b" " + server.dump(key) for key in server.keys(f"{prefix}:*:main/*")]
                assert not any(name.encode() in one for one in left for name in names.values())
            return bool(overtaken)

        asyncio.run(meet_at_every_step(address, meet))

    def test_an_erased_visitor_returns_without_earlier_data(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A reader of erased data continues just before the visitor is merged again."""

        async def dies() -> None:
            raise StorageUnavailable("killed")

        async def law() -> None:
            address = new_address("redis-server", tmp_path)
            async with opened(address, GENERATION) as slow, opened(address, GENERATION) as fast:
                await fast.append("main", [click("own"), click("old", "visitor")])

                async def erase_and_merge_again() -> None:
                    await fast.erase("main", "visitor")
                    await fast.append("main", [click("new", "visitor")])
                    overtake(monkeypatch, NOTE_ALIAS.sha, dies)  # which is the first step of copying
                    with pytest.raises(StorageUnavailable):
                        await fast.merge("main", "u", "visitor")

                overtake(monkeypatch, "ZMSCORE", erase_and_merge_again)  # when it knows what to copy
                await slow.merge("main", "u", "visitor")
                assert await posted(fast, "u") == [("visitor", "new")]

        asyncio.run(law())


async def meet_at_every_step(address: str, meet: Callable[[int, UserStore, UserStore], Awaitable[bool]]) -> None:
    """Interleave a slow and a fast store at one step after another."""
    async with opened(address, GENERATION) as slow, opened(address, GENERATION) as fast:
        for step in range(100):
            if not await meet(step, slow, fast):
                assert step > 4
                return
    raise AssertionError("there is no end to the steps")


async def posted(store: UserStore, user_id: str) -> list[tuple[str, str]]:
    """User and id with which each log entry was posted, or of the event that it undoes."""
    names = []
    for event in await log_of(store, user_id):
        assert not isinstance(event, Merge)
        names.append(posted_as(event))
    return names


WAYS_TO_FINISH = ["merging again", "reading the visitor", "posting as the visitor", "erasing"]


def ways_to_finish(step: int, kind: str) -> list[str]:
    """All ways on one server and on a cluster; alternating ways where steps are the same."""
    if kind in ("redis-server", CLUSTER):
        return WAYS_TO_FINISH
    return [WAYS_TO_FINISH[(step + step // len(WAYS_TO_FINISH)) % len(WAYS_TO_FINISH)]]


async def finished(how: str, store: UserStore, user_id: str, visitor: str) -> None:
    """Finish a merge in this way; assert that the visitor is separate or completely merged."""
    match how:
        case "merging again":
            await store.merge("main", user_id, visitor)
            assert len(await log_of(store, user_id)) == 8
            assert await store.properties.of_user("main", user_id) == {"age": 2.0, "height": 1.0}
            assert not await store.merge("main", user_id, visitor)
        case "reading the visitor":
            await store.states("main", [visitor], GENERATION)
            assert len(await log_of(store, visitor)) in (4, 8)
            assert len(await log_of(store, user_id)) == len(await log_of(store, visitor))
            of_user, of_visitor = [await store.properties.of_user("main", name) for name in (user_id, visitor)]
            assert of_visitor == {"age": 2.0, "height": 1.0} == of_user or of_visitor == {"age": 1.0, "height": 1.0}
        case "posting as the visitor":
            answers = await store.append("main", [click("e1", visitor), click("e9", visitor)])
            assert [answer.duplicate for answer in answers] == [True, False]
            assert len(await log_of(store, visitor)) in (5, 9)
        case "erasing":
            await store.merge("main", user_id, visitor)
            await store.erase("main", visitor)
            for gone in (user_id, visitor):
                assert await log_of(store, gone) == []
                assert await store.states("main", [gone], GENERATION) == [None]
            await store.append("main", [click("e1", visitor)])
            assert len(await log_of(store, visitor)) == 1
            assert await log_of(store, user_id) == []
