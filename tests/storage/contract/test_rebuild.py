"""A rebuild folds every log for another generation, during concurrent writes and after kills."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from storage.errors import StorageUnavailable
from storage.maintenance.rebuild import Rebuilt, rebuild
from storage.protocol import UserStore
from storage.records import FoldedState, LogPage
from storage.redis.store import RedisStore
from storage.state.compiled_fold import fold_many
from storage.state.event import Event
from storage.state.fold import fold_event
from storage.state.generation import Generation
from tests.storage.contract.fold_checks import assert_states_are_folds, count_saved
from tests.storage.contract.stores import ARCHIVED, FEW_PARTITIONS, append_all, new_address, opened, redis_keys
from tests.storage.oracles.random_events import click, events_of, make_generation, make_newer, user_ids_of
from tests.waiting import until

OLD = make_generation()
NEW = make_newer()
ROOT = Path(__file__).parents[3]
PAUSE_S = 0.02  # of writers, which otherwise take the processor from the rebuild that they wait for


class TestRebuild:
    @pytest.mark.usefixtures("small_pages")
    @pytest.mark.parametrize(("users", "each"), [(1, 20), (1, 21), (30, 1), (7, 7), (5, 14), (0, 0)])
    async def test_the_whole_log_has_every_entry_once_and_in_order_per_user(
        self, address: str, users: int, each: int
    ) -> None:
        async with opened(address, OLD) as store:
            for tenant in ("main", "other"):
                await append_all(store, events_of(users, each), tenant)
            found, complete = defaultdict(list), set()
            async for page in store.log():
                for tenant, entry in page.entries:
                    assert (tenant, entry.record.user_id) not in complete
                    found[tenant, entry.record.user_id].append(entry)
                if page.is_complete:
                    complete |= set(found)
            assert complete == set(found)
            assert len(found) == 2 * users
            for (tenant, user_id), entries in found.items():
                assert entries == await store.events(tenant, user_id)

    def test_folding_a_single_user_compiles_nothing_more(self, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """numpy reports columns of a single record as contiguous, which numba compiles separately."""
        contiguous: list[bool] = []

        def recorded(generation: Generation, states: NDArray[np.void], *of_events: Any) -> NDArray[np.bool_]:
            contiguous.append(states["n"].flags.contiguous)
            return fold_many(generation, states, *of_events)

        monkeypatch.setattr("storage.maintenance.rebuild.fold_many", recorded)

        async def law() -> None:
            async with opened(address, OLD) as store:
                await append_all(store, events_of(1, 3))
                await rebuild(store, NEW)

        asyncio.run(law())
        assert contiguous
        assert not any(contiguous)

    @pytest.mark.usefixtures("small_pages")
    async def test_a_rebuild_folds_all_users(self, address: str) -> None:
        events = events_of(12, 9)
        async with opened(address, OLD) as store:
            await append_all(store, events)
            await append_all(store, events[:10], tenant="other")
            progress: list[Rebuilt] = []
            done = await rebuild(store, NEW, progress.append)
            assert (done.events, done.users) == (108, 12)
            assert progress[-1] == done
            assert await count_saved(store, user_ids_of(events), NEW) == 12
            await assert_states_are_folds(store, user_ids_of(events), OLD, NEW)
            done = await rebuild(store, NEW, tenant="other")
            assert (done.events, done.users) == (10, len(user_ids_of(events[:10])))
            await assert_states_are_folds(store, user_ids_of(events[:10]), NEW, tenant="other")

    @pytest.mark.usefixtures("small_pages")
    def test_other_processes_write_during_a_rebuild(self, address: str) -> None:
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
                        await asyncio.sleep(PAUSE_S)
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

    async def test_a_killed_rebuild_can_be_repeated(self, address: str) -> None:
        events = events_of(300, 3)
        user_ids = user_ids_of(events)
        async with opened(address, OLD) as store:
            await append_all(store, events)
            for _ in range(3):
                command = [sys.executable, "-m", "tests.storage.processes.rebuild_forever", address]
                process = subprocess.Popen(command, cwd=ROOT)
                await until(lambda: count_saved(store, user_ids[:1], NEW))
                process.send_signal(signal.SIGKILL)
                process.wait()
                await append_all(store, events_of(300, 1, f"after {process.pid} "))
            await assert_states_are_folds(store, user_ids[:20], NEW)
            await rebuild(store, NEW)
            assert await count_saved(store, user_ids, NEW) == 300
            await assert_states_are_folds(store, user_ids, OLD, NEW)

    async def test_saved_states_never_regress_and_require_a_log(self, address: str) -> None:
        async with opened(address, OLD) as store:
            await store.append("main", [click("e1"), click("e2", item=1)])
            first, second = await store.events("main", "u")
            assert isinstance(first.record, Event)
            of_first, of_both = NEW.empty(), NEW.empty()
            fold_event(NEW, of_first, first.record)
            for entry in (first, second):
                assert isinstance(entry.record, Event)
                fold_event(NEW, of_both, entry.record)
            await store.save_states(NEW, [FoldedState("main", "u", second.seq, NEW.encode(of_both))])
            await store.save_states(NEW, [FoldedState("main", "u", first.seq, NEW.encode(of_first))])
            await store.save_states(NEW, [FoldedState("main", "nobody", first.seq, NEW.encode(of_first))])
            assert await store.states("main", ["u", "nobody"], NEW, max_missing=0) == [NEW.encode(of_both), None]
            await store.append("main", [click("e1", "nobody", item=3)])
            await assert_states_are_folds(store, ["u", "nobody"], NEW)


class Interrupted:
    """A store that runs an action after every page of the log that is read."""

    def __init__(self, store: UserStore, happens: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._happens = happens
        self.save_states = store.save_states

    async def log(self) -> AsyncIterator[LogPage]:
        async for page in self._store.log():
            yield page
            await self._happens()


class TestRebuildAndErasing:
    async def test_erasure_deletes_states_of_every_generation(self, address: str) -> None:
        async with opened(address, OLD) as store, opened(address) as rebuilding:
            await append_all(store, events_of(5, 4))
            await rebuild(rebuilding, NEW)
            await store.erase("main", "user0")
            for generation in (OLD, NEW):
                assert await store.states("main", ["user0"], generation) == [None]
            assert await redis_keys(address, "*/user0") == []
            await append_all(store, events_of(1, 2, "back "))
            await assert_states_are_folds(store, ["user0", "user1"], OLD, NEW)

    async def test_a_user_erased_and_back_before_archiving_is_rebuilt(self, address: str) -> None:
        async with opened(address, OLD) as store:
            await append_all(store, events_of(5, 9))
            await store.erase("main", "user0")
            await type(store).append(store, "main", events_of(1, 3, "back "))  # which archives nothing
            await rebuild(store, NEW)
            assert await count_saved(store, user_ids_of(events_of(5, 9)), NEW) == 5
            await assert_states_are_folds(store, ["user0", "user1"], OLD, NEW)

    @pytest.mark.usefixtures("small_pages")
    async def test_users_are_erased_and_return_during_a_rebuild(self, address: str) -> None:
        user_ids = user_ids_of(events_of(6, 20))
        turns = count()
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

    async def test_a_trimmed_log_is_not_rebuilt_without_its_archive(self, tmp_path: Path) -> None:
        address = new_address(ARCHIVED, tmp_path)
        async with opened(address, OLD) as store:
            await append_all(store, events_of(5, 9))
        url, prefix = address.partition(":")[2].split(" ")[:2]
        lost = await RedisStore.open(url, [NEW], prefix=prefix, partitions=FEW_PARTITIONS)
        with pytest.raises(StorageUnavailable, match="--archive-dir"):
            await rebuild(lost, NEW)
        await lost.close()
