"""While several keys send requests, a bounded number of each key's requests are in progress, and the others wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.http.middleware import key_turns
from app.http.middleware.key_turns import AT_ONCE, KeyTurns, Source
from tests.waiting import PATIENCE_S, until

ONE, OTHER = Source("main", "1"), Source("main", "2")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request of these tests is slow, however busy the machine is."""
    monkeypatch.setattr(key_turns, "SLOW_S", 10 * PATIENCE_S)
    monkeypatch.setattr(key_turns, "RECENT_S", 10 * PATIENCE_S)


def test_a_key_alone_needs_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = KeyTurns()
    assert not any(turns.is_needed(source) for source in (ONE, ONE, None, ONE))
    assert all(turns.is_needed(source) for source in (OTHER, OTHER, ONE))
    assert not turns.is_needed(None)  # a service without keys knows no callers
    monkeypatch.setattr(key_turns, "RECENT_S", 0.0)
    assert not turns.is_needed(ONE)


@given(st.lists(st.sampled_from(["begin", "end", "cancel"]), max_size=100), st.integers(1, 3))
def test_as_many_as_may_are_in_progress_and_the_others_wait_in_order(steps: Sequence[str], most: int) -> None:
    async def law() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(key_turns, "AT_ONCE", most)
            turns, ends = KeyTurns(), dict[int, asyncio.Event]()
            tasks, begun = dict[int, asyncio.Task[None]](), list[int]()

            async def request(number: int) -> None:
                async with turns.turn(ONE):
                    begun.append(number)
                    await ends[number].wait()

            for number, step in enumerate(steps):
                waiting = [one for one in tasks if one not in begun]
                working = [one for one in tasks if one in begun]
                if step == "begin":
                    ends[number] = asyncio.Event()
                    tasks[number] = asyncio.create_task(request(number))
                elif step == "end" and working:
                    ends[working[0]].set()
                    await tasks.pop(working[0])
                elif step == "cancel" and tasks:
                    cancelled = (waiting or working)[-1]
                    tasks.pop(cancelled).cancel()
                for _ in range(5):
                    await asyncio.sleep(0)
                assert len([one for one in tasks if one in begun]) == min(most, len(tasks))
            assert begun == sorted(begun)
            for task in tasks.values():
                task.cancel()

    asyncio.run(law())


def test_other_keys_do_not_wait() -> None:
    async def law() -> None:
        turns = KeyTurns()
        async with AsyncExitStack() as stack:
            for _ in range(AT_ONCE):
                await stack.enter_async_context(turns.turn(ONE))
            async with asyncio.timeout(PATIENCE_S), turns.turn(OTHER):
                pass

    asyncio.run(law())


def test_what_takes_long_lets_the_next_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait for a node that hangs do not hold up those of users on other nodes."""
    monkeypatch.setattr(key_turns, "SLOW_S", 0.001)

    async def law() -> None:
        turns, begun, may_end = KeyTurns(), list[int](), asyncio.Event()

        async def request(number: int) -> None:
            async with turns.turn(ONE):
                begun.append(number)
                await may_end.wait()

        tasks = [asyncio.create_task(request(number)) for number in range(3 * AT_ONCE)]
        await until(lambda: len(begun) == len(tasks))
        may_end.set()
        await asyncio.gather(*tasks)
        monkeypatch.setattr(key_turns, "SLOW_S", PATIENCE_S)
        may_end.clear()
        again = [asyncio.create_task(request(number)) for number in range(AT_ONCE + 1)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(begun) == len(tasks) + AT_ONCE  # each turn has ended once
        may_end.set()
        await asyncio.gather(*again)

    asyncio.run(law())
