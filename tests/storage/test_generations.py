"""Several generations in one store: any state is the fold of the log, whoever serves what, and the pointer is one."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import cast

import pytest

import storage.redis
import storage.redis_servers
import storage.sqlite
import storage.sqlite_log
import storage.sqlite_states
from storage.errors import StorageUnavailable
from storage.protocol import UserStore
from storage.rebuild import Rebuilt, rebuild
from storage.records import FoldedState, LogPage, NamedGeneration
from storage.redis import RedisStore
from storage.state import Generation
from storage.state_event import Event
from storage.state_fold import fold_event
from tests.storage.catalogue import click, make_generation, make_newer
from tests.storage.naive_fold import assert_state_is, fold
from tests.storage.stores import ARCHIVED, FEW_PARTITIONS, new_address, opened

OLD = make_generation()
NEW = make_newer()
NAMED_OLD, NAMED_NEW = NamedGeneration("old", OLD.tag), NamedGeneration("new", NEW.tag)
ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0


def events_of(users: int, each: int, prefix: str = "e") -> list[Event]:
    """In random order of users."""
    rng = random.Random(prefix)
    numbers = [user for user in range(users) for _ in range(each)]
    rng.shuffle(numbers)
    return [
        click(f"{prefix}{number}", f"user{user}", item=rng.randrange(15), timestamp_us=rng.randrange(100))
        for number, user in enumerate(numbers)
    ]


async def append_all(store: UserStore, events: Sequence[Event], tenant: str = "main") -> None:
    for start in range(0, len(events), 100):
        await store.append(tenant, events[start : start + 100])


async def assert_states_are_folds(
    store: UserStore, user_ids: Sequence[str], *generations: Generation, tenant: str = "main"
) -> None:
    for user_id in user_ids:
        log = [entry.event for entry in await store.events(tenant, user_id, limit=10**6)]
        assert log
        for generation in generations:
            (value,) = await store.states(tenant, [user_id], generation)
            assert_state_is(value, fold(generation, log))


async def kept(store: UserStore, user_ids: Sequence[str], generation: Generation) -> int:
    """How many of the users' states are up to date as they are stored; looking folds the others."""
    return sum(value is not None for value in await store.states("main", user_ids, generation, max_missing=0))


