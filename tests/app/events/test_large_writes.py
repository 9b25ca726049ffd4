"""Large writes and corrections: each key runs one of each kind at a time, and small writes overtake them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from app.events import ingest
from app.http import dependencies
from app.http.dependencies import DECODER, LONG_BODY_BYTES
from app.serving.item_updates import parse_items
from tests.app.conftest import Client, item_id
from tests.waiting import until

LARGE, SMALL = 2 * ingest.FEW_EVENTS, 2


class Held:
    """Calls of a method that block until released."""

    def __init__(self) -> None:
        self.may_go = asyncio.Event()
        self.sizes: list[int] = []
        self.at_work = 0
        self.most = 0

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        async def held(tenant: str, entries: list[Any]) -> Any:
            async with self.counting(len(entries)):
                return await method(tenant, entries)

        return held

    @asynccontextmanager
    async def counting(self, size: int) -> AsyncIterator[None]:
        self.sizes.append(size)
        if size <= SMALL:
            yield
            return
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        await self.may_go.wait()
        yield
        self.at_work -= 1


def events(name: str, count: int) -> list[dict[str, str]]:
    return [{"event_id": f"{name}-{n}", "user_id": f"user-{n}", "item_id": item_id(n % 60)} for n in range(count)]


@pytest.mark.parametrize("path", ["/v1/events", "/v1/items"])
def test_large_writes_of_a_key_run_in_turn_and_small_ones_overtake(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    held, store = Held(), client.service.store
    for method in ("append", "put_items"):
        monkeypatch.setattr(store, method, held.around(getattr(store, method)))

    def body(name: str, count: int) -> list[dict[str, str]]:
        if path == "/v1/events":
            return events(name, count)
        return [{"item_id": item_id(n), "title": name} for n in range(count)]

    async def law() -> None:
        large = [asyncio.create_task(client.http.post(path, json=body(f"large-{n}", LARGE))) for n in range(5)]
        await until(lambda: held.at_work == 1)
        for n in range(5):
            assert (await client.http.post(path, json=body(f"small-{n}", SMALL))).status_code == 200
        assert not any(one.done() for one in large)
        held.may_go.set()
        assert [answer.status_code for answer in await asyncio.gather(*large)] == [200] * 5

    client.runner.run(law())
    assert held.most == 1
    assert sorted(held.sizes) == [SMALL] * 5 + [LARGE] * 5


@pytest.mark.parametrize("correction", ["erase", "undo", "merge"])
def test_corrections_of_a_key_run_in_turn(client: Client, monkeypatch: pytest.MonkeyPatch, correction: str) -> None:
    """Each reads a whole log; a large body of events does not wait for them."""
    held, users = Held(), client.service.users
    correct = getattr(users, correction)

    async def corrected(*args: Any) -> Any:
        async with held.counting(LARGE):
            return await correct(*args)

    monkeypatch.setattr(users, correction, corrected)

    def call(n: int) -> Any:
        if correction == "erase":
            return client.http.delete(f"/v1/users/user-{n}")
        if correction == "undo":
            return client.http.delete(f"/v1/users/user-{n}/events/logged-{n}")
        return client.http.post(f"/v1/users/user-{n}/merge", json={"from": f"user-{n + 5}"})

    async def law() -> None:
        await client.http.post("/v1/events", json=events("logged", 10))
        corrections = [asyncio.create_task(call(n)) for n in range(5)]
        await until(lambda: held.at_work == 1)
        assert (await client.http.post("/v1/events", json=events("large", LARGE))).status_code == 200
        held.may_go.set()
        assert all(answer.is_success for answer in await asyncio.gather(*corrections))

    client.runner.run(law())
    assert (held.most, len(held.sizes)) == (1, 5)


@pytest.mark.parametrize("path", ["/v1/events", "/v1/items"])
@pytest.mark.parametrize("size", ["many", "long"])
def test_large_bodies_wait_for_their_turn_unparsed(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str, size: str
) -> None:
    """Garbage collection of parsed bodies stops every thread."""
    held, store, parsed = Held(), client.service.store, list[int]()
    for method in ("append", "put_items"):
        monkeypatch.setattr(store, method, held.around(getattr(store, method)))

    def decode(text: str) -> object:
        parsed.append(len(text))
        return DECODER.decode(text)

    monkeypatch.setattr(dependencies, "DECODER", SimpleNamespace(decode=decode))
    count = LARGE if size == "many" else SMALL + 1
    text = "" if size == "many" else " " * LONG_BODY_BYTES
    body = [{"user_id": f"{n}", "item_id": item_id(n)} for n in range(count)]
    if path == "/v1/items":
        body = [{"item_id": item_id(n)} for n in range(count)]
    content = json.dumps(body).replace(", ", f", {text}")

    async def law() -> None:
        headers = {"content-type": "application/json"}
        posts = [client.http.post(path, content=content, headers=headers) for _ in range(5)]
        large = [asyncio.create_task(post) for post in posts]
        await until(lambda: held.at_work == 1)
        assert (await client.http.post(path, json=body[:1])).status_code == 200
        parsed_at_first = len(parsed)
        held.may_go.set()
        assert [answer.status_code for answer in await asyncio.gather(*large)] == [200] * 5
        assert (parsed_at_first, len(parsed)) == (2, 6)

    client.runner.run(law())


def test_a_failed_large_write_releases_its_turn(client: Client) -> None:
    async def law() -> None:
        wrong = [*events("wrong", LARGE), {"user_id": "ada"}]
        bodies = [wrong, events("right", LARGE), wrong, events("right", LARGE)]
        answers = await asyncio.gather(*(client.http.post("/v1/events", json=body) for body in bodies))
        assert [answer.status_code for answer in answers] == [422, 200, 422, 200]
        assert [answer.json()["accepted"] for answer in answers[1::2]] == [LARGE, 0]
        assert not client.services.large_calls

    client.runner.run(law())


def test_many_events_and_items_are_validated_off_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            threads.append(threading.current_thread().name)
            return function(*arguments, **options)

        return noted

    monkeypatch.setattr(ingest, "parse_events", noting(ingest.parse_events))
    monkeypatch.setattr("app.http.charged_calls.parse_items", noting(parse_items))
    items = [{"item_id": item_id(n)} for n in range(LARGE)]
    for path, body in (("/v1/events", events("many", LARGE)), ("/v1/items", items)):
        assert client.post(path, json=body).status_code == 200
        assert client.post(path, json=body[:SMALL]).status_code == 200
    own = threading.current_thread().name
    assert [name == own for name in threads] == [False, True] * 2


def test_other_requests_run_while_many_events_are_processed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, counted = 0, list[tuple[int, int]]()

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def count(events: list[Any], results: list[Any]) -> None:
        assert len(events) == len(results)
        counted.append((turns, len(events)))

    monkeypatch.setattr(client.service.signals.click_through, "count", count)

    async def law() -> None:
        task = asyncio.create_task(others())
        for size in (LARGE + 1, SMALL):
            assert (await client.http.post("/v1/events", json=events(f"{size}", size))).json()["accepted"] == size
        task.cancel()

    client.runner.run(law())
    assert [size for _, size in counted] == [ingest.FEW_EVENTS] * 2 + [1, SMALL]
    assert len({turn for turn, _ in counted}) == len(counted)
