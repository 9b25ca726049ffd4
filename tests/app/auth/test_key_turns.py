"""Several keys ask for recommendations: only a few requests of each run at a time, and the others wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from app.catalogue.filter_expressions import ItemExpressions
from app.http.auth import key_turns
from app.http.auth.key_turns import AT_ONCE, KeyTurns
from app.http.auth.keys import add, make
from app.recommendation.batching import Requester
from tests.app.conftest import Client
from tests.app.http.middleware.server import Server, read_answer, request
from tests.waiting import PATIENCE_S, until

ONE, OTHER = Requester(flow="one"), Requester(flow="other")
LONG_FILTER = " || ".join(f"size(item.categories) > {n}" for n in range(31))


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request of these tests is slow, however busy the machine is."""
    monkeypatch.setattr(key_turns, "SLOW_S", 10 * PATIENCE_S)
    monkeypatch.setattr(key_turns, "RECENT_S", 10 * PATIENCE_S)


def shared_turns() -> KeyTurns:
    """The turns of a process that has received requests of both keys."""
    turns = KeyTurns()
    assert [turns.is_needed(one.flow) for one in (ONE, OTHER)] == [False, True]
    return turns


def test_a_single_key_does_not_wait_for_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = KeyTurns()
    assert not any(map(turns.is_needed, ("one", "one", "", "one")))
    assert all(map(turns.is_needed, ("other", "other", "one")))
    assert not turns.is_needed("")  # a service without keys knows no callers
    monkeypatch.setattr(key_turns, "RECENT_S", 0.0)
    assert not turns.is_needed("one")


@given(st.lists(st.sampled_from(["begin", "end", "cancel"]), max_size=60), st.integers(1, 3))
def test_requests_beyond_the_limit_wait_in_order(steps: Sequence[str], most: int) -> None:
    async def law() -> None:
        turns, ends = shared_turns(), dict[int, asyncio.Event]()
        tasks, begun = dict[int, asyncio.Task[None]](), list[int]()

        async def work(number: int) -> None:
            async with turns.turn(ONE):
                begun.append(number)
                await ends[number].wait()

        for number, step in enumerate(steps):
            working = [one for one in tasks if one in begun]
            if step == "begin":
                ends[number] = asyncio.Event()
                tasks[number] = asyncio.create_task(work(number))
            elif step == "end" and working:
                ends[working[0]].set()
                await tasks.pop(working[0])
            elif step == "cancel" and tasks:
                tasks.pop(max(tasks)).cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert len([one for one in tasks if one in begun]) == min(most, len(tasks))
        assert begun == sorted(begun)
        for task in tasks.values():
            task.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_turns, "AT_ONCE", most)
        asyncio.run(law())


async def test_other_keys_do_not_wait_for_a_busy_key() -> None:
    turns = shared_turns()
    async with AsyncExitStack() as stack:
        for _ in range(AT_ONCE):
            await stack.enter_async_context(turns.turn(ONE))
        async with asyncio.timeout(PATIENCE_S), turns.turn(OTHER):
            pass


