"""Cold items: their codes, their recommendations, and the states of their users."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from app.events import cold_item_learner
from app.serving.served_generation import generation_of
from app.serving.store_factory import open_store
from app.settings import Settings
from model.artifact import model_directory
from model.cold_items import MAX_SIMILAR_ITEMS
from storage.maintenance.backup import backup, restore
from tests.app.catalogue.new_items.cold_items import (
    NEW,
    assert_states_are_folds,
    everything,
    introduce,
    put,
    sample_soon,
    state_of,
)
from tests.app.conftest import CATEGORIES, ITEMS, Client, categories_of, item_id, write_model
from tests.app.support import finish_background_work
from tests.storage.redis.servers import RedisServer


@pytest.fixture(autouse=True)
def sampled_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    sample_soon(monkeypatch)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with two generations."""
    write_model(tmp_path / "models" / "first")
    write_model(tmp_path / "models" / "second", seed=8)
    return tmp_path / "models"


def started(data_dir: Path, models: Path) -> Client:
    return Client(Settings(model_dir=models / "first", models_dir=models, data_dir=data_dir))


def test_a_cold_item_is_recommended_after_users_chose_it(client: Client) -> None:
    introduce(client, users=8)
    assert NEW not in everything(client)
    assert client.get("/v1/users/u0").json()["last_item_id"] != NEW
    introduce(client, users=5, first=8)

    found = everything(client)
    assert len(found) == ITEMS + 1
    assert found[NEW] == {"item_id": NEW, "score": found[NEW]["score"], "cold": True}
    assert math.isfinite(found[NEW]["score"])
    assert [item for item in found.values() if "cold" in item] == [found[NEW]]
    history = {"history": ["item-1", NEW], "k": 99, "exclude_seen": "none"}
    assert NEW in [item["item_id"] for item in client.post("/v1/recommendations", json=history).json()["items"]]
    ranked = {"user_id": "u0", "candidates": [NEW, "item-1"], "exclude_seen": "none"}
    assert len(client.post("/v1/recommendations", json=ranked).json()["items"]) == 2

    answer = client.post("/v1/events", json={"user_id": "u0", "item_id": NEW, "event_id": "known-now"}).json()
    assert answer == {"accepted": 1, "duplicates": 0, "unknown_items": 0, "unknown_types": 0, "refused": 0}
    user = client.get("/v1/users/u0").json()
    assert (user["last_item_id"], user["recent_items"][0]) == (NEW, NEW)
    assert NEW not in everything(client, exclude_seen="recent")
    assert NEW not in everything(client, exclude_seen="all")
    exported = client.get("/v1/users/u0/events").json()["events"]
    assert {event["type"] for event in exported} == {"click"}
    assert client.log("u0")[-1].codes
    assert_states_are_folds(client, ["u0", "u1", "u12"])


def test_repeated_events_of_one_user_are_not_enough(client: Client) -> None:
    """Evidence counts distinct users, however often each chooses the item."""
    introduce(client, users=9)
    for turn in range(60):
        client.click("u0", item_id(turn % 7), NEW, NEW)
    finish_background_work(client)
    assert NEW not in everything(client)
    assert client.service.switcher.current.cold_items == {}
    introduce(client, users=1, first=9)
    assert everything(client)[NEW]["cold"] is True
    assert client.service.switcher.current.cold_items[NEW].evidence == 10


def test_updates_of_a_cold_item_are_applied(client: Client) -> None:
    introduce(client)
    posted = client.request("PUT", f"/v1/items/{NEW}", json={"title": "New kettle", "categories": ["kettles"]}).json()
    assert posted["known"] is False
    found = everything(client, categories="kettles")
    assert [(item["item_id"], item["title"], item["cold"]) for item in found.values()] == [(NEW, "New kettle", True)]
    assert [item["item_id"] for item in client.get("/v1/items?query=new kettle").json()["items"]] == [NEW]
    assert client.request("PUT", f"/v1/items/{NEW}", json={"available": False}).status_code == 200
    assert NEW not in everything(client)


def test_new_codes_do_not_make_requests_rebuild_similarities(client: Client) -> None:
    before = client.service.switcher.current.engine
    put(client, categories=["tea"])
    assert not client.service.switcher.current.engine.has_similarity  # nobody has needed them
    client.get("/v1/items/item-1/similar")
    put(client, "new-2", categories=["cup"])
    after = client.service.switcher.current.engine
    assert after is not before
    assert after.has_similarity
    found = client.get("/v1/items/item-1/similar", params={"k": 99}).json()["items"]
    assert {NEW, "new-2"} <= {item["item_id"] for item in found}


