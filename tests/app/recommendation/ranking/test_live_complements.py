"""Live complements: orders newer than the model, over HTTP, against the counts that training finds in them."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from app.events import order_counter, trend_counter
from app.events.order_counter import ALL_ORDERS, pair_name
from app.serving import lifespan, switcher
from app.settings import Settings
from model.artifact import model_directory
from model.artifact.item_statistics import ItemStatistics
from model.lisa.item_complements import POPULARITY, SHARPNESS, SHRINKAGE, Complements, strongest_complements
from storage.errors import StorageError, StorageUnavailable
from storage.items.trends import HALF_LIFE_S
from storage.state.event import LogRecord
from tests.app.conftest import ITEMS, Client, item_id, write_model
from tests.app.support import finish_background_work, recommend
from tests.storage.redis.servers import RedisServer
from tests.waiting import wait_until

TOLERANCE = 1e-2  # what fades in a quarter of an hour
NEW = "new 1"
NEVER_S = 1e6

Begin = Callable[..., Client]


@pytest.fixture(params=["sqlite", "redis"])
def begin(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Start a service on the store of this test that counts only on demand."""
    monkeypatch.setattr(switcher, "REBUILD_EVERY_S", 0.05)
    repeat = lifespan.repeat

    async def repeat_unless_never(work: Callable[[], Awaitable[object]], every_s: float) -> None:
        await (asyncio.sleep(NEVER_S) if every_s == NEVER_S else repeat(work, every_s))

    monkeypatch.setattr(lifespan, "SYNC_EVERY_S", NEVER_S)
    monkeypatch.setattr(lifespan, "repeat", repeat_unless_never)
    clients: list[Client] = []
    server: RedisServer | None = request.getfixturevalue("redis_server") if request.param == "redis" else None

    def begin_client(**models: Any) -> Client:
        models = models or {"models_dir": tmp_path / "models"}
        store = {"data_dir": tmp_path / "state"} if server is None else {"redis_url": server.url}
        client = Client(Settings(**models, **store))
        clients.append(client)
        sync(client)
        return client

    yield begin_client
    for client in clients:
        client.close()


def sync(*clients: Client) -> None:
    """Let every process count, and read the counts of all processes."""
    for client in (*clients, *clients):
        client.runner.run(client.service.signals.sync())


def purchases(user_id: str, items: Sequence[str], order_id: str | None = None) -> list[dict[str, Any]]:
    """Events of an order, with ids from user and item."""
    named = {} if order_id is None else {"order_id": order_id}
    common = {"user_id": user_id, "type": "purchase", **named}
    return [{"event_id": f"{order_id}-{item}", "item_id": item, **common} for item in items]


def post(client: Client, events: list[dict[str, Any]]) -> int:
    """Post the events and return how many are new."""
    answer = client.post("/v1/events", json=events)
    assert answer.status_code == 200, answer.text
    accepted: int = answer.json()["accepted"]
    return accepted


def listed(answer: Any) -> dict[str, float]:
    return {item["item_id"]: item["score"] for item in answer["items"]}


def together(client: Client, item: str) -> dict[str, float]:
    """Complements of the item, once they are known."""
    url = f"/v1/items/{item}/together"
    answer = wait_until(lambda: (found := client.get(url, params={"k": 100})).is_success and found.json())
    assert answer["source"] == "together"
    return listed(answer)


def trained(orders: Sequence[Sequence[str]]) -> dict[str, dict[str, float]]:
    """The oracle: complements of each item by training."""
    names = sorted({*chain(*orders)})
    rows = [(number, names.index(name)) for number, order in enumerate(orders) for name in order]
    order, item = np.array(rows).T
    found = strongest_complements(order, item, len(names))
    return {
        name: {names[other]: score for other, score in zip(items, scores, strict=True) if other >= 0}
        for name, items, scores in zip(names, found.items.tolist(), found.scores.tolist(), strict=True)
    }


def write_shop(directory: Path) -> Path:
    """Write a model in which the complements of each item are the next two."""
    plain, rows = model_directory.load(write_model(directory)), np.arange(ITEMS)
    items = np.stack([(rows + 1) % ITEMS, (rows + 2) % ITEMS], axis=1).astype(np.int32)
    scores = np.tile(np.array([2.0, 1.0], np.float32), (ITEMS, 1))
    statistics = ItemStatistics(Complements(items, scores))
    model_directory.save(directory, plain.model, plain.config, plain.items, plain.metrics, statistics)
    return directory


def assert_together(client: Client, expected: dict[str, dict[str, float]], tolerance: float = TOLERANCE) -> None:
    """Assert the ordered complements of each item, once the process has a catalogue with all items."""
    for item, complements in expected.items():
        found_now, wanted = partial(together, client, item), pytest.approx(complements, rel=tolerance)
        wait_until(partial(lambda found, wanted: found() == wanted, found_now, wanted), found_now)
        found = [*found_now().values()]
        assert found == sorted(found, reverse=True)


