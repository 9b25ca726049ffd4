"""Undo and merge in every store, against naive users and under concurrency."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import storage.redis.corrections.undo_and_merge
import storage.sqlite.corrections
from storage.errors import MergeRefused, MergeTooLarge, StorageUnavailable, UnknownEvent
from storage.maintenance.rebuild import rebuild
from storage.protocol import UserStore
from storage.state.corrections import EventFilter, effective_events, posted_as
from storage.state.event import Event
from tests.storage.contract.fold_checks import assert_state_is_fold_of_log, log_of
from tests.storage.contract.stores import open_store, opened
from tests.storage.oracles.naive_users import NaiveUsers, Refused
from tests.storage.oracles.random_events import (
    KNOWN_ITEMS,
    START_US,
    WEIGHTS,
    click,
    fresh_user,
    make_generation,
    make_newer,
    of_type,
)

GENERATION = make_generation()
NEWER = make_newer()
OF_CLICKS = EventFilter(since_us={"click": -inf}, state_of=GENERATION)
ROOT = Path(__file__).parents[3]


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


def items_of(events: Iterable[Event]) -> set[str]:
    """Items of the user's events."""
    return {event.item_id for event in events if event.type != "impression"}


async def assert_newest_are_seen(store: UserStore, naive: NaiveUsers, user_id: str) -> None:
    log = await log_of(store, user_id)
    for limit in (1, 4, 1 + len(log)):
        newest = items_of(effective_events(log[-limit:]))
        clicks = {event.item_id for event in effective_events(log[-limit:]) if event.type == "click"}
        seen = await store.seen_items("main", user_id, OF_CLICKS, limit=limit)
        assert (seen.item_ids, seen.left_out) == (newest, clicks)
        assert seen.is_complete == (len(log) <= limit)
        if seen.state is not None:
            naive.assert_state_is(seen.state.value, user_id, GENERATION)


class TestLaw:
    @given(histories)
    @settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_state_log_and_results_equal_the_naive_users(self, address: str, history: list[tuple[Any, ...]]) -> None:
        async def law() -> None:
            prefix, naive = fresh_user(), NaiveUsers()
            users = {name: f"{prefix}-{name}" for name in "abcd"}
            store = await open_store(address, [GENERATION])
            for what, name, *rest in history:
                user_id = users[name]
                match what:
                    case "post":
                        event_id, item, event_type, step = rest
                        event = Event(event_id, user_id, f"item{item}", "click", START_US + step, None)
                        event = of_type(event_type, event)
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
                assert [
                    (posted_as(event), event.item_id, event.items) for event in log if isinstance(event, Event)
                ] == [(entry.name, entry.event.item_id, entry.event.items) for entry in expected_log]
                items = items_of(entry.event for entry in expected_log if not entry.is_undone)
                assert (await store.seen_items("main", user_id)).item_ids == items
                await assert_newest_are_seen(store, naive, user_id)
                for generation in (GENERATION, NEWER):
                    (value,) = await store.states("main", [user_id], generation)
                    naive.assert_state_is(value, user_id, generation)
            await store.close()

        asyncio.run(law())

    def test_a_rebuild_respects_undos_and_merges(self, address: str) -> None:
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
                assert len(list(effective_events(await log_of(store, "w")))) == 60
                assert len(list(effective_events(await log_of(store, "u")))) == 30

        asyncio.run(law())

    def test_a_long_log_is_folded_again(self, address: str) -> None:
        """Longer than a request folds, and than a page."""

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
                assert len(list(effective_events(await log_of(store, "u")))) == 1199

        asyncio.run(law())

    def test_a_visitor_with_too_many_events_is_refused(self, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (storage.redis.corrections.undo_and_merge, storage.sqlite.corrections):
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


Correction = Callable[[], Awaitable[object]]


async def repeated(correction: Correction) -> object:
    """Retry while the store is busy, like a client."""
    while True:
        try:
            return await correction()
        except StorageUnavailable:
            await asyncio.sleep(0.01)


class TestAtOnce:
    def test_concurrent_events_undos_and_merges_count_once(self, address: str) -> None:
        """Two stores post as three users during merges of each into the next, and undos."""

        async def law() -> None:
            async with opened(address, GENERATION) as one, opened(address, GENERATION) as two:
                events = [click(f"e{n}", "abc"[n % 3], n % 12) for n in range(60)]
                for event in events[:12]:
                    await one.append("main", [event])
                work: list[Correction] = [
                    partial(store.append, "main", [event]) for event in events for store in (one, two)
                ]
                undone = [(event.user_id, event.event_id) for event in events[:12:2]]
                work[10:10] = [partial(one.undo, "main", *name) for name in undone]
                circle = [("b", "a", one), ("c", "b", two), ("a", "c", one), ("a", "b", two)]
                work[20:20] = [partial(store.merge, "main", user_id, visitor) for user_id, visitor, store in circle]
                outcomes = await asyncio.gather(*map(repeated, work), return_exceptions=True)
                failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
                assert all(isinstance(failure, MergeRefused) for failure in failures), failures
                assert len(failures) < len(circle)

                distinct = {tuple(event.entry_id for event in await log_of(one, name)): name for name in "abc"}
                logs = [await log_of(two, name) for name in distinct.values()]
                posted = Counter(posted_as(event) for log in logs for event in log if isinstance(event, Event))
                assert posted == Counter((event.user_id, event.event_id) for event in events)
                left = Counter(posted_as(event) for log in logs for event in effective_events(log))
                assert posted - left == Counter(undone)
                for store in (one, two):
                    for name in "abc":
                        await assert_state_is_fold_of_log(store, name)

        asyncio.run(law())