async def test_slow_requests_release_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait for a hung node do not delay those of users on other nodes."""
    turns, begun, may_end = shared_turns(), list[int](), asyncio.Event()

    async def work(number: int) -> None:
        async with turns.turn(ONE):
            begun.append(number)
            await may_end.wait()

    async def begin_and_end() -> None:
        for _ in range(AT_ONCE):  # and end before they are slow
            async with turns.turn(ONE):
                pass
        tasks = [asyncio.create_task(work(number)) for number in range(3 * AT_ONCE)]
        await until(lambda: len(begun) == len(tasks))
        monkeypatch.setattr(key_turns, "SLOW_S", PATIENCE_S)
        may_end.set()
        await asyncio.gather(*tasks)
        may_end.clear()
        again = [asyncio.create_task(work(number)) for number in range(3 * AT_ONCE)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(begun) == len(tasks) + AT_ONCE  # no turn has ended twice
        may_end.set()
        await asyncio.gather(*again)

    monkeypatch.setattr(key_turns, "SLOW_S", 0.001)
    async with turns.turn(ONE):  # a key without requests is forgotten
        await begin_and_end()


async def test_a_disconnected_client_takes_no_turn() -> None:
    turns = shared_turns()
    for _ in range(2 * AT_ONCE):
        with pytest.raises(ClientDisconnect):
            async with turns.turn(Requester(lambda: True, "one")):
                pass
    async with asyncio.timeout(PATIENCE_S), turns.turn(ONE):
        pass


@pytest.mark.parametrize("query", ["", "?exclude_seen=none"], ids=["plain", "by the app"])
@pytest.mark.parametrize("rate", [None, 60_000])
def test_requests_wait_for_the_turn_of_their_key(
    start: Callable[..., Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str, rate: int | None
) -> None:
    monkeypatch.setattr(key_turns, "AT_ONCE", 1)
    texts = []
    for _ in range(2):
        text, key = make("main", ["recs:read"], requests_per_minute=rate)
        add(tmp_path / "keys", key)
        texts.append(text)
    client = start(tmp_path, keys_file=tmp_path / "keys")
    server, recommender = Server(client), client.service.switcher.recommender
    begun, may_end = list[str](), asyncio.Event()
    recommend, recommend_plain = recommender.recommend, recommender.recommend_plain

    async def wait(requests: Sequence[Any], *arguments: Any) -> Any:
        begun.append(requests[0].user_id)
        if requests[0].user_id != "other":
            await may_end.wait()
        return await recommend(requests, *arguments)

    def begin(wish: Any, *arguments: Any) -> None:
        begun.append(wish.user_id)
        recommend_plain(wish, *arguments)

    async def law() -> None:
        async with AsyncExitStack() as stack:
            connections = [await stack.enter_async_context(server.connected()) for _ in range(5)]

            def send(number: int, user_id: str, text: str) -> None:
                path = f"/v1/users/{user_id}/recommendations{query}"
                connections[number][1].write(request(path, f"Authorization: Bearer {text}"))

            async def status(number: int) -> int:
                return (await read_answer(connections[number][0]))[0]

            send(0, "other", texts[1])
            assert await status(0) == 200
            send(1, "first", texts[0])
            await until(lambda: begun == ["other", "first"])
            for number, user_id in ((2, "second"), (3, "third")):
                send(number, user_id, texts[0])
            send(4, "other", texts[1])
            assert await status(4) == 200
            assert begun == ["other", "first", "other"]
            may_end.set()
            assert [await status(number) for number in (1, 2, 3)] == [200] * 3
            assert sorted(begun[3:]) == ["second", "third"]

    monkeypatch.setattr(recommender, "recommend", wait)
    monkeypatch.setattr(recommender, "recommend_plain", begin)
    client.runner.run(law())
    assert client.services.metrics.requests.in_progress == 0
    client.close()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/items/item-1/similar?k=1000&explain=true", None),
        ("POST", "/v1/admin/preview", {"settings": {}, "request": {"user_id": "ada", "k": 1_000, "explain": True}}),
    ],
)
def test_large_lists_of_a_key_run_one_at_a_time(
    start: Callable[..., Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: Any
) -> None:
    text, key = make("main", ["recs:read", "scenarios:write"])
    add(tmp_path / "keys", key)
    client = start(tmp_path, keys_file=tmp_path / "keys")
    turns, taken = client.services.turn_of, list[str]()

    def noted(services: Any, key_id: str, kind: Any) -> asyncio.Lock:
        taken.append(kind)
        return turns(key_id, kind)

    monkeypatch.setattr(type(client.services), "turn_of", noted)
    answer = client.request(method, path, json=body, headers={"Authorization": f"Bearer {text}"})
    assert answer.status_code == 200, answer.text
    assert taken == ["read"]
    client.close()


def test_a_too_costly_preview_compiles_no_expression(
    start: Callable[..., Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, key = make("main", ["scenarios:write"], requests_per_minute=2)
    add(tmp_path / "keys", key)
    client, compiled = start(tmp_path, keys_file=tmp_path / "keys"), list[str]()
    monkeypatch.setattr(ItemExpressions, "check", lambda _, expression: compiled.append(expression.text))
    body = {"settings": {"filter": LONG_FILTER}, "request": {"user_id": "ada"}}
    answer = client.post("/v1/admin/preview", json=body, headers={"Authorization": f"Bearer {text}"})
    assert answer.json()["error"]["code"] == "too_costly"
    assert compiled == []
    client.close()
