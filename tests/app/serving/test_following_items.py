"""Polling of item changes in the store by a process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.serving import switcher
from app.serving.served_generation import ServedGeneration, TenantContext
from app.settings import Settings
from storage.records import ItemChanges, ItemCodes, ItemEntry, TenantPointers
from tests.app.conftest import Client, item_id, write_model
from tests.waiting import PATIENCE_S, until


def put(client: Client, number: int) -> None:
    assert client.request("PUT", f"/v1/items/{item_id(number)}", json={"title": f"Thing {number}"}).status_code == 200


def poll(client: Client, monkeypatch: pytest.MonkeyPatch, **found: Any) -> None:
    """Poll once; during the read of the pointers a request updates an item."""
    switcher, store = client.service.switcher, client.service.store
    pointers = store.pointers

    async def put_meanwhile() -> TenantPointers:
        before: TenantPointers = await pointers()
        await client.http.put(f"/v1/items/{item_id(9)}", json={"title": "Thing 9"})
        return replace(before, **found)

    with monkeypatch.context() as patched:
        patched.setattr(store, "pointers", put_meanwhile)
        client.runner.run(switcher.poll())


def changes_read(client: Client) -> int:
    count: int = client.service.switcher.current.context.overrides.change_count
    return count


def test_a_read_during_a_poll_is_not_taken_for_a_loss(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        put(client, number)
    before = changes_read(client)
    poll(client, monkeypatch)
    assert changes_read(client) == before + 1


def test_a_store_that_lost_changes_is_read_from_the_beginning(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        put(client, number)
    before = changes_read(client)
    poll(client, monkeypatch, items_version=2)
    client.runner.run(client.service.switcher.refresh_items())
    assert changes_read(client) == before + 1 + 6


def test_filters_pass_no_items_while_changes_are_read_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    adult = [item_id(number) for number in range(3)]
    for one in adult:
        assert client.request("PUT", f"/v1/items/{one}", json={"properties": {"age_limit": 18}}).status_code == 200
    asked = {"history": [], "k": 60, "filter": "!known(item.age_limit) || item.age_limit <= 6.0"}
    store, statuses = client.service.store, list[int]()
    read_page = store.item_changes

    async def ask_and_read(tenant: str, after: int, limit: int) -> ItemChanges:
        answer = await client.http.post("/v1/recommendations", json=asked)
        statuses.append(answer.status_code)
        assert not {item["item_id"] for item in answer.json().get("items", [])} & {*adult}
        page: ItemChanges = await read_page(tenant, after, limit)
        return page

    with monkeypatch.context() as patched:
        patched.setattr(switcher, "ITEM_CHANGES_PER_READ", 1)
        patched.setattr(store, "item_changes", ask_and_read)
        poll(client, monkeypatch, items_version=2)
    assert statuses.count(503) > len(adult)
    assert len(client.post("/v1/recommendations", json=asked).json()["items"]) == 60 - len(adult)


@pytest.fixture
def two_models(tmp_path: Path) -> Iterator[Client]:
    for seed, name in enumerate(("may", "june")):
        write_model(tmp_path / "models" / name, seed)
    client = Client(Settings(model_dir=tmp_path / "models" / "may", data_dir=tmp_path / "state"))
    yield client
    client.close()


EXPERIMENT = {"name": "either", "shares": {"may": 0.5, "june": 0.5}}
OFF = {"available": False}


async def require_gone(client: Client, number: int) -> None:
    """Assert that no list contains the item, in either arm, for users or items."""
    assert (await client.http.get(f"/v1/items/{item_id(number)}")).json()["available"] is False
    similar = (await client.http.get(f"/v1/items/{item_id(number + 1)}/similar", params={"k": 59})).json()
    requests = [{"user_id": f"user-{user}", "k": 60} for user in range(20)]
    lists = (await client.http.post("/v1/recommendations", json={"requests": requests})).json()["results"]
    assert len({one["generation"] for one in lists}) == (1 if client.service.switcher.experiment is None else 2)
    for one in [similar, *lists]:
        assert one["items"]
        assert item_id(number) not in [item["item_id"] for item in one["items"]]


@pytest.mark.parametrize("switched", ["activated", "experiment"])
def test_a_change_in_flight_reaches_a_model_activated_during_it(
    two_models: Client, monkeypatch: pytest.MonkeyPatch, switched: str
) -> None:
    """The change waits for the shared thread, which evaluates a filter."""
    client, may_go, waiting = two_models, threading.Event(), list[object]()
    thread = client.services.shared_thread
    run = thread.run

    def note_and_run(*args: Any, **options: Any) -> Any:
        waiting.append(args)
        return run(*args, **options)

    async def law() -> None:
        busy = asyncio.create_task(run(lambda: may_go.wait(PATIENCE_S), 1.0))
        monkeypatch.setattr(thread, "run", note_and_run)
        change = asyncio.create_task(client.http.put(f"/v1/items/{item_id(2)}", json=OFF))
        await until(lambda: waiting)
        if switched == "activated":
            answer = await client.http.post("/v1/admin/generations/june/activate")
        else:
            answer = await client.http.put("/v1/admin/experiment", json=EXPERIMENT)
        assert answer.status_code == 200
        may_go.set()
        assert (await change).json()["available"] is False
        await busy
        await require_gone(client, 2)

    client.runner.run(law())


def test_an_activated_arm_follows_changes(two_models: Client) -> None:
    client, switcher = two_models, two_models.service.switcher

    async def law() -> None:
        assert (await client.http.put("/v1/admin/experiment", json=EXPERIMENT)).status_code == 200
        assert (await client.http.post("/v1/admin/generations/june/activate")).status_code == 200
        assert (await client.http.put(f"/v1/items/{item_id(2)}", json=OFF)).json()["available"] is False
        await require_gone(client, 2)

    client.runner.run(law())
    assert [one.named.name for one in switcher.served()] == ["june", "may"]


def test_a_model_rebuilt_during_a_switch_follows_changes(two_models: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client, switcher, may_go = two_models, two_models.service.switcher, threading.Event()
    load = ServedGeneration.load

    def load_later(context: TenantContext, name: str) -> ServedGeneration:
        may_go.wait(PATIENCE_S)
        return load(context, name)

    monkeypatch.setattr(ServedGeneration, "load", load_later)

    async def law() -> None:
        starting = asyncio.create_task(client.http.put("/v1/admin/experiment", json=EXPERIMENT))
        before, shape = switcher.current, switcher.current.artifact.config.model
        codes = bytes(shape.history_codebooks), bytes(shape.target_codebooks)
        new = ItemCodes("fresh", before.named.tag, 20, 0.0, *codes)
        await client.service.store.put_item_codes(client.settings.tenant, [new])
        await until(lambda: switcher.current is not before)
        may_go.set()
        assert (await starting).status_code == 200
        assert (await client.http.put(f"/v1/items/{item_id(2)}", json=OFF)).json()["available"] is False
        await require_gone(client, 2)

    client.runner.run(law())
    assert len({one.named.tag for one in switcher.served()}) == len(switcher.served()) == 2


@pytest.mark.parametrize("switched", ["activated", "experiment"])
def test_a_poll_in_progress_does_not_undo_a_switch(
    two_models: Client, monkeypatch: pytest.MonkeyPatch, switched: str
) -> None:
    """It has read the pointers, and still applies item changes when another model is activated."""
    client, switcher = two_models, two_models.service.switcher
    refresh, reading, may_go = switcher.refresh_items, asyncio.Event(), asyncio.Event()

    async def refresh_slowly() -> None:
        reading.set()
        await may_go.wait()
        await refresh()

    async def law() -> None:
        assert (await client.http.post("/v1/admin/generations/may/activate")).status_code == 200
        await switcher.poll()
        await client.service.store.put_items("main", [ItemEntry(item_id(9), title="Thing 9")])  # by another process
        monkeypatch.setattr(switcher, "refresh_items", refresh_slowly)
        poll = asyncio.create_task(switcher.poll())
        await reading.wait()
        if switched == "activated":
            switching = client.http.post("/v1/admin/generations/june/activate")
        else:
            switching = client.http.put("/v1/admin/experiment", json=EXPERIMENT)
        assert (await switching).status_code == 200
        loaded, load = list[str](), ServedGeneration.load

        def note_and_load(context: TenantContext, name: str) -> ServedGeneration:
            loaded.append(name)
            return load(context, name)

        monkeypatch.setattr(ServedGeneration, "load", note_and_load)
        may_go.set()
        await poll
        assert loaded == []
        assert (switcher.current.named.name, switcher.experiment is None) == (
            ("june", True) if switched == "activated" else ("may", False)
        )

    client.runner.run(law())