def user_ids_of(events: Sequence[Event]) -> list[str]:
    return sorted({event.user_id for event in events})


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that users and partitions go over the ends of pages."""
    monkeypatch.setattr(storage.sqlite, "LOG_PAGE", 7)
    monkeypatch.setattr(storage.sqlite_log, "LOG_PAGE", 7)
    monkeypatch.setattr(storage.redis, "STREAM_PAGE", 3)
    monkeypatch.setattr(storage.sqlite, "SAVED_AT_ONCE", 4)
    monkeypatch.setattr(storage.redis, "KEPT_AT_ONCE", 2)


class TestRebuild:
    @pytest.mark.usefixtures("small_pages")
    @pytest.mark.parametrize(("users", "each"), [(1, 20), (1, 21), (30, 1), (7, 7), (5, 14), (0, 0)])
    def test_the_log_is_every_entry_once_and_each_user_s_in_order(self, address: str, users: int, each: int) -> None:
        async def law() -> None:
            async with opened(address, OLD) as store:
                for tenant in ("main", "other"):
                    await append_all(store, events_of(users, each), tenant)
                found, complete = defaultdict(list), set()
                async for page in store.log():
                    for tenant, entry in page.entries:
                        assert (tenant, entry.event.user_id) not in complete
                        found[tenant, entry.event.user_id].append(entry)
                    if page.is_complete:
                        complete |= set(found)
                assert complete == set(found)
                assert len(found) == 2 * users
                for (tenant, user_id), entries in found.items():
                    assert entries == await store.events(tenant, user_id)

        asyncio.run(law())

    @pytest.mark.usefixtures("small_pages")
    def test_a_rebuild_folds_everything(self, address: str) -> None:
        events = events_of(12, 9)

        async def law() -> None:
            async with opened(address, OLD) as store:
                await append_all(store, events)
                await append_all(store, events[:10], tenant="other")
                progress: list[Rebuilt] = []
                done = await rebuild(store, NEW, progress.append)
                assert (done.events, done.users) == (108, 12)
                assert progress[-1] == done
                assert await kept(store, user_ids_of(events), NEW) == 12
                await assert_states_are_folds(store, user_ids_of(events), OLD, NEW)
                done = await rebuild(store, NEW, tenant="other")
                assert (done.events, done.users) == (10, len(user_ids_of(events[:10])))
                await assert_states_are_folds(store, user_ids_of(events[:10]), NEW, tenant="other")

        asyncio.run(law())

    @pytest.mark.usefixtures("small_pages")
    def test_events_go_on_through_other_processes_while_it_runs(self, address: str) -> None:
        before = events_of(20, 10)

        async def law() -> None:
            async with opened(address, OLD) as one, opened(address, OLD) as two, opened(address) as rebuilding:
                await append_all(one, before)
                done = asyncio.Event()

                async def go_on(store: UserStore, name: str) -> int:
                    for number in count():
                        if done.is_set():
                            break
                        await append_all(store, events_of(20, 1, f"{name}-{number}-"))
                    return number

                writers = [asyncio.create_task(go_on(store, name)) for store, name in ((one, "one"), (two, "two"))]
                await rebuild(rebuilding, NEW)
                done.set()
                rounds = await asyncio.gather(*writers)
                assert min(rounds) > 0
                log = await one.events("main", "user0", limit=10**6)
                assert len(log) == 10 + sum(rounds)
                await assert_states_are_folds(two, user_ids_of(before), OLD, NEW)

        asyncio.run(law())

    def test_a_killed_rebuild_is_run_again(self, address: str) -> None:
        events = events_of(300, 3)
        user_ids = user_ids_of(events)

        async def law() -> None:
            async with opened(address, OLD) as store:
                await append_all(store, events)
                for _ in range(3):
                    command = [sys.executable, "-m", "tests.storage.rebuild_forever", address]
                    process = subprocess.Popen(command, cwd=ROOT)
                    async with asyncio.timeout(PATIENCE_S):
                        while await kept(store, user_ids[:1], NEW) == 0:
                            await asyncio.sleep(0.01)
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    await append_all(store, events_of(300, 1, f"after {process.pid} "))
                await assert_states_are_folds(store, user_ids[:20], NEW)
                await rebuild(store, NEW)
                assert await kept(store, user_ids, NEW) == 300
                await assert_states_are_folds(store, user_ids, OLD, NEW)

        asyncio.run(law())

    def test_what_is_kept_never_goes_back_and_needs_a_log(self, address: str) -> None:
        async def law() -> None:
            async with opened(address, OLD) as store:
                await store.append("main", [click("e1"), click("e2", item=1)])
                first, second = await store.events("main", "u")
                of_first, of_both = NEW.empty(), NEW.empty()
                fold_event(NEW, of_first, first.event)
                for entry in (first, second):
                    fold_event(NEW, of_both, entry.event)
                await store.save_states(NEW, [FoldedState("main", "u", second.seq, NEW.encode(of_both))])
                await store.save_states(NEW, [FoldedState("main", "u", first.seq, NEW.encode(of_first))])
                await store.save_states(NEW, [FoldedState("main", "nobody", first.seq, NEW.encode(of_first))])
                assert await store.states("main", ["u", "nobody"], NEW, max_missing=0) == [NEW.encode(of_both), None]
                await store.append("main", [click("e1", "nobody", item=3)])
                await assert_states_are_folds(store, ["u", "nobody"], NEW)

        asyncio.run(law())


class Interrupted:
    """A store in which something happens after every page of the log that somebody reads."""

    def __init__(self, store: UserStore, happens: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._happens = happens
        self.save_states = store.save_states

    async def log(self) -> AsyncIterator[LogPage]:
        async for page in self._store.log():
            yield page
            await self._happens()


class TestRebuildAndErasing:
    def test_erasing_reaches_the_states_of_every_generation(self, address: str) -> None:
        async def law() -> None:
            async with opened(address, OLD) as store, opened(address) as rebuilding:
                await append_all(store, events_of(5, 4))
                await rebuild(rebuilding, NEW)
                await store.erase("main", "user0")
                for generation in (OLD, NEW):
                    assert await store.states("main", ["user0"], generation) == [None]
                if isinstance(store, RedisStore):
                    assert await store._call("KEYS", f"{store._keys.meta.removesuffix(':meta')}:*/user0") == []
                await append_all(store, events_of(1, 2, "back "))
                await assert_states_are_folds(store, ["user0", "user1"], OLD, NEW)

        asyncio.run(law())

    def test_who_was_erased_and_came_back_before_the_archiver_s_turn(self, address: str) -> None:
        async def law() -> None:
            async with opened(address, OLD) as store:
                await append_all(store, events_of(5, 9))
                await store.erase("main", "user0")
                await type(store).append(store, "main", events_of(1, 3, "back "))  # which archives nothing
                await rebuild(store, NEW)
                assert await kept(store, user_ids_of(events_of(5, 9)), NEW) == 5
                await assert_states_are_folds(store, ["user0", "user1"], OLD, NEW)

        asyncio.run(law())

    @pytest.mark.usefixtures("small_pages")
    def test_users_are_erased_and_come_back_while_it_runs(self, address: str) -> None:
        user_ids = user_ids_of(events_of(6, 20))
        turns = count()

        async def law() -> None:
            async with opened(address, OLD) as store:
                await append_all(store, events_of(6, 20))

                async def erase_one() -> None:
                    turn = next(turns)
                    if turn < 30:
                        user_id = f"user{turn % 6}"
                        await store.erase("main", user_id)
                        await store.append("main", [click(f"back {turn} {n}", user_id, item=n % 12) for n in range(8)])

                await rebuild(cast("UserStore", Interrupted(store, erase_one)), NEW)
                await assert_states_are_folds(store, user_ids, OLD, NEW)

        asyncio.run(law())

    def test_a_trimmed_log_is_not_rebuilt_without_its_archive(self, tmp_path: Path) -> None:
        address = new_address(ARCHIVED, tmp_path)

        async def law() -> None:
            async with opened(address, OLD) as store:
                await append_all(store, events_of(5, 9))
            url, prefix = address.partition(":")[2].split(" ")[:2]
            lost = await RedisStore.open(url, [NEW], prefix=prefix, partitions=FEW_PARTITIONS)
            with pytest.raises(StorageUnavailable, match="--archive-dir"):
                await rebuild(lost, NEW)
            await lost.close()

        asyncio.run(law())


class TestLaggingStates:
    def test_processes_that_serve_different_generations_share_a_log(self, address: str) -> None:
        async def law() -> None:
            async with opened(address, OLD) as old, opened(address, NEW) as new, opened(address, OLD, NEW) as both:
                stores = (old, new, both)
                events = events_of(5, 40)
                sends = [stores[number % 3].append("main", [event]) for number, event in enumerate(events)]
                await asyncio.gather(*sends)
                for store in stores:
                    await assert_states_are_folds(store, user_ids_of(events), OLD, NEW)

        asyncio.run(law())

    def test_what_is_served_changes_while_events_come_in(self, address: str) -> None:
        events = events_of(5, 60)

        async def law() -> None:
            async with opened(address, OLD) as store:

                async def send(number: int, event: Event) -> None:
                    if number % 20 == 0:
                        store.serve_generations([(OLD, NEW)[number // 20 % 2]])
                    (answer,) = await store.append("main", [event])
                    assert not answer.duplicate

                for start in range(0, len(events), 10):
                    some = enumerate(events[start : start + 10], start)
                    await asyncio.gather(*(send(number, event) for number, event in some))
                await assert_states_are_folds(store, user_ids_of(events), OLD, NEW)
                store.serve_generations([NEW])
                await store.append("main", [click("last", "user0")])
                assert await kept(store, ["user0"], NEW) == 1
                assert await kept(store, ["user0"], OLD) == 0

        asyncio.run(law())

    def test_who_asks_for_little_folding_gets_none_now_and_the_state_soon(self, address: str) -> None:
        async def law() -> None:
            async with opened(address, OLD) as store:
                await append_all(store, events_of(1, 50))
                assert await store.states("main", ["user0", "nobody"], NEW, max_missing=49) == [None, None]
                async with asyncio.timeout(PATIENCE_S):
                    while await kept(store, ["user0"], NEW) == 0:
                        await asyncio.sleep(0.01)
                await assert_states_are_folds(store, ["user0"], NEW)
                await store.append("main", [click("one more", "user0")])
                (value,) = await store.states("main", ["user0"], NEW, max_missing=1)
                assert value is not None

        asyncio.run(law())

    def test_a_store_without_a_generation_takes_no_events(self, address: str) -> None:
        async def law() -> None:
            async with opened(address) as store:
                with pytest.raises(ValueError, match="at least one generation"):
                    await store.append("main", [click("e")])
                assert await store.events("main", "u") == []

        asyncio.run(law())


class TestRegistry:
    def test_everybody_sees_where_the_pointer_points_at_once(self, address: str) -> None:
        async def law() -> None:
            async with opened(address, OLD) as one, opened(address, NEW) as two:
                assert await one.generations.active() is None
                assert await one.generations.known() == []
                for named in (NAMED_OLD, NAMED_NEW, NAMED_OLD):
                    await one.generations.activate(named)
                    assert await two.generations.active() == named
                    assert [known.named for known in await two.generations.known() if known.is_active] == [named]
            async with opened(address) as again:
                assert await again.generations.active() == NAMED_OLD

        asyncio.run(law())

    def test_tenants_have_generations_of_their_own(self, address: str) -> None:
        events = events_of(5, 2)

        async def law() -> None:
            async with (
                opened(address, NEW) as main,
                opened(address, NEW, tenant="shop*") as shop,
                opened(address, NEW, tenant="shop") as other,
            ):
                for store, tenant in ((main, "main"), (shop, "shop*"), (other, "shop")):
                    await append_all(store, events, tenant)
                await main.generations.activate(NAMED_OLD)
                await shop.generations.activate(NAMED_NEW)
                await other.generations.announce(NAMED_NEW, 60)
                assert [await store.generations.active() for store in (main, shop, other)] == [
                    NAMED_OLD,
                    NAMED_NEW,
                    None,
                ]
                assert [known.named for known in await main.generations.known()] == [NAMED_OLD]
                assert await shop.generations.drop(NEW.tag) == 5
                (known,) = await other.generations.known()
                assert known.is_live
                assert not known.is_active
                assert await kept(main, user_ids_of(events), NEW) == 5
                assert None not in await other.states("shop", user_ids_of(events), NEW, max_missing=0)
                assert set(await shop.states("shop*", user_ids_of(events), NEW, max_missing=0)) == {None}

        asyncio.run(law())

    def test_who_serves_is_live_for_a_while(self, address: str) -> None:
        async def live(store: UserStore) -> dict[str, bool]:
            return {known.named.name: known.is_live for known in await store.generations.known()}

        async def law() -> None:
            async with opened(address, OLD) as store:
                await store.generations.announce(NAMED_OLD, 60)
                await store.generations.announce(NAMED_NEW, 0.01)
                await asyncio.sleep(0.02)
                assert await live(store) == {"old": True, "new": False}
                await store.generations.announce(NamedGeneration("renamed", NEW.tag), 60)
                assert await live(store) == {"old": True, "renamed": True}

        asyncio.run(law())

    @pytest.mark.usefixtures("small_pages")
    def test_forgetting_removes_the_states_of_that_generation_only(
        self, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(storage.sqlite_states, "DROPPED_AT_ONCE", 3)
        monkeypatch.setattr(storage.redis_servers, "SCANNED_AT_ONCE", 3)
        events = events_of(20, 2)
        user_ids = user_ids_of(events)

        async def law() -> None:
            async with opened(address, OLD, NEW) as store:
                await append_all(store, events)
                for named in (NAMED_OLD, NAMED_NEW):
                    await store.generations.announce(named, 0.001)
                assert await store.generations.drop(NEW.tag) == 20
                assert await store.generations.drop(NEW.tag) == 0
                assert [known.named for known in await store.generations.known()] == [NAMED_OLD]
                assert await kept(store, user_ids, OLD) == 20
                assert await kept(store, user_ids, NEW) == 0
                await assert_states_are_folds(store, user_ids, OLD, NEW)

        asyncio.run(law())