class TestByCategories:
    """Cold items that no user has chosen yet."""

    def test_codes_come_from_typical_items_of_the_categories(self, client: Client) -> None:
        client.click("u0", "item-1", "item-5")
        shared = {row: len({"tea", "cup"}.intersection(categories_of(row))) for row in range(ITEMS)}
        alike = [row for row in range(ITEMS) if shared[row] == 2]
        assert 1 < len(alike) <= MAX_SIMILAR_ITEMS
        put(client, title="New tea cup", categories=["tea", "cup"])

        found = everything(client)
        assert found[NEW] == {"item_id": NEW, "score": found[NEW]["score"], "title": "New tea cup", "cold": True}
        assert NEW in everything(client, categories="cup")
        assert NEW not in everything(client, categories_none="cup")
        (codes,) = client.service.switcher.current.cold_items.values()
        trained = client.service.switcher.current.artifact
        for own, learned in ((codes.history, trained.history_codes), (codes.target, trained.target_codes)):
            for word, voted in zip(own, learned[alike].T.tolist(), strict=True):
                assert voted.count(word) == max(map(voted.count, voted))
        assert math.isfinite(codes.bias)

        client.click("u0", NEW)
        assert client.get("/v1/users/u0").json()["last_item_id"] == NEW
        assert client.get(f"/v1/items/{NEW}/similar").json()["because"] == {"item_id": NEW, "title": "New tea cup"}
        assert_states_are_folds(client, ["u0"])

    def test_codes_made_from_events_replace_those_of_its_categories(self, client: Client) -> None:
        put(client, categories=["tea"])
        assert client.service.switcher.current.cold_items[NEW].evidence == 0
        introduce(client)
        assert client.service.switcher.current.cold_items[NEW].evidence == 10
        put(client, categories=["cup"])
        assert client.service.switcher.current.cold_items[NEW].evidence == 10

    def test_categories_determine_codes_and_unknown_ones_give_none(self, client: Client) -> None:
        client.click("u0", "item-1")
        put(client, categories=["kettles"])
        assert NEW not in everything(client)
        put(client, categories=["kettles", "tea"])
        first = client.service.switcher.current.cold_items[NEW]
        put(client, categories=["pot"])
        other = client.service.switcher.current.cold_items[NEW]
        assert first.target != other.target
        put(client, "item-1", title="Learned")
        put(client, NEW, title="Without another word on categories")
        assert [*client.service.switcher.current.cold_items.values()] == [other]

    def test_every_generation_assigns_codes_and_a_restart_keeps_them(self, tmp_path: Path, models: Path) -> None:
        client = started(tmp_path, models)
        client.click("u0", "item-1")
        put(client, categories=["tea"])
        client.post("/v1/admin/generations/second/activate")
        finish_background_work(client)
        finish_background_work(client)
        before = everything(client)
        assert before[NEW]["cold"] is True
        client.click("u1", "item-2", NEW)
        assert_states_are_folds(client, ["u0", "u1"])
        client.close()
        client = started(tmp_path, models)
        client.post("/v1/admin/generations/second/activate")
        try:
            finish_background_work(client)
            assert everything(client) == before
        finally:
            client.close()

    def test_replicas_agree_on_codes(
        self, start: Callable[..., Client], tmp_path: Path, redis_server: RedisServer
    ) -> None:
        one, other = (start(tmp_path, redis_url=redis_server.url) for _ in range(2))
        try:
            one.click("u0", "item-1")
            assert one.request("PUT", f"/v1/items/{NEW}", json={"categories": ["tea"]}).status_code == 200
            for client in (one, other, one, other):  # both may give it codes
                finish_background_work(client)
            assert NEW in everything(one)
            assert everything(other) == everything(one)
            other.click("u0", NEW)
            for client in (one, other):
                assert_states_are_folds(client, ["u0"])
            codes = client.service.switcher.current.cold_items
            finish_background_work(one)
            finish_background_work(other)
            assert client.service.switcher.current.cold_items is codes  # nothing is made again for what was said twice
        finally:
            one.close()
            other.close()

    def test_new_items_of_one_category_get_different_scores(self, client: Client) -> None:
        names = [f"new-{n}" for n in range(50)]
        client.post("/v1/items", json=[{"item_id": name, "categories": list(CATEGORIES)} for name in names])
        client.post(
            "/v1/items", json=[{"item_id": name, "categories": [CATEGORIES[0]]} for name in map(item_id, range(ITEMS))]
        )
        put(client, categories=[CATEGORIES[0]])
        client.click("u0", "item-1")
        found = everything(client, k=ITEMS + 51)
        assert found.keys() >= set(names)
        assert len({found[name]["score"] for name in names}) > 10


