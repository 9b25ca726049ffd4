"""Updates of items by the shop: applied completely or refused, durable, and followed by every process."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.overrides.item_overrides import ItemOverrides
from app.serving import served_generation
from app.settings import Settings
from model.artifact import model_directory
from model.artifact.item_table import ItemTable
from model.inference import bitmap
from storage.records import ItemChanges, ItemEntry
from tests.app.conftest import ITEMS, Client, categories_of, item_id, write_model
from tests.app.support import run_command
from tests.storage.redis.servers import RedisServer
from tests.waiting import PATIENCE_S, wait_until

NAMES = ["a", "b", "c", "d", "e", "f"]
IDS = [*NAMES, "new", "newer"]
WORDS = ["red", "blue kettle", "kettle", "", "Kettle, blue"]
LABELS = ["pots", "cups", "lids"]
FOUND = "item_id", "title", "available", "known"  # the other fields have tests of their own
COUNTS = np.array([3, 9, 0, 9, 1, 2], np.int64)
ENTRIES = st.builds(
    ItemEntry,
    st.sampled_from(IDS),
    st.none() | st.sampled_from(WORDS),
    st.none() | st.sets(st.sampled_from(LABELS)).map(tuple),
    st.none() | st.booleans(),
)
TRAINED = {
    name: {"title": WORDS[n % 5], "categories": (LABELS[n % 3],), "available": True} for n, name in enumerate(NAMES)
}


def items() -> ItemTable:
    return ItemTable(
        list(NAMES),
        [TRAINED[name]["title"] for name in NAMES],  # type: ignore[misc]
        [TRAINED[name]["categories"] for name in NAMES],  # type: ignore[misc]
        COUNTS,
    )


class Store:
    """A minimal model of how the stores handle items."""

    def __init__(self) -> None:
        self.newest: dict[str, dict[str, Any]] = {}

    def put(self, entry: ItemEntry) -> ItemChanges:
        parts = {"title": entry.title, "categories": entry.categories, "available": entry.available}
        known = self.newest.setdefault(entry.item_id, dict.fromkeys(parts))
        known.update({name: part for name, part in parts.items() if part is not None})
        return ItemChanges([ItemEntry(entry.item_id, **known)], 0)

    def item(self, name: str) -> dict[str, Any] | None:
        """The item as every process should show it."""
        model, update = TRAINED.get(name), self.newest.get(name)
        if model is None and update is None:
            return None
        found: dict[str, Any] = {"title": "", "categories": (), "available": True, **(model or {})}
        found.update({part: word for part, word in (update or {}).items() if word is not None})
        return found | {"item_id": name, "known": model is not None, "categories": sorted(found["categories"])}


def assert_shows(catalogue: LiveCatalogue, store: Store) -> None:
    expected = {name: store.item(name) for name in IDS}
    found = {name: catalogue.item(name) for name in IDS}
    described = {
        name: item
        and {field: value for field, value in item.items() if field in FOUND}
        | {"categories": sorted(item["categories"])}
        for name, item in found.items()
    }
    assert described == expected
    for label in LABELS:
        members = np.flatnonzero(bitmap.to_mask(catalogue.in_categories([label]), len(catalogue)))
        assert {NAMES[row] for row in members} == {
            name
            for name in NAMES
            if label in expected[name]["categories"]  # type: ignore[index]
        }
    shown = [item["item_id"] for item in catalogue.popular_items(10)]
    assert shown == [
        name
        for name in ("b", "d", "a", "f", "e", "c")
        if expected[name]["available"]  # type: ignore[index]
    ]
    rows = np.arange(len(NAMES))
    for items in (catalogue.scored_items(rows, [1.0] * len(rows)), catalogue.named_items(rows)):
        assert [item["item_id"] for item in items] == NAMES
        assert [item.get("title", "") for item in items] == [expected[name]["title"] for name in NAMES]  # type: ignore[index]
    for word in ("kettle", "a"):
        assert {item["item_id"] for item in catalogue.search(word, 20)} == {
            name for name, item in expected.items() if item and (word in item["title"].lower() or word in name)
        }


@given(st.lists(st.one_of(ENTRIES, st.none()), max_size=20))
@settings(max_examples=40)
def test_catalogues_show_the_last_update_of_each_item(words: list[ItemEntry | None]) -> None:
    """None stands for a replica that catches up."""
    overrides, store = ItemOverrides(), Store()
    replica = LiveCatalogue(items(), overrides)
    for entry in words:
        if entry is None:
            replica.catch_up()
        else:
            overrides.apply(store.put(entry))
    replica.catch_up()
    assert_shows(replica, store)
    assert_shows(LiveCatalogue(items(), overrides), store)  # of another generation, which begins with all of them


def test_search_finds_updated_titles_closest_first() -> None:
    overrides = ItemOverrides()
    overrides.apply(ItemChanges([ItemEntry("f", "Pan"), ItemEntry("e", "saucepan"), ItemEntry("new", "frying pan")], 3))
    assert [item["item_id"] for item in LiveCatalogue(items(), overrides).search("pan", 10)] == ["f", "e", "new"]


def put(client: Client, name: str, **words: object) -> httpx.Response:
    return client.request("PUT", f"/v1/items/{name}", json=words)


def shown(client: Client, user_id: str = "ada", **params: Any) -> list[str]:
    return [item["item_id"] for item in client.recommend(user_id, k=ITEMS, exclude_seen="none", **params)["items"]]


EVERY_ITEM = {item_id(row) for row in range(ITEMS)}


class TestAvailability:
    def test_sold_out_items_are_in_no_list(self, client: Client) -> None:
        client.click("ada", item_id(1), item_id(2))
        gone = {item_id(row) for row in (0, 3, 7, 31)}
        answer = client.post("/v1/items", json=[{"item_id": name, "available": False} for name in gone])
        assert answer.json() == {"accepted": 4, "unknown_items": 0}
        assert set(shown(client)) == set(shown(client, "nobody")) == EVERY_ITEM - gone
        for body in ({"history": [item_id(4)]}, {"user_id": "ada", "candidates": sorted(EVERY_ITEM)}):
            answer = client.post("/v1/recommendations", json={**body, "k": ITEMS, "exclude_seen": "none"})
            assert {item["item_id"] for item in answer.json()["items"]} == EVERY_ITEM - gone
        popular = client.get("/v1/items/popular", params={"k": ITEMS}).json()["items"]
        assert {item["item_id"] for item in popular} == EVERY_ITEM - gone
        assert put(client, item_id(3), available=True).json()["available"] is True
        assert set(shown(client)) == EVERY_ITEM - gone | {item_id(3)}

    def test_applies_to_other_processes_and_models_and_after_restarts(
        self, tmp_path: Path, redis_server: RedisServer
    ) -> None:
        def begin() -> Client:
            given = {"data_dir": tmp_path / "state", "redis_url": redis_server.url}
            return Client(Settings(model_dir=tmp_path / "models" / "may", **given))  # type: ignore[arg-type]

        for seed, name in enumerate(("may", "june")):
            write_model(tmp_path / "models" / name, seed)
        one, other = begin(), begin()
        try:
            # a loop that stood still for seconds takes its Redis for one that hangs, until it has asked again
            wait_until(lambda: put(one, item_id(3), available=False, title="Lamp", categories=["light"]).is_success)
            wait_until(lambda: item_id(3) not in shown(other))
            assert other.get(f"/v1/items/{item_id(3)}").json() == {
                "item_id": item_id(3),
                "title": "Lamp",
                "categories": ["light"],
                "available": False,
                "known": True,
                "properties": {},
            }
            assert one.post("/v1/admin/generations/june/activate").status_code == 200
            wait_until(lambda: put(other, item_id(4), available=False).is_success)
            wait_until(lambda: item_id(4) not in shown(one))
            wait_until(lambda: other.get("/v1/model").json()["generation"] == "june")
            third = begin()
            for client in (one, other, third):
                assert set(shown(client)) == EVERY_ITEM - {item_id(3), item_id(4)}
                assert [item["item_id"] for item in client.get("/v1/items?query=lamp").json()["items"]] == [item_id(3)]
            third.close()
        finally:
            one.close()
            other.close()

    def test_applies_to_a_model_that_is_being_loaded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for seed, name in enumerate(("may", "june")):
            write_model(tmp_path / "models" / name, seed)
        client = Client(Settings(model_dir=tmp_path / "models" / "may", data_dir=tmp_path / "state"))
        loading, updated = threading.Event(), threading.Event()
        describe = served_generation.describe_model

        def describe_later(*arguments: Any) -> Any:
            loading.set()
            assert updated.wait(PATIENCE_S)
            return describe(*arguments)

        async def say_meanwhile() -> None:
            activating = asyncio.create_task(client.http.post("/v1/admin/generations/june/activate"))
            await asyncio.to_thread(loading.wait, PATIENCE_S)
            await client.http.put(f"/v1/items/{item_id(3)}", json={"available": False})
            updated.set()
            assert (await activating).json()["generation"] == "june"

        monkeypatch.setattr(served_generation, "describe_model", describe_later)
        client.runner.run(say_meanwhile())
        assert set(shown(client)) == EVERY_ITEM - {item_id(3)}
        client.close()

    def test_survives_a_restart_without_redis(self, start: Callable[..., Client], tmp_path: Path) -> None:
        client = start(tmp_path)
        put(client, item_id(5), available=False)
        put(client, "brand-new", title="Brand new lamp")
        client.close()
        client = start(tmp_path)
        assert set(shown(client)) == EVERY_ITEM - {item_id(5)}
        assert client.get("/v1/items/brand-new").json()["known"] is False
        client.close()

    @pytest.mark.slow
    def test_applies_without_a_model(self, tmp_path: Path) -> None:
        client = Client(Settings(data_dir=tmp_path))
        client.click("ada", "lamp", "cup")
        client.click("ben", "lamp")
        wait_until(lambda: shown(client, "nobody") == ["lamp", "cup"])
        put(client, "lamp", available=False)
        assert shown(client, "nobody") == ["cup"]
        client.click("ada", "pot")
        wait_until(lambda: "pot" in shown(client, "nobody"))
        assert set(shown(client, "nobody")) == {"cup", "pot"}
        client.close()


class TestWords:
    def test_updates_of_categories_and_titles_change_search_and_filters(self, client: Client) -> None:
        name = item_id(1)
        assert set(categories_of(1)) == {"cup"}
        assert put(client, name, categories=["lamp", "tea", "lamp"]).json()["categories"] == ["lamp", "tea"]
        assert shown(client, categories=["lamp"]) == [name]
        assert name not in shown(client, categories=["cup"])
        assert name in shown(client, categories=["tea"])
        put(client, name, categories=[])
        assert shown(client, categories=["lamp"]) == []
        put(client, name, title="Ærøskøbing 灯")
        found = client.recommend("nobody", k=ITEMS)["items"]
        assert {item["item_id"]: item.get("title") for item in found}[name] == "Ærøskøbing 灯"
        assert client.get("/v1/items", params={"query": "ærøskøbing"}).json()["items"][0]["item_id"] == name

    def test_absent_fields_stay_unchanged(self, client: Client) -> None:
        before = client.get(f"/v1/items/{item_id(2)}").json()
        assert put(client, item_id(2)).json() == before
        assert put(client, item_id(2), available=False).json() == before | {"available": False}
        assert put(client, item_id(2), title=None, categories=["x"]).json() == before | {
            "available": False,
            "categories": ["x"],
        }

    def test_a_cold_item_is_stored_and_not_recommended(self, client: Client) -> None:
        assert client.get("/v1/items/lamp").status_code == 404
        answer = client.post("/v1/items", json=[{"item_id": "lamp", "title": "Lamp"}, {"item_id": item_id(1)}])
        assert answer.json() == {"accepted": 2, "unknown_items": 1}
        assert client.get("/v1/items/lamp").json()["known"] is False
        assert client.get("/v1/items?query=LAMP").json()["items"][0]["item_id"] == "lamp"
        assert "lamp" not in shown(client)

    @pytest.mark.parametrize(
        ("bodies", "index", "field"),
        [
            ([{"item_id": "a"}, {"item_id": "b\nb"}], 1, "item_id"),
            ([{"item_id": "a"}, {"title": "b"}], 1, "item_id"),
            ([{"item_id": "a", "available": 1}], 0, "available"),
            ([{"item_id": "a", "title": "x" * 1025}], 0, "title"),
            ([{"item_id": "a", "title": "\ud800"}], 0, "title"),
            ([{"item_id": "a", "categories": "tea"}], 0, "categories"),
            ([{"item_id": "a", "categories": [""]}], 0, "categories.0"),
            ([{"item_id": "a", "colour": "red"}], 0, None),
            ([7], 0, None),
        ],
    )
    def test_one_invalid_item_refuses_the_request(
        self, shared_client: Client, bodies: list[object], index: int, field: str | None
    ) -> None:
        answer = shared_client.post(
            "/v1/items", content=json.dumps(bodies).encode(), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 422
        error = answer.json()["error"]
        assert (error["code"], error["details"][0]["index"], error["details"][0]["field"]) == (
            "invalid_items",
            index,
            field,
        )
        assert shared_client.get("/v1/items/a").status_code == 404

    def test_empty_and_too_long_requests_are_refused(self, shared_client: Client) -> None:
        for bodies in ([], [{"item_id": "a"}] * 1001):
            assert shared_client.post("/v1/items", json=bodies).json()["error"]["code"] == "invalid_items"
        wrong: tuple[Any, ...] = ([], {"item_id": "a"}, 7, {"available": "no"})
        for body in wrong:
            answer = shared_client.request("PUT", "/v1/items/a", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request")
        assert shared_client.request("PUT", "/v1/items/a%C2%85b", json={}).status_code == 422

    @pytest.mark.parametrize("name", ["popular", "trending"])
    def test_an_id_equal_to_a_route_is_refused(self, shared_client: Client, name: str) -> None:
        """GET could not address such an item."""
        for answer in (put(shared_client, name), shared_client.post("/v1/items", json={"item_id": name})):
            assert answer.status_code == 422
            assert "another id" in answer.json()["error"]["details"][0]["reason"]
        assert "items" in shared_client.get(f"/v1/items/{name}").json()
        event = shared_client.post("/v1/events", json={"user_id": "ann", "item_id": name})
        assert (event.status_code, event.json()["unknown_items"]) == (200, 1)

    def test_store_failures_return_503(self, client: Client) -> None:
        client.close_store()
        assert put(client, "a").status_code == 503
        assert client.post("/v1/items", json={"item_id": "a"}).status_code == 503


class TestImport:
    @pytest.fixture
    def url(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> str:
        """The URL by which the command reaches the service of this test."""

        def post(_self: httpx.Client, path: str, **options: Any) -> httpx.Response:
            return client.post(path, **options)

        monkeypatch.setattr(httpx.Client, "post", post)
        monkeypatch.setattr(httpx.Client, "get", lambda _self, path: client.get(path))
        return "http://service"

    def run(self, *arguments: object) -> int:
        return run_command("items", "import", *arguments)

    def test_imports_the_values_of_a_table(
        self, client: Client, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = client.get(f"/v1/items/{item_id(2)}").json()
        rows = [f'{item_id(1)},"Kettle, red",pots|red,FALSE', f"{item_id(2)},,,", "lamp,Lamp,,1"]
        table = "\n".join(["item_id,title,categories,available", *rows])
        (tmp_path / "items.csv.gz").write_bytes(gzip.compress(table.encode()))
        for _ in range(2):
            assert self.run(tmp_path / "items.csv.gz", "--url", url) == 0
            assert "3 items imported; 1 of them are in no model yet" in capsys.readouterr().out
        assert client.get(f"/v1/items/{item_id(1)}").json() == {
            "item_id": item_id(1),
            "title": "Kettle, red",
            "categories": ["pots", "red"],
            "available": False,
            "known": True,
            "properties": {},
        }
        assert client.get(f"/v1/items/{item_id(2)}").json() == before
        assert client.get("/v1/items/lamp").json()["title"] == "Lamp"

    @pytest.mark.parametrize(
        ("table", "says"),
        [
            ("item_id\tavailable\na\tmaybe\n", "line 2: available 'maybe' is neither yes nor no; write true or false"),
            ("item_id\na\na\n", "line 3: item_id 'a' appears twice, first in line 2"),
            ("title\na\n", "'item_id' is missing"),
            ("item_id\ttitle\na\t" + "x" * 2000 + "\n", "title String should have at most 1024 characters"),
        ],
    )
    def test_names_the_faults_of_a_table(
        self, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, says: str
    ) -> None:
        (tmp_path / "items.tsv").write_text(table)
        assert self.run(tmp_path / "items.tsv", "--url", url) == 1
        assert says in " ".join(capsys.readouterr().err.split())


def test_updates_leave_the_model_directory_unchanged(model_dir: Path, client: Client) -> None:
    put(client, item_id(1), title="Other", available=False)
    assert model_directory.load(model_dir).items.titles[1] != "Other"
