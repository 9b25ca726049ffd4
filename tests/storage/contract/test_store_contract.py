"""The contract of every store, independent of the implementation; new stores are added in ``stores.py``."""

import asyncio
import signal
import subprocess
import sys
from dataclasses import astuple, replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.errors import StorageUnavailable
from storage.protocol import UserStore
from storage.records import FoldedState, LogEntry
from storage.state.corrections import EventFilter
from storage.state.event import Event
from storage.state.generation import Generation
from tests.storage.contract.stores import ARCHIVED, open_store, opened
from tests.storage.oracles.naive_fold import NaiveUser, assert_state_is, fold
from tests.storage.oracles.random_events import START_US, UNSEEN, click, fresh_user, logs, make_generation

GENERATION = make_generation()
OTHER_GENERATION = make_generation(tag=b"gen two\0", rates=(0.1,), items=6, seed=1, soft=True)
ROOT = Path(__file__).parents[3]

laws = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])


async def whole_log(store: UserStore, user_id: str, tenant: str = "main") -> list[LogEntry]:
    return await store.events(tenant, user_id, limit=1_000_000)


async def assert_state_is_fold_of_log(store: UserStore, user_id: str, generation: Generation = GENERATION) -> None:
    log = [entry.record for entry in await whole_log(store, user_id)]
    assert len({event.entry_id for event in log}) == len(log)
    (value,) = await store.states("main", [user_id], generation)
    assert_state_is(value, fold(generation, log))


def as_layout(version: int, value: bytes) -> bytes:
    state = GENERATION.decode(value)
    ring = state["recent_items"]
    state["recent_items"] = np.where(ring < -1, -2 - ring, ring)
    return bytes([version]) + GENERATION.encode(state)[1:]