def test_orders_without_a_model_count_as_in_training(begin: Begin) -> None:
    """Two processes in turn get the items; corrections after counting only decay, since counts name no user."""
    rng, names = random.Random(4), [f"thing-{n}" for n in range(8)]
    orders = [rng.sample(names, rng.randint(1, 5)) for _ in range(30)]
    processes = begin(), begin()
    posted = [purchases(f"user-{n % 4}", order, f"o{n}") for n, order in enumerate(orders)]
    for events in posted:
        for place, event in enumerate(events):
            assert post(processes[place % 2], [event]) == 1
    sync(*processes)
    expected = trained(orders)
    for client in processes:
        assert_together(client, expected)
    assert post(processes[0], [event for events in posted for event in events]) == 0
    assert processes[0].request("DELETE", f"/v1/users/user-0/events/{posted[0][0]['event_id']}").status_code == 200
    assert processes[0].post("/v1/users/user-1/merge", json={"from": "user-2"}).status_code == 200
    assert processes[0].request("DELETE", "/v1/users/user-3").status_code == 202
    again = begin()
    sync(*processes, again)
    assert_together(again, expected)


def test_orders_corrected_before_counting_count_as_corrected(begin: Begin) -> None:
    client = begin()
    post(client, purchases("ann", ["tea", "cup", "pot"], "o1"))
    post(client, purchases("bob", ["tea"], "o2"))
    post(client, purchases("visitor", ["lid", "pot"], "o2"))
    post(client, purchases("cid", ["tea", "jar"], "o3"))
    assert client.request("DELETE", "/v1/users/ann/events/o1-cup").status_code == 200
    assert client.post("/v1/users/bob/merge", json={"from": "visitor"}).status_code == 200
    assert client.request("DELETE", "/v1/users/cid").status_code == 202
    sync(client)
    assert_together(client, trained([["tea", "pot"], ["tea", "lid", "pot"]]))


def test_purchases_without_ids_within_an_hour_are_one_order(begin: Begin) -> None:
    client, now_s = begin(), int(time.time())  # whole seconds, so that tea and cup are exactly an hour apart
    bought = [("tea", 365 * 24), ("jar", 365 * 24), ("tea", 4), ("cup", 3), ("lid", 2.5), ("pot", 0.1)]
    events = [
        {"user_id": "ann", "item_id": item, "type": "purchase", "timestamp": now_s - hours_ago * 3_600}
        for item, hours_ago in bought
    ]
    assert post(client, [*events, {"user_id": "ann", "item_id": "tea", "type": "cart"}]) == len(bought) + 1
    sync(client)
    assert_together(client, trained([["tea", "cup", "lid"], ["pot"]]), tolerance=0.05)  # an order fades with its age
    assert together(client, "jar") == {}


@pytest.mark.parametrize(("half_lives", "is_counted"), [(9.9, True), (10.1, False)])
def test_old_purchases_are_not_counted(begin: Begin, half_lives: float, *, is_counted: bool) -> None:
    client, at_s = begin(), time.time() - half_lives * HALF_LIFE_S
    post(client, [event | {"timestamp": at_s} for event in purchases("ann", ["tea", "cup"], "o1")])
    sync(client)
    assert bool(client.service.signals.order_counter.newest) == is_counted


