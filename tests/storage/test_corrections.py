"""Undo and merge: every store against the naive users, at once with others, and killed in the middle."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import storage.redis_corrections
import storage.sqlite_corrections
from storage.corrections import counted, is_correction, posted_as
from storage.errors import MergeRefused, MergeTooLarge, StorageUnavailable, UnknownEvent
from storage.protocol import UserStore
from storage.rebuild import rebuild
from storage.redis import RedisStore
from storage.state_event import Event
from tests.storage.catalogue import KNOWN_ITEMS, START_US, WEIGHTS, click, fresh_user, make_generation, make_newer
from tests.storage.merge_forever import VISITS
from tests.storage.naive_fold import assert_state_is, fold
from tests.storage.naive_users import NaiveUsers, Refused
from tests.storage.redis_servers import RedisServer, new_server
from tests.storage.stores import new_address, open_store, opened

GENERATION = make_generation()
NEWER = make_newer()
ROOT = Path(__file__).parents[2]


@pytest.fixture
def quick_server() -> Iterator[RedisServer]:
    """One that syncs nothing."""
    server = new_server("redis-server", "--appendonly", "no")
    yield server
    server.stop()


async def log_of(store: UserStore, user_id: str) -> list[Event]:
    return [entry.event for entry in await store.events("main", user_id, limit=1_000_000)]


async def assert_state_is_fold_of_log(store: UserStore, user_id: str) -> None:
    log = await log_of(store, user_id)
    assert len({event.event_id for event in log}) == len(log)
    for generation in (GENERATION, NEWER):
        (value,) = await store.states("main", [user_id], generation)
        events = list(counted(log))
        if events or not log:
            assert_state_is(value, fold(generation, events))
        else:
            assert value == generation.encode(generation.empty())


names = st.sampled_from("abcd")
numbers = st.integers(0, 4).map("e{}".format)
posts = st.tuples(
    st.just("post"),
    names,
    numbers,
    st.integers(0, KNOWN_ITEMS + 1),
    st.sampled_from([*WEIGHTS, "click", "click"]),
    st.integers(0, 5),
)
undos = st.tuples(st.just("undo"), names, numbers)
merges = st.tuples(st.just("merge"), names, names)
others = st.tuples(st.sampled_from(["erase", "read", "reopen"]), names)
histories = st.lists(posts | posts | posts | undos | undos | merges | others, max_size=30)


class TestLaw:
    @given(histories)
    @settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_state_log_and_answers_equal_the_naive_users(self, address: str, history: list[tuple[Any, ...]]) -> None:
        async def law() -> None:
            prefix, naive = fresh_user(), NaiveUsers()
            users = {name: f"{prefix}-{name}" for name in "abcd"}
            store = await open_store(address, [GENERATION])
            for what, name, *rest in history:
                user_id = users[name]
                match what:
                    case "post":
                        event_id, item, event_type, step = rest
                        event = Event(event_id, user_id, f"item{item}", event_type, START_US + step, None)
                        (answer,) = await store.append("main", [event])
                        assert answer.duplicate == (not naive.post(event))
                    case "undo":
                        expected = naive.undo(user_id, rest[0])
                        if expected is None:
                            with pytest.raises(UnknownEvent):
                                await store.undo("main", user_id, rest[0])
                        else:
                            assert await store.undo("main", user_id, rest[0]) == expected
                    case "merge":
                        try:
                            merged = naive.merge(user_id, users[rest[0]])
                        except Refused:
                            with pytest.raises(MergeRefused):
                                await store.merge("main", user_id, users[rest[0]])
                        else:
                            assert await store.merge("main", user_id, users[rest[0]]) == merged
                    case "erase":
                        await store.erase("main", user_id)
                        naive.erase(user_id)
                    case "read":
                        (value,) = await store.states("main", [user_id], GENERATION)
                        naive.assert_state_is(value, user_id, GENERATION)
                    case "reopen":
                        await store.close()
                        store = await open_store(address, [GENERATION])
            for user_id in users.values():
                log = await log_of(store, user_id)
                expected_log = naive.log(user_id)
                assert [posted_as(event) for event in log if not is_correction(event)] == [
                    entry.name for entry in expected_log
                ]
                items = {entry.event.item_id for entry in expected_log if not entry.is_undone}
                assert await store.seen_items("main", user_id) == items
                for generation in (GENERATION, NEWER):
                    (value,) = await store.states("main", [user_id], generation)
                    naive.assert_state_is(value, user_id, generation)
            await store.close()

        asyncio.run(law())

    def test_a_rebuild_folds_what_counts(self, address: str) -> None:
        async def law() -> None:
            async with opened(address, GENERATION) as store:
                await store.append("main", [click(f"e{n}", user_id, n % 12) for n in range(30) for user_id in "uvwx"])
                await store.undo("main", "u", "e7")
                await store.undo("main", "v", "e3")
                await store.merge("main", "w", "v")
                await store.append("main", [click("after", "v"), click("after", "u")])
                await rebuild(store, NEWER)
                for user_id in "uvwx":
                    await assert_state_is_fold_of_log(store, user_id)
                assert len(list(counted(await log_of(store, "w")))) == 60
                assert len(list(counted(await log_of(store, "u")))) == 30

        asyncio.run(law())

    def test_a_long_log_is_folded_again_too(self, address: str) -> None:
        """More than a request folds, and more than a page."""

        async def law() -> None:
            async with opened(address, GENERATION) as store:
                for start in (0, 600):
                    numbers = range(start, start + 600)
                    await store.append(
                        "main", [click(f"e{n}", item=n % 12, timestamp_us=START_US + n) for n in numbers]
                    )
                assert await store.undo("main", "u", "e1199")
                assert await store.undo("main", "u", "e0")
                await store.append("main", [click("one more", timestamp_us=START_US + 2000)])
                await assert_state_is_fold_of_log(store, "u")
                assert len(list(counted(await log_of(store, "u")))) == 1199

        asyncio.run(law())

    def test_a_visitor_with_too_many_events_is_refused(self, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (storage.redis_corrections, storage.sqlite_corrections):
            monkeypatch.setattr(module, "MAX_MERGED", 5)

        async def law() -> None:
            async with opened(address, GENERATION) as store:
                await store.append("main", [click(f"e{n}", "visitor") for n in range(6)])
                await store.append("main", [click(f"e{n}", "small") for n in range(5)])
                with pytest.raises(MergeTooLarge):
                    await store.merge("main", "u", "visitor")
                assert len(await log_of(store, "visitor")) == 6
                assert await log_of(store, "u") == []
                assert await store.merge("main", "u", "small")
                assert len(await log_of(store, "u")) == 5

        asyncio.run(law())


class TestAtOnce:
    def test_events_undos_and_merges_at_once_count_everything_once(self, address: str) -> None:
        """Two stores post as three users while each of them is merged into the next one, and some events are undone."""

        async def law() -> None:
            async with opened(address, GENERATION) as one, opened(address, GENERATION) as two:
                events = [click(f"e{n}", "abc"[n % 3], n % 12) for n in range(60)]
                for event in events[:12]:
                    await one.append("main", [event])
                work: list[Any] = [store.append("main", [event]) for event in events for store in (one, two)]
                undone = [(event.user_id, event.event_id) for event in events[:12:2]]
                work[10:10] = [one.undo("main", *name) for name in undone]
                circle = [("b", "a", one), ("c", "b", two), ("a", "c", one), ("a", "b", two)]
                work[20:20] = [store.merge("main", user_id, visitor) for user_id, visitor, store in circle]
                outcomes = await asyncio.gather(*work, return_exceptions=True)
                failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
                assert all(isinstance(failure, MergeRefused) for failure in failures), failures
                assert len(failures) < len(circle)

                distinct = {tuple(event.event_id for event in await log_of(one, name)): name for name in "abc"}
                logs = [await log_of(two, name) for name in distinct.values()]
                posted = Counter(posted_as(event) for log in logs for event in log if not is_correction(event))
                assert posted == Counter((event.user_id, event.event_id) for event in events)
                left = Counter(posted_as(event) for log in logs for event in counted(log))
                assert posted - left == Counter(undone)
                for store in (one, two):
                    for name in "abc":
                        await assert_state_is_fold_of_log(store, name)

        asyncio.run(law())


class TestKilled:
    def test_a_killed_merge_is_whole_or_not_there_and_done_by_sending_it_again(self, address: str) -> None:
        said: list[list[str]] = []
        for kill in range(3):
            command = [sys.executable, "-m", "tests.storage.merge_forever", address, f"k{kill}", "u"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
                assert process.stdout is not None
                said += [process.stdout.readline().split() for _ in range(8 + 5 * kill)]
                process.send_signal(signal.SIGKILL)
                said += [line.split() for line in process.stdout.read().splitlines(True) if line.endswith("\n")]

        async def law() -> None:
            visitors = {visitor for what, visitor in said if what == "visited"}
            merged = {visitor for what, visitor in said if what == "merged"}
            async with opened(address, GENERATION) as store:
                before = Counter(posted_as(event)[0] for event in await log_of(store, "u"))
                assert set(before.values()) <= {VISITS}
                assert merged <= before.keys()
                await assert_state_is_fold_of_log(store, "u")
                for visitor in visitors:
                    assert len(await log_of(store, visitor)) >= VISITS
                    await store.merge("main", "u", visitor)
                after = Counter(posted_as(event)[0] for event in await log_of(store, "u"))
                assert {visitor: after[visitor] for visitor in visitors} == dict.fromkeys(visitors, VISITS)
                await assert_state_is_fold_of_log(store, "u")

        asyncio.run(law())

    def test_a_merge_that_ends_before_any_step_is_finished_by_whoever_comes(self, address: str) -> None:
        if address.startswith("sqlite"):
            return  # one transaction has no steps

        async def law() -> None:
            for step in range(100):
                names = {how: (fresh_user(), fresh_user()) for how in WAYS_TO_FINISH}
                async with opened(address, GENERATION) as store:
                    events = [click(f"e{n}", user_id, n) for user_id, _ in names.values() for n in range(4)]
                    events += [click(f"e{n}", visitor, n) for _, visitor in names.values() for n in range(3)]
                    await store.append("main", events)
                    for _, visitor in names.values():
                        await store.undo("main", visitor, "e1")
                has_died = []
                for user_id, visitor in names.values():
                    async with opened(address, GENERATION) as store:
                        with DyingAfter(step, store) as died, suppress(StorageUnavailable):
                            await store.merge("main", user_id, visitor)
                    has_died.append(bool(died))
                async with opened(address, GENERATION) as store:
                    for how, (user_id, visitor) in names.items():
                        assert len(await log_of(store, user_id)) in (4, 8)
                        await assert_state_is_fold_of_log(store, user_id)
                        await finished(how, store, user_id, visitor)
                        await assert_state_is_fold_of_log(store, user_id)
                        await assert_state_is_fold_of_log(store, visitor)
                if not any(has_died):
                    assert step > 8
                    return
            raise AssertionError("there is no end to the steps")

        asyncio.run(law())

    def test_an_erasure_that_ends_before_any_step_is_finished_by_erasing_again(self, quick_server: RedisServer) -> None:
        """By the name that it was asked for, which became another one, which became the user, as did a fourth."""
        address = f"redis:{quick_server.new_address()}"

        async def law() -> None:
            for step in range(100):
                user_id, between, asked_for, fourth = users = [fresh_user() for _ in range(4)]
                async with opened(address, GENERATION) as store:
                    await store.append("main", [click("e", name) for name in users])
                    for name, visitor in ((between, asked_for), (user_id, between), (user_id, fourth)):
                        await store.merge("main", name, visitor)
                async with opened(address, GENERATION) as store:
                    with DyingAfter(step, store) as died, suppress(StorageUnavailable):
                        await store.erase("main", asked_for)
                    await store.erase("main", asked_for)
                    for name in users:
                        assert await log_of(store, name) == []
                        assert await store.states("main", [name], GENERATION) == [None]
                    left = [key + quick_server.client.dump(key) for key in quick_server.client.keys("*:main/*")]
                    assert not any(name.encode() in one for one in left for name in users)
                if not died:
                    assert step > 8
                    return
            raise AssertionError("there is no end to the steps")

        asyncio.run(law())


class TestOvertaken:
    """A merge and an erasure meet, at any step of either: one of them was first."""

    @pytest.mark.parametrize("has_events", [True, False], ids=["", "the user has no events"])
    @pytest.mark.parametrize("slower", ["merge", "erase"])
    def test_what_was_erased_is_gone_and_stays_gone(
        self, quick_server: RedisServer, slower: str, has_events: bool
    ) -> None:
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
            faster = "erase" if slower == "merge" else "merge"
            with OvertakenAt(step, slow, lambda: work(faster, fast)) as overtaken:
                await work(slower, slow)
            if overtaken:
                log = [posted_as(event) for event in await log_of(fast, user_id)]
                left = entries_of(visitor)
                assert log in ([], [(visitor, "e1"), (visitor, "e2")])
                assert left == len(log) + 1 if left or log else traces(visitor) == []  # "into" is one more
                await fast.erase("main", user_id)
                assert traces(user_id, visitor) == []
            return bool(overtaken)

        async def law() -> None:
            async with opened(address, GENERATION) as slow, opened(address, GENERATION) as fast:
                for step in range(100):
                    if not await meet(step, slow, fast):
                        assert step > 4
                        return
            raise AssertionError("there is no end to the steps")

        asyncio.run(law())

    def test_a_visitor_who_was_erased_and_comes_back_brings_nothing_along(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody has read what was erased, and goes on when the visitor is about to become the user once more."""

        async def dies(*_: Any) -> None:
            raise StorageUnavailable("killed")

        async def law() -> None:
            address = new_address("redis-server", tmp_path)
            async with opened(address, GENERATION) as slow, opened(address, GENERATION) as fast:
                assert isinstance(slow, RedisStore)
                assert isinstance(fast, RedisStore)
                await fast.append("main", [click("own"), click("old", "visitor")])
                append_lacking = slow._corrections._append_lacking

                async def overtaken(*args: Any) -> bool:
                    monkeypatch.undo()
                    await fast.erase("main", "visitor")
                    await fast.append("main", [click("new", "visitor")])
                    with monkeypatch.context() as patch:
                        patch.setattr(fast._corrections, "_copy", dies)
                        with pytest.raises(StorageUnavailable):
                            await fast.merge("main", "u", "visitor")
                    return await append_lacking(*args)

                monkeypatch.setattr(slow._corrections, "_append_lacking", overtaken)
                await slow.merge("main", "u", "visitor")
                assert [posted_as(event) for event in await log_of(fast, "u")] == [("visitor", "new")]

        asyncio.run(law())


