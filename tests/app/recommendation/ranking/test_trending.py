"""Trending items: shared by all processes, by category, and across restarts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from app.catalogue.expressions.labels import LabelSnapshot
from app.catalogue.expressions.set_columns import TextSetColumn
from storage.errors import StorageError, StorageUnavailable
from storage.items.trends import HALF_LIFE_S
from tests.app.conftest import Client, categories_of, item_id
from tests.app.support import run_command
from tests.storage.redis.servers import RedisServer
from tests.waiting import PATIENCE_S


def trending(client: Client, **params: Any) -> dict[str, float]:
    client.runner.run(client.service.signals.sync())
    response = client.get("/v1/items/trending", params=params)
    assert response.status_code == 200, response.text
    assert response.json()["generation"] == "tiny"
    return {item["item_id"]: item["score"] for item in response.json()["items"]}


def wake(client: Client) -> None:
    """Wait until the client's store responds: its event loop rests while another client's runs."""

    async def answers() -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(StorageError):
                    await client.service.store.ping()
                    return
                await asyncio.sleep(0.05)

    client.runner.run(answers())


def test_events_of_all_processes_count_by_their_age(
    start: Callable[..., Client], tmp_path: Path, redis_server: RedisServer
) -> None:
    """Each once, half as much for every half-life; after a restart as before; not those of no weight, and no unknown
    item.
    """
    now_s = time.time()
    posted = [("item-1", 0.0, "click"), ("item-2", 0.0, "click"), ("item-1", 1.0, "purchase"), ("item-3", 2.0, "click")]
    posted += [("item-4", 0.0, "dislike"), ("item-4", 0.0, "glance"), ("new", 0.0, "click")]
    events = [
        {"event_id": f"e{n}", "user_id": f"u{n}", "item_id": name, "type": kind, "timestamp": now_s - age * HALF_LIFE_S}
        for n, (name, age, kind) in enumerate(posted)
    ]
    expected = {"item-1": 1.5, "item-2": 1.0, "item-3": 0.25}
    settings = {"redis_url": redis_server.url}
    one, other = start(tmp_path, **settings), start(tmp_path, **settings)
    try:
        for client, some in ((one, events[:3]), (other, events[2:]), (one, events)):
            wake(client)
            assert client.post("/v1/events", json=some).status_code == 200
        one.runner.run(one.service.signals.sync())
        assert trending(other) == pytest.approx(expected, rel=1e-3)
        assert list(trending(one)) == ["item-1", "item-2", "item-3"]
        other.click("bob", "item-5")
    finally:
        one.close()
        other.close()  # which tells what it had not told
    again = start(tmp_path, **settings)
    try:
        assert trending(again) == pytest.approx(expected | {"item-5": 1.0}, rel=1e-3)
    finally:
        again.close()


@pytest.mark.parametrize("years", [1, 5, -1, -50])
def test_a_clock_error_of_seconds_leaves_no_trace(client: Client, monkeypatch: pytest.MonkeyPatch, years: int) -> None:
    """Except that counts before the first jump ahead age by one day."""
    now_s, wrong_by_s = time.time, years * 365 * 86_400
    client.click("ada", "item-1")
    trending(client)
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: now_s() + wrong_by_s)
        patch.setattr("time.time_ns", lambda: int((now_s() + wrong_by_s) * 1e9))
        client.click("ada", "item-2")
        trending(client)
    client.click("ada", "item-3")
    a_day = 0.5 ** (86_400 / HALF_LIFE_S)
    expected = {"item-1": a_day, "item-2": 1 if years > 0 else a_day, "item-3": 1}
    assert trending(client) == pytest.approx(expected, rel=1e-3)


def test_a_visitor_counts_once_per_item(
    start: Callable[..., Client], tmp_path: Path, redis_server: RedisServer
) -> None:
    """Whatever the number of events, processes and restarts."""
    settings = {"redis_url": redis_server.url}
    for name in ("first", "again"):
        one, other = start(tmp_path, **settings), start(tmp_path, **settings)
        try:
            for client in (one, other):
                wake(client)
                client.click("eve", *["item-1"] * 500)
                client.click("eve", "item-2", "item-1")
                client.click(f"{name}-visitor", "item-2")
                trending(client)
            for client in (one, other):
                wake(client)
                expected = {"item-1": 1, "item-2": 2 if name == "first" else 3}
                assert trending(client) == pytest.approx(expected, rel=1e-3)
        finally:
            one.close()
            other.close()


def test_trends_are_flushed_after_the_store_recovers(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise StorageUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(client.service.store, "add_visits", fails)
        client.click("ada", "item-1")
        with pytest.raises(StorageUnavailable):
            client.runner.run(client.service.signals.sync())
        client.click("bob", "item-1", "item-2")
    assert trending(client) == pytest.approx({"item-1": 2.0, "item-2": 1.0}, rel=1e-3)


def test_trends_respect_categories_and_availability(client: Client) -> None:
    for user, rows in enumerate([(1, 2, 3, 4), (2, 3, 4), (3, 4), (4,)]):
        client.click(f"u{user}", *map(item_id, rows))
    client.request("PUT", "/v1/items/item-3", json={"available": False})
    teas = [row for row in (4, 2, 1) if "tea" in categories_of(row)]
    assert list(trending(client)) == ["item-4", "item-2", "item-1"]
    assert list(trending(client, k=2)) == ["item-4", "item-2"]
    assert list(trending(client, categories="tea")) == [item_id(row) for row in teas]
    assert trending(client, categories="no such") == {}


def test_many_categories_are_looked_up_off_the_event_loop(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each category that the shop has set takes a pass over all items."""
    labels, threads = [f"label-{n}" for n in range(100)], list[str]()
    client.request("PUT", "/v1/items/item-3", json={"categories": labels})
    client.click("ada", "item-3", "item-4")
    by_label = TextSetColumn.by_label

    def noted(column: TextSetColumn, rows: NDArray[np.int64] | None = None) -> LabelSnapshot:
        threads.append(threading.current_thread().name)
        return by_label(column, rows)

    monkeypatch.setattr(TextSetColumn, "by_label", noted)
    assert list(trending(client, categories=labels)) == ["item-3"]
    assert len(threads) == 1
    assert threads[0].startswith("shared")


@pytest.mark.parametrize("query", ["k=0", "k=1001", "k=1&k=2", "categories=", "q=1"])
def test_an_invalid_query_is_refused(client: Client, query: str) -> None:
    assert client.get(f"/v1/items/trending?{query}").status_code == 422


def test_the_command_deletes_the_counts_of_items(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    for item in ("item-1", "item-2", "item-3"):
        client.click("ada", item)
    assert trending(client) == pytest.approx({"item-1": 1, "item-2": 1, "item-3": 1}, rel=1e-3)
    url, directory = client.settings.redis_url, str(client.settings.data_dir)
    where = ["--data-dir", directory] if url is None else ["--redis-url", url]
    assert run_command("items", "drop-counts", "item-1", "item-3", "misspelt", *where) == 0
    assert capsys.readouterr().out == "the live counts of 2 items are deleted\nno live counts: 'misspelt'\n"
    assert trending(client) == pytest.approx({"item-2": 1}, rel=1e-3)
