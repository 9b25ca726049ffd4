"""How a process follows the store's changes of items."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from storage.records import TenantPointers
from tests.app.conftest import Client, item_id


def put(client: Client, number: int) -> None:
    assert client.request("PUT", f"/v1/items/{item_id(number)}", json={"title": f"Thing {number}"}).status_code == 200


def poll(client: Client, monkeypatch: pytest.MonkeyPatch, **found: Any) -> None:
    """Poll once; while the pointers are on their way, a request says something of an item."""
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


def test_what_a_request_reads_during_a_poll_is_no_loss_of_the_store(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        put(client, number)
    before = changes_read(client)
    poll(client, monkeypatch)
    assert changes_read(client) == before + 1


def test_a_store_that_lost_changes_is_read_from_its_beginning(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        put(client, number)
    before = changes_read(client)
    poll(client, monkeypatch, items_version=2)
    client.runner.run(client.service.switcher.refresh_items())
    assert changes_read(client) == before + 1 + 6