def test_counts_are_flushed_after_the_store_recovers(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise StorageUnavailable("away")

    client = begin()
    post(client, purchases("ann", ["tea", "cup"], "o1"))
    with monkeypatch.context() as patch:
        patch.setattr(client.service.store.orders, "add", fails)
        with pytest.raises(StorageUnavailable):
            client.runner.run(client.service.signals.sync())
        post(client, purchases("bob", ["cup", "pot"], "o2"))
    sync(client)
    assert_together(client, trained([["tea", "cup"], ["cup", "pot"]]))


def test_counts_added_before_a_failure_are_not_added_again(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    client = begin()
    orders, added = client.service.store.orders, list[int]()
    add = orders.add

    async def fails_second(tenant: str, counts: Mapping[str, float]) -> None:
        added.append(len(counts))
        if len(added) == 2:
            raise StorageUnavailable("away")
        await add(tenant, counts)

    monkeypatch.setattr(order_counter, "COUNTS_AT_ONCE", 4)
    bought = [["tea", "cup"], ["cup", "pot"], ["pot", "jar", "tea"]]
    for number, items in enumerate(bought):
        post(client, purchases(f"user-{number}", items, "o1"))
    with monkeypatch.context() as patch:
        patch.setattr(orders, "add", fails_second)
        with pytest.raises(StorageUnavailable):
            client.runner.run(client.service.signals.sync())
    assert added == [4, 4]
    sync(client)
    assert_together(client, trained(bought))


def test_a_cold_item_complements_items_of_the_model(begin: Begin, tmp_path: Path) -> None:
    client = begin(model_dir=write_shop(tmp_path / "tiny"))
    words = {"title": "New tea cup", "categories": ["tea", "cup"]}
    assert client.request("PUT", f"/v1/items/{NEW}", json=words).status_code == 200
    finish_background_work(client)  # assigns codes
    finish_background_work(client)  # serves them
    three, four = item_id(3), item_id(4)
    assert together(client, NEW) == {}
    assert together(client, three) == pytest.approx({four: 2, item_id(5): 1})
    for number, order in enumerate(([three, NEW], [four, three, NEW], [three, four])):
        assert post(client, purchases("ann", order, f"o{number}")) == len(order)
    sync(client)

    def score(both: float, orders_with: int, orders_with_it: int) -> float:
        return float((both / (orders_with + SHRINKAGE) / (orders_with_it / 3) ** POPULARITY) ** SHARPNESS)

    with_three, with_four = 1 + 2**-0.5, 0.5  # of three items in an order two are neighbours, and two are not
    of_three, of_four = score(with_three, 2, 2), score(with_four, 1, 2)
    assert together(client, three) == pytest.approx({four: 2, item_id(5): 1, NEW: of_three}, rel=TOLERANCE)
    assert together(client, four) == pytest.approx({item_id(5): 2, item_id(6): 1, NEW: of_four}, rel=TOLERANCE)
    expected = {three: score(with_three, 2, 2), four: score(with_four, 2, 1)}
    assert together(client, NEW) == pytest.approx(expected, rel=TOLERANCE)
    asked: dict[str, Any] = {"user_id": "nobody", "k": ITEMS + 1, "exclude_seen": "none", "basket": [three, four]}
    alone = recommend(client, **asked, basket_only=True)
    of_both = {item_id(5): 3, item_id(6): 1, NEW: of_three + of_four}
    assert listed(alone) == pytest.approx(of_both, rel=TOLERANCE)
    assert [(item["item_id"], item["title"]) for item in alone["items"] if "cold" in item] == [(NEW, "New tea cup")]
    lifted = recommend(client, **asked, explain=True)
    gains = {item["item_id"]: item["explanation"]["basket"] for item in lifted["items"]}
    assert gains[NEW] > 0


def test_pairs_learned_since_they_were_counted_score_as_in_the_model(begin: Begin, tmp_path: Path) -> None:
    client = begin(model_dir=write_shop(tmp_path / "tiny"))
    three, four = item_id(3), item_id(4)
    counted = {pair_name(three, four): 5.0, three: 5.0, four: 5.0, ALL_ORDERS: 9.0}
    client.runner.run(client.service.store.orders.add("main", counted))
    sync(client)
    assert client.service.signals.order_counter.newest.keys() == counted.keys()
    assert together(client, three) == pytest.approx({four: 2, item_id(5): 1})


def test_an_unreadable_log_does_not_block_orders_of_others(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    client = begin()
    orders = client.service.store.orders
    read = orders.newest

    async def newest(tenant: str, user_id: str, limit: int) -> list[LogRecord]:
        if user_id == "ada":
            raise StorageError("the log is damaged", "damaged")
        records: list[LogRecord] = await read(tenant, user_id, limit)
        return records

    monkeypatch.setattr(orders, "newest", newest)
    post(client, [*purchases("ada", ["a", "b"], "o1"), *purchases("bea", ["c", "d"], "o2")])
    sync(client)
    counted = client.service.signals.order_counter.newest
    assert pair_name("c", "d") in counted
    assert pair_name("a", "b") not in counted


class Noted(list[str]):
    """A container without elements that records the elements it is asked for."""

    def __contains__(self, item: object) -> bool:
        self.append(str(item))
        return False


def test_long_counting_does_not_block_the_event_loop(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    client, learned, places = begin(), Noted(), set()
    client.service.signals.order_counter.set_learned(learned)
    for module, name in ((trend_counter, "_hashed"), (order_counter, "order_counts")):
        count = getattr(module, name)

        def noted(*args: Any, name: str = name, count: Callable[..., Any] = count) -> Any:
            places.add((name, threading.current_thread() is threading.main_thread()))
            return count(*args)

        monkeypatch.setattr(module, name, noted)
    bought = [f"new {number}" for number in range(200)]
    post(client, purchases("ada", bought, "o1"))
    sync(client)
    assert places == {("_hashed", False), ("order_counts", False)}
    assert sorted(learned) == sorted(bought)  # each is looked up once


@pytest.mark.parametrize(("module", "name"), [(trend_counter, "_hashed"), (order_counter, "order_counts")])
def test_shutdown_flushes_orders_that_are_being_counted(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> None:
    client, begun, may_end = begin(), threading.Event(), threading.Event()
    signals, count = client.service.signals, getattr(module, name)

    def slowly(*args: Any) -> Any:
        begun.set()
        may_end.wait()
        return count(*args)

    async def stop() -> None:
        counting = asyncio.create_task(signals.flush())
        await asyncio.to_thread(begun.wait)
        counting.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with suppress(asyncio.CancelledError):
            await counting

    monkeypatch.setattr(module, name, slowly)
    post(client, purchases("ada", [f"new {number}" for number in range(200)], "o1"))
    client.runner.run(stop())
    sync(client)
    assert signals.trend_counter.newest.keys() >= {"new 0", "new 199"}
    assert signals.order_counter.newest[ALL_ORDERS] == pytest.approx(1, rel=TOLERANCE)
