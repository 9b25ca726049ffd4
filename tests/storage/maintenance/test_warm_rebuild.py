"""A generation that extends the served one takes over states without new items, and folds the others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from itertools import count
from typing import Any, cast

import pytest

import storage.redis.generations
import storage.sqlite.states
from storage.maintenance.rebuild import Rebuilt, rebuild
from storage.protocol import UserStore
from storage.records import FoldedState, LogPage
from storage.state.corrections import effective_events
from storage.state.event import Event
from storage.state.generation import Generation
from storage.state.layout import TAG_BYTES
from tests.storage.contract.fold_checks import count_saved, log_of
from tests.storage.contract.stores import append_all, opened
from tests.storage.oracles.naive_fold import assert_state_is, fold
from tests.storage.oracles.random_events import (
    KNOWN_ITEMS,
    WITH_CODES,
    as_impression,
    click,
    events_of,
    make_generation,
    make_warm,
    user_ids_of,
)

SERVED = make_generation()
WARM = make_warm(SERVED)


def touches_others(log: list[Any]) -> bool:
    """Whether an event that counts is about an item unknown to the served generation, or an impression of one."""
    known = {f"item{number}" for number in range(KNOWN_ITEMS)}
    return any({*one.items, *([one.item_id] if one.item_id else [])} - known for one in effective_events(log))


async def assert_states_are_those_of_the_log(store: UserStore, user_ids: list[str], *generations: Generation) -> None:
    for user_id in user_ids:
        log = await log_of(store, user_id)
        for generation in generations:
            (value,) = await store.states("main", [user_id], generation)
            assert_state_is(value, fold(generation, effective_events(log)))


@pytest.fixture
def small_pages_of_states(small_pages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.redis.generations, "READ_AT_ONCE", 3)
    monkeypatch.setattr(storage.sqlite.states, "READ_AT_ONCE", 3)


class Watched:
    """A store that reports what a rebuild does, and runs an action after each page."""

    def __init__(self, store: UserStore, happens: Callable[[], Awaitable[None]] | None = None) -> None:
        self.folded_one_by_one: set[str] = set()
        self.pages_of_log = 0
        self.save_states = store.save_states
        self.generations = self
        self._store = store
        self._happens = happens

    async def states(self, *arguments: Any) -> Any:
        tenant, user_ids, generation = arguments
        self.folded_one_by_one.update(user_ids)
        return await self._store.states(tenant, user_ids, generation)

    async def log(self) -> AsyncIterator[LogPage]:
        async for page in self._store.log():
            self.pages_of_log += 1
            yield page
            if self._happens is not None:
                await self._happens()


class Registry:
    """Iterates over saved states of a store, and runs an action after each page."""

    def __init__(self, store: UserStore, happens: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._happens = happens

    async def states(self, tag: bytes) -> AsyncIterator[list[FoldedState]]:
        async for page in self._store.generations.states(tag):
            await self._happens()  # between reading states and saving them
            yield page


async def rebuilt(store: UserStore, generation: Generation, before: Generation | None, watched: Any = None) -> Rebuilt:
    return await rebuild(cast("UserStore", watched or store), generation, before=before)


def plain_events(users: int, each: int) -> list[Event]:
    """Events of users on items of the served generation."""
    events = (replace(event, codes=()) for event in events_of(users, each, "plain "))
    return [
        as_impression(event, ["item1", "item2"]) if event.items else replace(event, item_id=f"item{number % 12}")
        for number, event in enumerate(events)
    ]


class TestTakingOver:
    @pytest.mark.usefixtures("small_pages_of_states")
    async def test_states_of_known_items_are_taken_over_and_others_folded(self, address: str) -> None:
        events = plain_events(20, 6)
        kinds = [
            click("n1", "user1", item=13),  # one of the new items
            click("n2", "user2", item=99),  # one that neither generation has
            as_impression(click("n3", "user3"), ["item3", "item14"]),
            replace(click("n4", "user4", item=15), type="dislike"),
            *(
                replace(click(f"c{place}", "user5", item=16), type=kind, codes=codes)
                for place, (kind, codes) in enumerate(WITH_CODES)
            ),
            click("n6", "user6", item=12),  # undone later
            click("n7", "visitor", item=12),  # who becomes user7
            click("k8", "other visitor", item=2),  # who becomes user8
        ]
        async with opened(address, SERVED) as store:
            await append_all(store, events)
            await append_all(store, kinds)
            await store.append("other", [click("o", "user1")])
            await store.undo("main", "user6", "n6")
            await store.undo("main", "user9", next(one.event_id for one in events if one.user_id == "user9"))
            await store.merge("main", "user7", "visitor")
            await store.merge("main", "user8", "other visitor")
            user_ids = user_ids_of(events)
            before = dict(zip(user_ids, await store.states("main", user_ids, SERVED), strict=True))
            logs = {user_id: await log_of(store, user_id) for user_id in user_ids}
            to_fold = {user_id for user_id in user_ids if touches_others(logs[user_id])}
            assert to_fold == {"user1", "user2", "user3", "user4", "user5", "user7"}
            watched = Watched(store)
            watched.generations = store.generations  # type: ignore[assignment]
            done = await rebuilt(store, WARM, SERVED, watched)
            assert done.carried == 14
            assert done.users == 6
            assert done.events == sum(isinstance(one, Event) for user_id in to_fold for one in logs[user_id])
            assert watched.folded_one_by_one == set()
            assert await count_saved(store, user_ids, WARM) == 20
            after = dict(zip(user_ids, await store.states("main", user_ids, WARM), strict=True))
            for user_id in set(user_ids) - to_fold:
                old, new = before[user_id], after[user_id]
                assert old is not None
                assert new == old[: TAG_BYTES.start] + WARM.tag + old[TAG_BYTES.stop :], user_id
            await assert_states_are_those_of_the_log(store, user_ids, SERVED, WARM)
            assert await store.states("other", ["user1"], WARM, max_missing=0) == [None]

    async def test_only_logs_with_new_items_are_read(self, address: str) -> None:
        events = plain_events(150, 2)
        async with opened(address, SERVED) as store:
            await append_all(store, [*events, click("new", "user3", item=12)])
            watched = Watched(store)
            watched.generations = store.generations  # type: ignore[assignment]
            done = await rebuilt(store, WARM, SERVED, watched)
            assert (done.carried, done.users) == (149, 1)
            assert (watched.pages_of_log, watched.folded_one_by_one) == (0, {"user3"})
            assert await count_saved(store, user_ids_of(events), WARM) == 150
            await assert_states_are_those_of_the_log(store, ["user2", "user3"], WARM)

    @pytest.mark.usefixtures("small_pages_of_states")
    async def test_events_and_corrections_continue_during_the_rebuild(self, address: str) -> None:
        events = plain_events(8, 4)
        user_ids = user_ids_of(events)
        turns = count()
        async with opened(address, SERVED) as store, opened(address, SERVED) as rebuilding:
            await append_all(store, [*events, click("gone", "user7", item=1)])

            async def goes_on() -> None:
                turn = next(turns)
                await store.append("main", [click(f"t{turn}", f"user{turn % 7}", item=(11, 12)[turn % 2])])
                if turn == 0:
                    await store.undo("main", "user7", "gone")
                elif turn == 1:
                    await store.merge("main", "user1", "user2")
                elif turn < 12:
                    user_id = f"user{3 + turn % 3}"
                    await store.erase("main", user_id)
                    await store.append("main", [click(f"back {turn} {n}", user_id, item=n) for n in range(turn)])

            watched = Watched(rebuilding, goes_on)
            watched.generations = Registry(rebuilding, goes_on)  # type: ignore[assignment]
            await rebuilt(rebuilding, WARM, SERVED, watched)
            assert next(turns) > 2
            await assert_states_are_those_of_the_log(store, user_ids, WARM)
            await store.append("main", [click(f"last {user_id}", user_id, item=13) for user_id in user_ids])
            await assert_states_are_those_of_the_log(store, user_ids, SERVED, WARM)

    async def test_an_unrelated_generation_folds_everything(self, address: str) -> None:
        events = plain_events(6, 4)
        other = replace(WARM, decay_rates=(0.0, 0.05, 0.7))
        async with opened(address, SERVED) as store:
            await append_all(store, events)
            done = await rebuilt(store, other, SERVED)
            assert (done.events, done.users, done.carried) == (24, 6, 0)
            await assert_states_are_those_of_the_log(store, user_ids_of(events), other)
