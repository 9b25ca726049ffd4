"""Models with learned codes behind the real service on both stores: served scores equal offline scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from app.settings import Settings
from model.artifact import model_directory
from model.artifact.item_table import ItemTable
from model.config import MECHANISMS, SERVED_MECHANISMS, DataCard, MechanismRecipe, ModelConfig
from model.data.interactions import Histories
from model.lisa.histogram import history_histogram
from model.mechanisms.export import served_model, served_recipe
from model.mechanisms.network import MechanismNetwork
from model.mechanisms.train import mechanism_scorer
from tests.app.conftest import Client, item_id
from tests.app.support import finish_background_work
from tests.storage.redis.servers import RedisServer

ITEMS = 40
WALK = [3, 17, 3, 8, 39, 0, 8]


def network(name: str) -> MechanismNetwork:
    torch.manual_seed(1)
    shape = MECHANISMS[name].model_copy(update={"width": 16, "codebooks": 3, "target_codebooks": 4, "codewords": 9})
    made = MechanismNetwork(shape, ITEMS).eval()
    with torch.no_grad():
        for weights in made.parameters():
            weights.add_(0.3 * torch.randn_like(weights))
    return made


@pytest.fixture(params=sorted(SERVED_MECHANISMS), scope="module")
def trained(request: pytest.FixtureRequest) -> MechanismNetwork:
    return network(request.param)


@pytest.fixture(params=["sqlite", "redis"])
def service(request: pytest.FixtureRequest, trained: MechanismNetwork, tmp_path: Path) -> Iterator[Client]:
    names = [item_id(row) for row in range(ITEMS)]
    items = ItemTable(names, names, [()] * ITEMS, np.arange(ITEMS))
    recipe = served_recipe(MechanismRecipe(model=trained.config, data=DataCard(train_on="all")))
    model_directory.save(tmp_path / "model", served_model(trained), recipe, items, {})
    server: RedisServer | None = request.getfixturevalue("redis_server") if request.param == "redis" else None
    redis_url = None if server is None else server.url
    client = Client(Settings(model_dir=tmp_path / "model", data_dir=tmp_path / "data", redis_url=redis_url))
    yield client
    client.close()


def test_served_scores_equal_offline_scores(service: Client, trained: MechanismNetwork) -> None:
    service.click("ada", *map(item_id, WALK))
    of_user = service.recommend("ada", k=ITEMS, exclude_seen="none")
    history = {"history": [item_id(row) for row in WALK], "k": ITEMS, "exclude_seen": "none"}
    of_history = service.post("/v1/recommendations", json=history).json()
    histories = Histories(np.array(WALK, np.int32), np.ones(len(WALK), np.float32), np.array([0, len(WALK)]))
    expected = mechanism_scorer(trained)(histories)[0]
    for answer in (of_user, of_history):
        assert answer["source"] == "personalised"
        scores = {item["item_id"]: item["score"] for item in answer["items"]}
        np.testing.assert_allclose([scores[item_id(row)] for row in range(ITEMS)], expected, rtol=1e-3, atol=1e-3)


def test_states_equal_the_fold_of_the_log(service: Client) -> None:
    model = model_directory.load(service.model_dir)
    shape = model.config.model

    def assert_state_is_of(walk: list[int]) -> None:
        state = service.get("/v1/users/ada").json()
        expected = history_histogram(model.history_counts[walk], shape.decay_rates, shape.history_codewords)
        np.testing.assert_allclose(state["histogram"], expected, rtol=1e-4, atol=1e-6)
        assert state["event_count"] == len(walk)

    events = [{"event_id": f"e{n}", "user_id": "ada", "item_id": item_id(row)} for n, row in enumerate(WALK)]
    assert service.post("/v1/events", json=[*events, *events[:3]]).json()["duplicates"] == 3
    assert_state_is_of(WALK)
    assert service.request("DELETE", "/v1/users/ada/events/e2").json()["changed"]
    assert_state_is_of(WALK[:2] + WALK[3:])


def test_explanations_and_similar_items_work(service: Client) -> None:
    service.click("ada", *map(item_id, WALK))
    explained = service.post("/v1/recommendations", json={"user_id": "ada", "explain": True, "k": 5}).json()
    for item in explained["items"]:
        parts = item["explanation"]
        total = sum(word["adds"] for word in parts["codewords"]) + parts["other_codewords"] + parts["bias"]
        assert item["score"] == pytest.approx(total, rel=1e-4, abs=1e-4)
    similar = service.get(f"/v1/items/{item_id(3)}/similar", params={"k": 5}).json()
    assert len(similar["items"]) == 5


def test_a_new_item_is_recommended_by_its_categories(service: Client) -> None:
    service.click("ada", *map(item_id, WALK))
    names = [*map(item_id, range(5)), "new"]
    service.post("/v1/items", json=[{"item_id": name, "categories": ["tea"]} for name in names])
    finish_background_work(service)
    finish_background_work(service)
    items = service.recommend("ada", k=ITEMS + 1, exclude_seen="none")["items"]
    assert [item["item_id"] for item in items if "cold" in item] == ["new"]


def test_a_cold_item_counts_by_its_codes(trained: MechanismNetwork) -> None:
    model = served_model(trained)
    history, target = np.array([1, 0, 8], np.uint8), model.target_codes[5].numpy()
    wider = model.with_cold_items(history[None], target[None], np.array([0.25]))
    if wider.shares is not None:
        assert wider.shares[ITEMS].argmax(dim=-1).tolist() == history.tolist()
        assert wider.shares[ITEMS].sum() == len(history)
    assert len(wider.history_codes) == len(wider.bias) == ITEMS + 1
    histogram = torch.rand(1, *model.tables().match.shape[:3])
    with torch.inference_mode():
        asked = torch.tensor([5]), torch.tensor([[5]])
        assert torch.equal(wider.read(histogram, *asked), model.read(histogram, *asked))
        assert wider.read(histogram, torch.tensor([ITEMS]), torch.tensor([[ITEMS]])).isfinite().all()


def test_soft_codes_are_read_by_their_block() -> None:
    with pytest.raises(ValidationError, match="post-norm block alone"):
        ModelConfig(soft=True)
