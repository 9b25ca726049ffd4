"""Cold items with titles: a model that learned from titles assigns them codes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.catalogue.overrides import catalogue_values
from app.settings import Settings
from model.artifact import model_directory
from model.artifact.item_statistics import ItemStatistics
from model.content.content_map import learned_content
from model.content.text_features import Description
from storage.records import ItemCodes
from tests.app.catalogue.new_items.cold_items import (
    NEW,
    assert_states_are_folds,
    codes_of,
    everything,
    introduce,
    nearness,
    put,
    sample_soon,
)
from tests.app.conftest import ITEMS, Client, item_id, write_model
from tests.app.support import finish_background_work
from tests.storage.redis.servers import RedisServer
from tests.waiting import wait_until


@torch.inference_mode()
def write_shop(directory: Path, seed: int = 7) -> Path:
    """Write a model that has learned codes from titles and categories."""
    plain = model_directory.load(write_model(directory, seed))
    titles, categories = list(plain.items.titles), list(plain.items.categories)
    described = [Description(title, names) for title, names in zip(titles, categories, strict=True)]
    content = learned_content(plain.model.item_vectors().numpy(), np.full(ITEMS, 100), described)
    statistics = ItemStatistics(content=content)
    model_directory.save(directory, plain.model, plain.config, plain.items, plain.metrics, statistics)
    return directory


@pytest.fixture(autouse=True)
def sampled_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    sample_soon(monkeypatch)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("models") / "titled")


@pytest.fixture
def client(shop: Path, tmp_path: Path) -> Iterator[Client]:
    client = Client(Settings(model_dir=shop, data_dir=tmp_path))
    yield client
    client.close()


def test_an_item_is_recommended_by_its_title_alone(client: Client) -> None:
    client.click("u0", "item-1", "item-5")
    put(client, title="Green thing of another number")
    found = everything(client)
    assert found[NEW]["cold"] is True
    assert found[NEW]["title"] == "Green thing of another number"
    client.click("u0", NEW)
    assert client.get("/v1/users/u0").json()["last_item_id"] == NEW
    assert_states_are_folds(client, ["u0"])


def test_events_before_an_item_has_codes_are_seen_only_in_the_log(client: Client) -> None:
    client.click("u0", "item-1")
    assert client.request("PUT", f"/v1/items/{NEW}", json={"available": True}).status_code == 200
    client.click("u0", NEW)
    put(client, title="Green thing of another number")
    rules: dict[str, dict[str, object]] = {
        "recent": {},
        "all": {"exclude_seen": "all"},
        "events": {"exclude_events": ["click"]},
    }
    every = {"user_id": "u0", "k": 1000}
    listed = {
        how: {item["item_id"] for item in client.post("/v1/recommendations", json={**every, **wishes}).json()["items"]}
        for how, wishes in rules.items()
    }
    assert {how for how, items in listed.items() if NEW in items} == {"recent"}
    client.click("u0", NEW)
    assert NEW not in {item["item_id"] for item in client.post("/v1/recommendations", json=every).json()["items"]}


def test_items_with_similar_titles_get_similar_codes(client: Client) -> None:
    trained = client.service.switcher.current.artifact
    rows = [row for row in range(ITEMS) if trained.items.titles[row]]
    twins = [
        {
            "item_id": f"twin-{row}",
            "title": trained.items.titles[row],
            "categories": list(trained.items.categories[row]),
        }
        for row in rows
    ]
    assert client.post("/v1/items", json=twins).json() == {"accepted": len(twins), "unknown_items": len(twins)}
    finish_background_work(client)
    finish_background_work(client)
    cold_items = client.service.switcher.current.cold_items
    assert nearness(trained, [cold_items[f"twin-{row}"].target for row in rows], rows) > 0.15


def test_titles_determine_codes_and_unknown_words_give_none(client: Client) -> None:
    client.click("u0", "item-1")
    put(client, title="qqqq xxxx")
    assert NEW not in everything(client)
    put(client, title="Green thing")
    first = codes_of(client)
    put(client, title="Black number")
    assert codes_of(client) != first
    put(client, available=True)
    put(client, title="Green thing")
    assert codes_of(client) == first


def test_unavailable_items_get_codes_of_the_next_model_when_they_return(shop: Path, client: Client) -> None:
    gone: dict[str, dict[str, Any]] = {
        "sold": {"available": False},
        "expired": {"available_until": "2026-01-31T12:00:00Z"},
    }
    for name in ("on-sale", "to-come", *gone):
        put(client, name, title="Green thing")
    put(client, "to-come", available_from="2999-01-31T12:00:00Z", available_until="2999-02-28T12:00:00Z")
    for name, words in gone.items():
        put(client, name, **words)
        assert name not in everything(client)
        assert client.get(f"/v1/items/{name}/similar").status_code == 200  # the page of a listing outlives its sale
    write_shop(shop.parent / "after", seed=9)
    assert client.post("/v1/admin/generations/after/activate").status_code == 200
    for _ in range(3):
        finish_background_work(client)
    assert client.service.switcher.current.cold_items.keys() == {"on-sale", "to-come"}
    for name, words in gone.items():
        put(client, name, **{**words, "available": True, "available_until": None})
        assert name in everything(client)


def test_codes_from_events_replace_codes_from_titles(client: Client) -> None:
    put(client, title="Green thing")
    assert codes_of(client).evidence == 0
    introduce(client)
    assert codes_of(client).evidence == 10
    put(client, title="Black thing")
    assert codes_of(client).evidence == 10


def test_the_newest_items_get_codes_of_the_next_model_first(
    shop: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"thing-{number}" for number in range(6)]
    for name in names:
        put(client, name, title="Green thing")
    assert client.service.switcher.current.cold_items.keys() == {*names}
    put_item_codes, placed = client.service.store.put_item_codes, list[list[str]]()

    async def put_codes(tenant: str, codes: Sequence[ItemCodes]) -> None:
        placed.append(sorted(one.item_id for one in codes))
        if len(placed) == 1:
            await client.service.item_updates.put(NEW, {"title": "Green thing"})
        await put_item_codes(tenant, codes)

    monkeypatch.setattr(catalogue_values, "ROWS_PER_PAGE", 2)
    monkeypatch.setattr(client.service.store, "put_item_codes", put_codes)
    write_shop(shop.parent / "next", seed=8)
    assert client.post("/v1/admin/generations/next/activate").status_code == 200
    for _ in range(3):
        finish_background_work(client)
    assert placed == [names[4:], [NEW], names[2:4], names[:2]]
    assert {NEW, *names} <= everything(client).keys()


def test_a_slow_rebuild_does_not_delay_codes_of_the_next_model(shop: Path, client: Client) -> None:
    put(client, title="Green thing")
    switcher = client.service.switcher
    switcher.rebuild_at_s = inf
    write_shop(shop.parent / "other", seed=9)
    assert client.post("/v1/admin/generations/other/activate").status_code == 200
    wait_until(lambda: client.runner.run(switcher.poll()) or NEW in everything(client))


def test_a_title_of_a_learned_item_changes_no_codes(client: Client) -> None:
    client.click("u0", "item-2")
    before = everything(client)
    put(client, item_id(3), title="Black something")
    after = everything(client)
    assert {name: one["score"] for name, one in after.items()} == {name: one["score"] for name, one in before.items()}
    assert client.service.switcher.current.cold_items == {}


def test_replicas_agree_and_a_restart_keeps_the_codes(shop: Path, tmp_path: Path, redis_server: RedisServer) -> None:
    settings = Settings(data_dir=tmp_path, redis_url=redis_server.url, model_dir=shop)
    one, other = (Client(settings) for _ in range(2))
    try:
        one.click("u0", "item-1")
        assert one.request("PUT", f"/v1/items/{NEW}", json={"title": "Green thing"}).status_code == 200
        for client in (one, other, one, other):
            finish_background_work(client)
        assert NEW in everything(one)
        assert everything(other) == everything(one)
    finally:
        one.close()
        other.close()
    later = Client(settings)
    try:
        finish_background_work(later)
        assert codes_of(later).evidence == 0
    finally:
        later.close()