def writing_process(address: str, prefix: str, user_id: str, *count: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.storage.processes.append_forever", address, prefix, user_id, *count]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


class TestState:
    @given(st.lists(logs(15), max_size=6))
    @laws
    def test_state_results_and_log_equal_the_naive_fold(self, address: str, batches: list[list[Event]]) -> None:
        async def law() -> None:
            user_id = fresh_user()
            naive = NaiveUser(GENERATION)
            log: list[Event] = []
            async with opened(address, GENERATION) as store:
                for batch in batches:
                    events = [replace(event, user_id=user_id) for event in batch]
                    expected = [naive.receive(event) for event in events]
                    answers = await store.append("main", events)
                    assert [astuple(answer) for answer in answers] == expected
                    log += [event for event, (duplicate, _, _) in zip(events, expected, strict=True) if not duplicate]
                assert [entry.record for entry in await whole_log(store, user_id)] == log
                seen = {event.item_id for event in log if event.type != "impression"}
                assert (await store.seen_items("main", user_id)).item_ids == seen
                since_us = {"click": START_US + 3, "buy": -inf, "impression": START_US + 2}
                found = await store.seen_items("main", user_id, EventFilter(UNSEEN, since_us, {"buy"}, GENERATION))
                if found.state is not None:
                    assert_state_is(found.state.value, naive)
                bought = [(event.item_id, event.timestamp_us) for event in reversed(log) if event.type == "buy"]
                assert list(zip(found.timed_items, found.times_us, strict=True)) == bought
                assert found.item_ids == {event.item_id for event in log if event.type not in UNSEEN}
                shown = [event for event in log if event.type == "impression" and event.timestamp_us >= START_US + 2]
                assert found.left_out == {one for event in shown for one in event.items} | {
                    event.item_id
                    for event in log
                    if event.type == "buy" or (event.type == "click" and event.timestamp_us >= START_US + 3)
                }
                assert_state_is((await store.states("main", [user_id], GENERATION))[0], naive)

        asyncio.run(law())

    @pytest.mark.usefixtures("small_pages")
    async def test_seen_items_cover_the_newest_entries_across_pages(self, address: str) -> None:
        async with opened(address, GENERATION) as store:
            for number in range(40):
                await store.append("main", [click(f"e{number}", item=number), click(f"e{number}", "v", 50)])
            for limit in (1, 2, 3, 4, 7, 39, 40, 41, 1000):
                seen = await store.seen_items("main", "u", limit=limit)
                assert seen.item_ids == {f"item{number}" for number in range(40)[-limit:]}
                assert seen.is_complete == (limit >= 40)
            nobody = await store.seen_items("main", "nobody", limit=1)
            assert (nobody.item_ids, nobody.is_complete) == (set(), True)

    @given(logs(30), st.integers(0, 30), st.integers(0, 30))
    @laws
    def test_a_new_generation_is_caught_up_from_the_log(
        self, address: str, events: list[Event], first: int, second: int
    ) -> None:
        """Some stores fold one generation and some both; every reader gets the fold of the whole log."""

        async def law() -> None:
            user_id = fresh_user()
            mine = [replace(event, user_id=user_id) for event in events]
            start, end = sorted((first, second))
            async with opened(address, GENERATION) as old, opened(address, GENERATION, OTHER_GENERATION) as both:
                for store, part in ((old, mine[:start]), (both, mine[start:end]), (old, mine[end:])):
                    await store.append("main", part)
                for store in (old, both):
                    for generation in (GENERATION, OTHER_GENERATION):
                        await assert_state_is_fold_of_log(store, user_id, generation)

        asyncio.run(law())

    @pytest.mark.parametrize("version", [0, 1, 3])
    def test_a_state_of_another_layout_is_folded_again_and_saved(self, address: str, version: int) -> None:
        """As left by another version; layout 1 has no marks of weightless events in the ring."""

        async def law() -> None:
            async with opened(address, GENERATION) as store:
                events = [click(f"e{number}", item=number % 12) for number in range(30)]
                await store.append("main", [replace(event, type="dislike") for event in events[:9]] + events[9:])
                (value,) = await store.states("main", ["u"], GENERATION)
                assert value is not None
                newest = (await whole_log(store, "u"))[-1].seq
                for rest in (b"", b"larger"):
                    left = FoldedState("main", "u", newest, as_layout(version, value) + rest)
                    await store.save_states(GENERATION, [left])
                    assert await store.states("main", ["u"], GENERATION) == [value]
                    await store.save_states(GENERATION, [left])
                    newest = await append_one_more(store)
                    await assert_state_is_fold_of_log(store, "u")
                    (value,) = await store.states("main", ["u"], GENERATION)
                    assert value is not None

        async def append_one_more(store: UserStore) -> int:
            (answer,) = await store.append("main", [click(f"more than {len(await whole_log(store, 'u'))}")])
            assert not answer.duplicate
            return (await whole_log(store, "u"))[-1].seq

        asyncio.run(law())

    async def test_users_and_tenants_are_isolated(self, address: str) -> None:
        async with opened(address, GENERATION) as store:
            await store.append("main", [click("e1", "anna", 1), click("e1", "bert", 2), click("e2", "anna", 3)])
            (answer,) = await store.append("shop", [click("e1", "anna", 4)])
            assert not answer.duplicate
            values = await store.states("main", ["bert", "nobody", "anna", "bert"], GENERATION)
            last = [None if value is None else int(GENERATION.decode(value)["last_item"]) for value in values]
            assert last == [2, None, 3, 2]
            assert (await store.seen_items("shop", "anna")).item_ids == {"item4"}
            assert await store.states("shop", ["bert"], GENERATION) == [None]
            assert await store.states("main", [], GENERATION) == []
            assert await store.append("main", []) == []

    async def test_the_log_is_read_in_pages(self, address: str) -> None:
        events = [click(f"e{number}", timestamp_us=START_US - number) for number in range(7)]
        async with opened(address, GENERATION) as store:
            await store.append("main", events)
            pages, after = [], 0
            while page := await store.events("main", "u", after=after, limit=3):
                pages.append([entry.record for entry in page])
                after = page[-1].seq
            assert pages == [events[:3], events[3:6], events[6:]]


def test_users_have_a_log_from_first_event_or_merge_until_erasure(address: str) -> None:
    async def law() -> None:
        ada, visitor, nobody = fresh_user(), fresh_user(), fresh_user()
        async with opened(address, GENERATION) as store:

            async def without(*users: str, tenant: str = "main") -> set[str]:
                return await store.users_without_log(tenant, users)

            assert await without() == set()
            assert await without(ada, visitor, nobody) == {ada, visitor, nobody}
            await store.append("main", [click("a", ada), click("b", visitor)])
            assert await without(ada, visitor, nobody) == {nobody}
            assert await without(ada, tenant="books") == {ada}
            await store.merge("main", ada, visitor)
            assert await without(ada, visitor, nobody) == {nobody}
            await store.erase("main", ada)
            assert await without(ada, visitor, nobody) == {ada, visitor, nobody}

    asyncio.run(law())


async def test_log_lengths_are_exact_up_to_a_limit(address: str) -> None:
    """Exact unless archived; an erasure scans at least the user's entries."""
    ada, visitor, nobody = fresh_user(), fresh_user(), fresh_user()
    is_archived = address.startswith(ARCHIVED)
    async with opened(address, GENERATION) as store:
        for n in range(6):
            await store.append("main", [click(f"a{n}", ada), *([click(f"v{n}", visitor)] if n < 3 else [])])
        for limit in (1, 3, 5, 50):
            expected = [min(limit, 6), 0, min(limit, 3)]
            found = await store.log_lengths("main", [ada, nobody, visitor], limit=limit)
            assert found == ([limit, 0, limit] if is_archived else expected)
            assert await store.erasure_length("main", nobody, limit=limit) == 0
            erased = await store.erasure_length("main", ada, limit=limit)
            assert erased <= limit
            assert is_archived or erased >= min(limit, 6)
        assert await store.log_lengths("main", [], limit=5) == []
        assert (await store.archived_files("main", ada) > 0) == is_archived
        assert await store.archived_files("main", nobody) == 0
        await store.merge("main", ada, visitor)
        assert await store.log_lengths("main", [ada, visitor], limit=9) == [9, 9]
        if not is_archived:
            assert await store.erasure_length("main", visitor, limit=9) == 9


class TestErasing:
    async def test_an_erased_user_is_unknown_and_returns_as_a_new_one(self, address: str) -> None:
        async with opened(address, GENERATION, OTHER_GENERATION) as store:
            await store.append("main", [click(f"e{n}", user_id, n % 12) for n in range(40) for user_id in "uv"])
            await store.append("shop", [click("e1", "u", 1)])
            for _ in range(2):
                await store.erase("main", "u")
                assert await whole_log(store, "u") == []
                assert (await store.seen_items("main", "u")).item_ids == set()
                for generation in (GENERATION, OTHER_GENERATION):
                    assert await store.states("main", ["u"], generation) == [None]
            again = [click(f"e{n}", "u", 3) for n in range(5)]
            assert not any(answer.duplicate for answer in await store.append("main", again))
            await store.append("main", [click("after", "v")])
            assert [entry.record for entry in await whole_log(store, "u")] == again
            assert all(answer.duplicate for answer in await store.append("main", again))
            assert len(await whole_log(store, "v")) == 41
            assert len(await whole_log(store, "u", "shop")) == 1
            for user_id in "uv":
                await assert_state_is_fold_of_log(store, user_id)
                await assert_state_is_fold_of_log(store, user_id, OTHER_GENERATION)
            await store.erase("main", "nobody")

    async def test_concurrent_erasing_and_appending_leaves_the_fold_of_the_log(self, address: str) -> None:
        async with opened(address, GENERATION) as one, opened(address, GENERATION) as two:
            for number in range(8):
                events = [click(f"e{number}-{n}", item=n % 12) for n in range(10)]
                sent = [store.append("main", [event]) for event in events for store in (one, two)]
                await asyncio.gather(*sent, one.erase("main", "u"), two.append("main", [click("again and again")]))
                for store in (one, two):
                    log = [entry.record for entry in await whole_log(store, "u")]
                    if log:
                        await assert_state_is_fold_of_log(store, "u")
                    else:
                        assert await store.states("main", ["u"], GENERATION) == [None]


class TestConcurrency:
    async def test_concurrent_appends_of_two_stores_are_all_counted(self, address: str) -> None:
        async with opened(address, GENERATION) as one, opened(address, GENERATION) as two:
            events = [click(f"e{number}", item=number % 12) for number in range(40)]
            sent = [
                store.append("main", [event])
                for number, event in enumerate(events)
                for store in ([one, two] if number % 4 == 0 else [one] if number % 2 else [two])
            ]
            answers = [answer for (answer,) in await asyncio.gather(*sent)]
            assert sum(not answer.duplicate for answer in answers) == 40
            assert sum(answer.duplicate for answer in answers) == 10
            for store in (one, two):
                assert len(await whole_log(store, "u")) == 40
                await assert_state_is_fold_of_log(store, "u")

    @pytest.mark.slow
    def test_concurrent_appends_of_starting_processes_are_all_counted(self, address: str) -> None:
        writers = [writing_process(address, f"p{number}", "u", "40") for number in range(3)]
        acknowledged = [event_id for writer in writers for event_id in writer.communicate(timeout=200)[0].split()]
        assert [writer.returncode for writer in writers] == [0, 0, 0]
        assert len(acknowledged) == 120

        async def law() -> None:
            async with opened(address, GENERATION) as store:
                assert {entry.record.entry_id for entry in await whole_log(store, "u")} == set(acknowledged)
                await assert_state_is_fold_of_log(store, "u")

        asyncio.run(law())

    async def test_a_cancelled_caller_does_not_disturb_others(self, address: str) -> None:
        async with opened(address, GENERATION) as store:
            tasks = [asyncio.ensure_future(store.append("main", [click(f"e{number}")])) for number in range(60)]
            await asyncio.sleep(0)
            for task in tasks[::3]:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            kept = {f"e{number}" for number, outcome in enumerate(outcomes) if isinstance(outcome, list)}
            assert len(kept) >= 40
            assert kept <= {entry.record.entry_id for entry in await whole_log(store, "u")}
            await assert_state_is_fold_of_log(store, "u")


class TestDurability:
    @pytest.mark.slow
    def test_a_killed_process_loses_no_acknowledged_event(self, address: str) -> None:
        acknowledged: set[str] = set()
        for kill in range(4):
            writer = writing_process(address, f"k{kill}", "u")
            assert writer.stdout is not None
            acknowledged |= {writer.stdout.readline().strip() for _ in range(20 + 15 * kill)}
            writer.send_signal(signal.SIGKILL)
            # Lines that were printed before the kill arrived; the last one may be torn.
            acknowledged |= {line.strip() for line in writer.communicate()[0].splitlines(True) if line.endswith("\n")}

        async def law() -> None:
            async with opened(address, GENERATION) as store:
                assert acknowledged <= {entry.record.entry_id for entry in await whole_log(store, "u")}
                await assert_state_is_fold_of_log(store, "u")
                again = await store.append("main", [click(event_id) for event_id in sorted(acknowledged)])
                assert all(answer.duplicate for answer in again)

        assert len(acknowledged) >= 170
        asyncio.run(law())

    async def test_a_reopened_store_continues(self, address: str) -> None:
        for number in range(3):
            async with opened(address, GENERATION) as store:
                await store.append("main", [click(f"e{number}"), click("always the same")])
        async with opened(address, GENERATION) as store:
            assert len(await whole_log(store, "u")) == 4
            await assert_state_is_fold_of_log(store, "u")


class TestClosing:
    async def test_closing_answers_accepted_requests(self, address: str) -> None:
        store = await open_store(address, [GENERATION])
        tasks = [asyncio.ensure_future(store.append("main", [click(f"e{number}")])) for number in range(50)]
        await asyncio.sleep(0)
        await store.close()
        answers = [answer for (answer,) in await asyncio.gather(*tasks)]
        assert not any(answer.duplicate for answer in answers)
        async with opened(address, GENERATION) as again:
            assert len(await whole_log(again, "u")) == 50

    async def test_a_closed_store_refuses_calls_and_closing_is_idempotent(self, address: str) -> None:
        store = await open_store(address, [GENERATION])
        await store.ping()
        await asyncio.gather(store.close(), store.close())
        await store.close()
        for call in (
            store.append("main", [click("e")]),
            store.states("main", ["u"], GENERATION),
            store.seen_items("main", "u"),
            store.events("main", "u"),
            store.ping(),
        ):
            with pytest.raises(StorageUnavailable, match="closed"):
                await call
