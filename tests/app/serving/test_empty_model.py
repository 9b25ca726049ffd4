"""A shop without a model: events are logged, popular items recommended, and the first model takes over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.http.auth.keys import add, make
from app.main import create_app
from app.serving import empty_model, switcher
from app.serving.model_registry import NoSuchModel
from app.serving.served_generation import generation_of
from app.settings import Settings
from model.artifact import model_directory
from tests.app.conftest import Client, item_id, write_model
from tests.storage.oracles.naive_fold import assert_histogram_is, fold
from tests.storage.redis.servers import RedisServer
from tests.waiting import wait_until


@pytest.fixture(params=["sqlite", "redis"])
def begin(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Client]]:
    """Start a service without a model on the store of this test."""
    monkeypatch.setattr(switcher, "REBUILD_EVERY_S", 0.05)
    clients: list[Client] = []
    server: RedisServer | None = request.getfixturevalue("redis_server") if request.param == "redis" else None

    def begin_client(**settings: Any) -> Client:
        store = {"data_dir": tmp_path / "state"} if server is None else {"redis_url": server.url}
        client = Client(Settings(models_dir=tmp_path / "models", **store, **settings))
        clients.append(client)
        return client

    yield begin_client
    for client in clients:
        client.close()


def popular(client: Client, user_id: str = "nobody", **params: Any) -> list[tuple[str, float]]:
    answer = client.recommend(user_id, **params)
    assert (answer["source"], answer["generation"]) == ("popular", "none")
    return [(item["item_id"], item["score"]) for item in answer["items"]]


def test_popular_items_are_counted_from_live_events_in_every_process(begin: Callable[..., Client]) -> None:
    first, second = begin(), begin()
    for client in (first, second):
        assert client.get("/readyz").status_code == 200
        assert popular(client) == []
        model = client.get("/v1/model").json()
        assert (model["generation"], model["tag"], model["items"]) == ("none", empty_model.TAG.hex(), 0)
    first.click("ada", "tea", "cup", "tea", "pot")
    second.click("bea", "tea", "pot", "pot", "pot")
    second.click("cleo", "tea")
    counts = [("tea", 3), ("pot", 2), ("cup", 1)]
    wait_until(lambda: all(popular(client) == counts for client in (first, second)))
    for client in (first, second):
        assert [item["item_id"] for item in client.get("/v1/items/popular").json()["items"]] == ["tea", "pot", "cup"]
    assert popular(begin()) == counts, "right after a start"
    assert popular(first, exclude=["tea"], k=1) == counts[1:2]
    assert popular(first, "bea", exclude_seen="all") == counts[2:]
    assert popular(first, categories=["tea"]) == []


def test_the_catalogue_is_rebuilt_only_if_counts_change(begin: Callable[..., Client]) -> None:
    client = begin()
    client.click("ada", "tea")
    client.request("PUT", "/v1/items/tea", json={"title": "Green tea"})
    wait_until(lambda: popular(client) == [("tea", 1)])
    following = client.service.switcher
    catalogue, compared_at_s = following.current.catalogue, following.rebuild_at_s
    wait_until(lambda: popular(client) and following.rebuild_at_s > compared_at_s)
    assert following.current.catalogue is catalogue
    client.click("bea", "tea")
    wait_until(lambda: popular(client) == [("tea", 2)])
    assert client.get("/v1/items/tea").json()["title"] == "Green tea"


def test_every_call_works_without_a_model(begin: Callable[..., Client]) -> None:
    client = begin()
    client.click("ada", "tea", "cup")
    wait_until(lambda: len(popular(client)) == 2)
    state = client.get("/v1/users/ada").json()
    assert (state["generation"], state["event_count"], state["last_item_id"]) == ("none", 2, None)
    assert len(client.get("/v1/users/ada/events").json()["events"]) == 2
    for body, found in (
        ({"history": ["tea"]}, ["cup"]),
        ({"history": ["tea"], "exclude_seen": "none"}, ["cup", "tea"]),
        ({"history": ["x"], "candidates": ["tea", "y"]}, ["tea"]),
        ({"user_id": "ada", "candidates": ["tea"]}, ["tea"]),
    ):
        answer = client.post("/v1/recommendations", json=body).json()
        assert (answer["source"], [item["item_id"] for item in answer["items"]]) == ("popular", found)
    assert [item["item_id"] for item in client.get("/v1/items?query=cu").json()["items"]] == ["cup"]
    assert client.post("/v1/users/bea/merge", json={"from": "ada"}).json()["changed"]
    assert client.request("DELETE", "/v1/users/bea/events/x").status_code == 404
    assert client.request("DELETE", "/v1/users/bea").status_code == 202
    wait_until(lambda: popular(client) == [])


def test_the_first_model_takes_over_in_every_process(begin: Callable[..., Client], tmp_path: Path) -> None:
    clients = [begin(), begin()]
    clients[0].click("ada", *(item_id(row) for row in range(5)))
    directory = write_model(tmp_path / "models" / "first")
    assert clients[0].post("/v1/admin/generations/first/activate").json()["previous"] == "none"
    wait_until(lambda: all(client.recommend("ada")["generation"] == "first" for client in clients))
    for client in clients:
        assert client.recommend("ada")["source"] == "personalised"
    generation, runner = generation_of(model_directory.load(directory)), clients[1].runner
    log = [entry.record for entry in runner.run(clients[1].service.store.events("main", "ada"))]
    assert_histogram_is(clients[1].get("/v1/users/ada").json()["histogram"], fold(generation, log).histogram())
    assert begin().recommend("ada")["source"] == "personalised"


def test_popular_items_stay_unchanged_while_the_store_fails(begin: Callable[..., Client]) -> None:
    client = begin()
    client.click("ada", "tea")
    wait_until(lambda: popular(client) == [("tea", 1)])
    client.close_store()
    for _ in range(20):
        assert popular(client) == [("tea", 1)]
        time.sleep(0.01)
    assert client.get("/readyz").status_code == 200


def test_a_model_cannot_be_named_none(begin: Callable[..., Client], tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "none")
    answer = begin().post("/v1/admin/generations/none/activate")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


class TestAmongSeveralTenants:
    """A tenant with a missing or broken model starts without one, and the others are served."""

    @pytest.fixture
    def places(self, tmp_path: Path) -> dict[str, Path]:
        return {tenant: tmp_path / tenant / "first" for tenant in ("books", "wine", "shoes")}

    @pytest.fixture
    def begin_all(
        self, begin: Callable[..., Client], places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[[], Client]:
        monkeypatch.setattr(switcher, "RETRY_AFTER_S", 0.05)
        keys = tmp_path / "keys"
        for tenant in ("main", *places):
            add(keys, make(tenant, ["recs:read"])[1])
        return lambda: begin(tenants=places, keys_file=keys)

    def test_a_tenant_with_a_broken_model_does_not_stop_the_others(
        self, begin_all: Callable[[], Client], places: dict[str, Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        write_model(places["books"])
        write_model(places["shoes"])
        weights = places["shoes"] / model_directory.WEIGHTS
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-1])
        with caplog.at_level(logging.INFO):
            client = begin_all()
        assert served(client) == {"main": "none", "books": "first", "wine": "none", "shoes": "none"}
        assert client.get("/readyz").status_code == 200
        levels = {one.levelname: one.getMessage() for one in caplog.records if "without a model" in one.getMessage()}
        assert levels["WARNING"].startswith("tenant wine ")
        assert levels["ERROR"].startswith("tenant shoes ")
        failures = counted(client, "failed")
        wait_until(lambda: counted(client, "failed") > failures)
        weights.write_bytes(whole)
        wait_until(lambda: served(client)["shoes"] == "first")
        failures = counted(client, "failed")
        write_model(places["wine"])
        wait_until(lambda: served(client)["wine"] == "first")
        assert counted(client, "failed") == failures, "a model that is not trained yet is no failure"

    def test_the_active_model_is_served_if_the_configured_one_is_missing(
        self, begin_all: Callable[[], Client], places: dict[str, Path]
    ) -> None:
        client = begin_all()
        write_model(places["wine"])
        write_model(places["wine"].with_name("june"), seed=8)
        client.runner.run(client.services.by_tenant["wine"].switcher.activate("june"))
        assert served(client)["wine"] == "june"
        places["wine"].rename(places["wine"].with_name("old"))
        assert served(begin_all())["wine"] == "june"

    def test_a_single_tenant_requires_its_model(self, tmp_path: Path) -> None:
        with pytest.raises(NoSuchModel, match="lisarec train"):
            create_app(Settings(model_dir=tmp_path / "missing", data_dir=tmp_path / "state"))


def served(client: Client) -> dict[str, str]:
    assert client.get("/healthz").status_code == 200  # lets the app's event loop run
    return {tenant: service.served_model.generation for tenant, service in client.services.by_tenant.items()}


def counted(client: Client, outcome: str) -> float:
    assert client.get("/healthz").status_code == 200
    lines = client.services.metrics.exposition().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith(f'lisarec_switches_total{{outcome="{outcome}"')
    )