def test_codes_survive_a_restart_and_belong_to_a_generation(tmp_path: Path, models: Path) -> None:
    client = started(tmp_path, models)
    introduce(client)
    client.click("u0", NEW)
    before = everything(client)
    client.close()

    client = started(tmp_path, models)
    try:
        assert everything(client) == before
        client.post("/v1/admin/generations/second/activate")
        assert NEW not in everything(client)
        assert client.post("/v1/events", json={"user_id": "u0", "item_id": NEW}).json()["unknown_items"] == 1
        assert_states_are_folds(client, ["u0", "u1"])
        client.post("/v1/admin/generations/first/activate")
        finish_background_work(client)
        assert NEW in everything(client)
        assert_states_are_folds(client, ["u0", "u1"])
    finally:
        client.close()


def test_replicas_that_learn_of_codes_at_different_times_fold_alike(
    start: Callable[..., Client], tmp_path: Path, redis_server: RedisServer
) -> None:
    """One that has not heard of the codes yet answers all the same; states do not depend on who folded what, or when;
    a state that is lost is the same when it is folded anew, also by who has never heard of the codes.
    """
    settings = {"redis_url": redis_server.url}
    one, other = start(tmp_path, **settings), start(tmp_path, **settings)
    follow, other.service.switcher.refresh_items = other.service.switcher.refresh_items, _nothing
    users = ["u0", "u1", "u2", "solo"]
    try:
        introduce(one)
        one.click("solo", NEW)  # whose only step is one that the other cannot make anything of
        assert NEW in everything(one)
        assert NEW not in everything(other)
        assert other.recommend("solo")["source"] == "popular"
        assert other.get("/v1/users/solo").json()["last_item_id"] is None
        other.click("u0", NEW, "item-3")  # does not step
        one.click("u0", NEW, "item-4")  # steps
        other.click("u1", "item-5")
        for client in (one, other):
            assert_states_are_folds(client, users)
        before = [state_of(one, user_id) for user_id in users]
        one.runner.run(one.service.store.generations.drop(one.service.switcher.current.named.tag))
        assert [state_of(other, user_id) for user_id in users] == before

        other.service.switcher.refresh_items = follow
        finish_background_work(other)
        assert everything(other) == everything(one)
        assert other.recommend("solo")["source"] != "popular"
    finally:
        one.close()
        other.close()


async def _nothing() -> None: ...


def test_a_backup_contains_the_codes(client: Client, start: Callable[..., Client], tmp_path: Path) -> None:
    introduce(client)
    client.click("u0", NEW)
    before = everything(client)
    states = [state_of(client, "u0"), state_of(client, "u3")]
    generation = generation_of(model_directory.load(client.model_dir))

    async def moved() -> None:
        await backup(client.service.store, tmp_path / "backup")
        store = await open_store(client.settings.model_copy(update={"data_dir": tmp_path / "restored"}), generation)
        await restore(store, tmp_path / "backup")
        await store.close()

    client.runner.run(moved())
    restored = start(tmp_path / "restored")
    try:
        assert everything(restored) == before
        assert [state_of(restored, "u0"), state_of(restored, "u3")] == states
    finally:
        restored.close()


def test_codes_are_replaced_only_by_codes_from_more_events(client: Client) -> None:
    introduce(client, users=20)
    serving = client.service.switcher.current
    assert serving.cold_items[NEW].evidence == 10
    introduce(client, users=20, first=20)
    assert client.service.switcher.current.cold_items[NEW].evidence == 30
    fresh = cold_item_learner.ColdItemLearner(
        serving.artifact,
        serving.generation,
        serving.context.item_codes,
        serving.context.engine_threads.light,
        client.service.store,
        client.settings.tenant,
        serving.context.tasks,
    )
    now = client.service.switcher.current
    fresh.set_catalogue(now.catalogue, now.engine, now.cold_items)
    client.service.signals.learners = [fresh]  # as after a restart
    introduce(client, users=20, first=40)
    assert client.service.switcher.current.cold_items[NEW].evidence == 30