class OvertakenAt:
    """Within the block, somebody else's work is done before one call of the servers; true in the end if it was."""

    def __init__(self, call: int, store: UserStore, work: Callable[[], Awaitable[object]]) -> None:
        assert isinstance(store, RedisStore)
        self._left = call
        self._work = work
        self._servers, self._batch = store._servers, store._servers.batch

    def __bool__(self) -> bool:
        return self._left < 0

    async def _call(self, *args: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == -1:
            await self._work()
        return await self._batch(*args, **options)

    def __enter__(self) -> OvertakenAt:
        self._servers.batch = self._call  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.batch = self._batch  # type: ignore[method-assign]


WAYS_TO_FINISH = ["merging again", "reading the visitor", "posting as the visitor", "erasing"]


async def finished(how: str, store: UserStore, user_id: str, visitor: str) -> None:
    """Whoever comes finds the visitor by themselves, or all of the visitor in the user."""
    match how:
        case "merging again":
            await store.merge("main", user_id, visitor)
            assert len(await log_of(store, user_id)) == 8
            assert not await store.merge("main", user_id, visitor)
        case "reading the visitor":
            await store.states("main", [visitor], GENERATION)
            assert len(await log_of(store, visitor)) in (4, 8)
            assert len(await log_of(store, user_id)) == len(await log_of(store, visitor))
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


class DyingAfter:
    """Within the block, every call of the servers fails after some; true in the end if one has."""

    def __init__(self, calls: int, store: UserStore) -> None:
        assert isinstance(store, RedisStore)
        self._left = calls
        self._died = False
        self._servers, self._batch = store._servers, store._servers.batch

    def __bool__(self) -> bool:
        return self._died

    async def _call(self, *args: Any, **options: Any) -> Any:
        if self._left == 0:
            self._died = True
            raise StorageUnavailable("killed")
        self._left -= 1
        return await self._batch(*args, **options)

    def __enter__(self) -> DyingAfter:
        self._servers.batch = self._call  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.batch = self._batch  # type: ignore[method-assign]
