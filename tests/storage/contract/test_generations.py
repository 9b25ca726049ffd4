"""Generations in one store: states equal the fold of their log, and processes share the active generation."""

from __future__ import annotations

import asyncio

import pytest

import storage.redis.connections.client
import storage.sqlite.states
from storage.protocol import UserStore
from storage.records import NamedGeneration
from storage.state.event import Event
from tests.storage.contract.fold_checks import assert_states_are_folds, count_saved
from tests.storage.contract.stores import append_all, opened
from tests.storage.oracles.random_events import click, events_of, make_generation, make_newer, user_ids_of
from tests.waiting import until

OLD = make_generation()
NEW = make_newer()
NAMED_OLD, NAMED_NEW = NamedGeneration("old", OLD.tag), NamedGeneration("new", NEW.tag)


class TestLaggingStates:
    async def test_processes_that_serve_different_generations_share_a_log(self, address: str) -> None:
        async with opened(address, OLD) as old, opened(address, NEW) as new, opened(address, OLD, NEW) as both:
            stores = (old, new, both)
            events = events_of(5, 40)
            sends = [stores[number % 3].append("main", [event]) for number, event in enumerate(events)]
            await asyncio.gather(*sends)
            for store in stores:
                await assert_states_are_folds(store, user_ids_of(events), OLD, NEW)

    async def test_activation_changes_under_load(self, address: str) -> None:
        events = events_of(5, 60)
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
            assert await count_saved(store, ["user0"], NEW) == 1
            assert await count_saved(store, ["user0"], OLD) == 0

    async def test_a_state_beyond_max_missing_is_folded_in_the_background(self, address: str) -> None:
        async with opened(address, OLD) as store:
            await append_all(store, events_of(1, 50))
            assert await store.states("main", ["user0", "nobody"], NEW, max_missing=49) == [None, None]
            await until(lambda: count_saved(store, ["user0"], NEW))
            await assert_states_are_folds(store, ["user0"], NEW)
            await store.append("main", [click("one more", "user0")])
            (value,) = await store.states("main", ["user0"], NEW, max_missing=1)
            assert value is not None

    async def test_a_store_without_a_generation_takes_no_events(self, address: str) -> None:
        async with opened(address) as store:
            with pytest.raises(ValueError, match="at least one generation"):
                await store.append("main", [click("e")])
            assert await store.events("main", "u") == []


class TestRegistry:
    async def test_the_active_generation_is_visible_to_all_at_once(self, address: str) -> None:
        async with opened(address, OLD) as one, opened(address, NEW) as two:
            assert await one.generations.active() is None
            assert await one.generations.known() == []
            for named in (NAMED_OLD, NAMED_NEW, NAMED_OLD):
                await one.generations.activate(named)
                assert await two.generations.active() == named
                assert [known.named for known in await two.generations.known() if known.is_active] == [named]
        async with opened(address) as again:
            assert await again.generations.active() == NAMED_OLD

    async def test_tenants_have_separate_generations(self, address: str) -> None:
        events = events_of(5, 2)
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
            assert await count_saved(main, user_ids_of(events), NEW) == 5
            assert None not in await other.states("shop", user_ids_of(events), NEW, max_missing=0)
            assert set(await shop.states("shop*", user_ids_of(events), NEW, max_missing=0)) == {None}

    async def test_served_generations_stay_live_for_a_while(self, address: str) -> None:
        async def live(store: UserStore) -> dict[str, bool]:
            return {known.named.name: known.is_live for known in await store.generations.known()}

        async with opened(address, OLD) as store:
            await store.generations.announce(NAMED_OLD, 60)
            await store.generations.announce(NAMED_NEW, 0.01)
            await asyncio.sleep(0.02)
            assert await live(store) == {"old": True, "new": False}
            await store.generations.announce(NamedGeneration("renamed", NEW.tag), 60)
            assert await live(store) == {"old": True, "renamed": True}
            await store.generations.announce(NAMED_OLD, 0)
            assert await live(store) == {"old": True, "renamed": True}, "registering it again ends nothing"

    async def test_a_clock_ahead_keeps_no_generation_live(self, address: str) -> None:
        """An expiry a year ahead counts as invalid; services that use the generation renew it."""
        async with opened(address, OLD) as store:
            await store.generations.announce(NAMED_OLD, 365 * 86_400)
            assert [known.is_live for known in await store.generations.known()] == [False]
            await store.generations.announce(NAMED_OLD, 60)
            assert [known.is_live for known in await store.generations.known()] == [True]

    @pytest.mark.usefixtures("small_pages")
    async def test_dropping_removes_only_states_of_that_generation(
        self, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(storage.sqlite.states, "DROPPED_AT_ONCE", 3)
        monkeypatch.setattr(storage.redis.connections.client, "SCAN_COUNT", 3)
        events = events_of(20, 2)
        user_ids = user_ids_of(events)
        async with opened(address, OLD, NEW) as store:
            await append_all(store, events)
            for named in (NAMED_OLD, NAMED_NEW):
                await store.generations.announce(named, 0.001)
            assert await store.generations.drop(NEW.tag) == 20
            assert await store.generations.drop(NEW.tag) == 0
            assert [known.named for known in await store.generations.known()] == [NAMED_OLD]
            assert await count_saved(store, user_ids, OLD) == 20
            assert await count_saved(store, user_ids, NEW) == 0
            await assert_states_are_folds(store, user_ids, OLD, NEW)

    async def test_an_active_generation_keeps_its_name_when_dropped(self, address: str) -> None:
        async with opened(address, OLD) as store:
            await store.generations.activate(NAMED_OLD)
            await store.generations.drop(OLD.tag)
            assert [known.named for known in await store.generations.known()] == [NAMED_OLD]
