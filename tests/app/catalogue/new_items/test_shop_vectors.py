"""Item vectors of a shop: validation, storage, backups, and their precedence in assigning codes to cold items."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import polars as pl
import pytest
import torch

from app.jobs.import_items import read
from app.settings import Settings
from model.artifact import model_directory
from model.artifact.item_statistics import ItemStatistics
from model.content.content_map import learned_content
from model.content.text_features import Description
from model.data.interactions import DataError
from storage.items.vectors import MAX_NUMBERS, decode
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
from tests.app.support import finish_background_work, run_command
from tests.storage.redis.servers import RedisServer

NUMBERS = 12
SHOP_VECTORS = np.random.default_rng(5).normal(size=(ITEMS, NUMBERS))


@torch.inference_mode()
def write_shop(directory: Path) -> Path:
    """Write a model that has learned codes from vectors and titles; the vectors determine everything."""
    plain = model_directory.load(write_model(directory))
    targets = plain.model.item_vectors().numpy()
    vectors = targets @ np.random.default_rng(6).normal(size=(targets.shape[1], NUMBERS))
    SHOP_VECTORS[:] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    titles = [Description(title) for title in plain.items.titles]
    statistics = ItemStatistics(content=learned_content(targets, np.full(ITEMS, 1000), titles, vectors))
    model_directory.save(directory, plain.model, plain.config, plain.items, plain.metrics, statistics)
    return directory


@pytest.fixture(autouse=True)
def sampled_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    sample_soon(monkeypatch)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("models") / "seen")


@pytest.fixture(params=["sqlite", "redis"])
def client(request: pytest.FixtureRequest, shop: Path, tmp_path: Path, redis_server: RedisServer) -> Iterator[Client]:
    url = redis_server.url if request.param == "redis" else None
    client = Client(Settings(model_dir=shop, data_dir=tmp_path, redis_url=url))
    yield client
    client.close()


def stored(client: Client, *item_ids: str) -> dict[str, bytes]:
    vectors = client.service.store.vectors
    found: dict[str, bytes] = client.runner.run(vectors.of_items(client.settings.tenant, item_ids))
    return found


def refused(client: Client, body: Any, name: str = NEW) -> dict[str, Any]:
    answer = client.request("PUT", f"/v1/items/{name}", json=body)
    assert answer.status_code == 422
    (detail,) = answer.json()["error"]["details"]
    return dict(detail)


def test_an_item_is_recommended_by_its_vector_alone(client: Client) -> None:
    client.click("u0", "item-1", "item-5")
    put(client, vector=SHOP_VECTORS[7].tolist())
    assert everything(client)[NEW]["cold"] is True
    client.click("u0", NEW)
    assert client.get("/v1/users/u0").json()["last_item_id"] == NEW
    assert_states_are_folds(client, ["u0"])


def test_items_with_similar_vectors_get_similar_codes(client: Client) -> None:
    trained = client.service.switcher.current.artifact
    twins = [{"item_id": f"twin-{row}", "vector": (3 * SHOP_VECTORS[row]).tolist()} for row in range(ITEMS)]
    assert client.post("/v1/items", json=twins).status_code == 200
    finish_background_work(client)
    finish_background_work(client)
    cold_items = client.service.switcher.current.cold_items
    assert nearness(trained, [cold_items[f"twin-{row}"].target for row in range(ITEMS)], [*range(ITEMS)]) > 0.2


def test_codes_prefer_events_to_vectors_to_titles(client: Client) -> None:
    put(client, title="Green thing")
    by_title = codes_of(client)
    put(client, vector=SHOP_VECTORS[3].tolist())
    by_vector = codes_of(client)
    assert by_vector != by_title
    put(client, title="Black thing")
    assert codes_of(client) == by_vector
    put(client, vector=None, title="Green thing")
    assert codes_of(client) == by_title
    put(client, vector=SHOP_VECTORS[3].tolist())
    introduce(client)
    assert codes_of(client).evidence == 10
    put(client, vector=SHOP_VECTORS[9].tolist())
    assert codes_of(client).evidence == 10


def test_vectors_are_stored_normalized_and_removed_by_null(client: Client) -> None:
    put(client, vector=[3, 4.0], title="Tea")
    np.testing.assert_allclose(decode([stored(client, NEW)[NEW]]), [[0.6, 0.8]], atol=1e-3)
    put(client, available=False)
    assert stored(client, NEW).keys() == {NEW}
    put(client, vector=None)
    assert stored(client, NEW) == {}
    put(client, vector=[1.0] * MAX_NUMBERS)
    assert len(stored(client, NEW)[NEW]) == 2 * MAX_NUMBERS
    assert "vector" not in client.get(f"/v1/items/{NEW}").json()


@pytest.mark.parametrize(
    "vector",
    [[], [1.0] * (MAX_NUMBERS + 1), [0, 0.0], ["1"], [True], [[1.0]], "1,2", {"0": 1}, 3],
    ids=["empty", "too long", "of nothing", "text", "boolean", "nested", "a text", "an object", "a number"],
)
def test_invalid_vectors_are_refused(client: Client, vector: Any) -> None:
    assert refused(client, {"vector": vector, "title": "Tea"})["field"].startswith("vector")
    assert client.get(f"/v1/items/{NEW}").status_code == 404


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999"])
def test_numbers_that_are_not_finite_are_refused(client: Client, number: bytes) -> None:
    body = b'{"vector": [1.0, %s]}' % number
    headers = {"content-type": "application/json"}
    assert client.request("PUT", f"/v1/items/{NEW}", content=body, headers=headers).status_code in (400, 422)
    assert stored(client, NEW) == {}


def test_vectors_of_another_length_are_refused_with_a_remedy(client: Client) -> None:
    put(client, vector=[1.0, 2.0])
    detail = refused(client, {"vector": [1.0, 2.0, 3.0], "title": "Not noted"}, "other")
    assert detail["field"] == "vector"
    assert "have 2 numbers each, but this one has 3" in detail["reason"]
    assert "'lisarec items drop-vectors'" in detail["reason"]
    assert client.get("/v1/items/other").status_code == 404
    several = [{"item_id": "other", "vector": [2.0, 1.0]}, {"item_id": "third", "vector": [1.0]}]
    answer = client.post("/v1/items", json=several)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_items")
    assert stored(client, "other", "third") == {}
    put(client, vector=None)
    put(client, vector=[1.0, 2.0, 3.0])
    assert len(stored(client, NEW)[NEW]) == 6


def test_dropping_all_vectors_allows_another_length(client: Client) -> None:
    items = [NEW, "other", "item-1"]
    client.post("/v1/items", json=[{"item_id": one, "title": one, "vector": [1.0, 2.0]} for one in items])
    assert stored(client, *items).keys() == {*items}
    url, directory = client.settings.redis_url, str(client.settings.data_dir)
    where = ["--data-dir", directory] if url is None else ["--redis-url", url]
    for _ in range(2):
        assert run_command("items", "drop-vectors", *where) == 0
    assert stored(client, *items) == {}
    assert client.get("/v1/items/other").json()["title"] == "other"
    put(client, vector=[1.0, 2.0, 3.0])
    assert len(stored(client, NEW)[NEW]) == 6


def test_vectors_of_another_length_than_the_model_reads_are_ignored(client: Client) -> None:
    """The title counts until the next training."""
    client.click("u0", "item-1")
    put(client, vector=[1.0] * (NUMBERS + 1))
    assert NEW not in everything(client)
    put(client, title="Green thing")
    assert NEW in everything(client)


class TestImport:
    """Tables with a column of vectors."""

    def test_parquet_and_text(self, tmp_path: Path) -> None:
        rows = {"item_id": ["tea", "cup", "pot"], "vector": [[3.0, 4.0], None, [0.0, -2.0]], "brand": ["a", None, "b"]}
        pl.DataFrame(rows).write_parquet(tmp_path / "items.parquet")
        (tmp_path / "items.tsv").write_text("item_id\tvector\tbrand\ntea\t[3, 4.0]\ta\ncup\t\t\npot\t[0,-2]\tb\n")
        for name in ("items.parquet", "items.tsv"):
            tea, cup, pot = read(tmp_path / name, {})
            assert tea.pop("vector") == pytest.approx([0.6, 0.8], abs=1e-3)
            assert pot.pop("vector") == pytest.approx([0, -1], abs=1e-3)
            assert (tea, cup, pot) == (
                {"item_id": "tea", "properties": {"brand": "a"}},
                {"item_id": "cup"},
                {"item_id": "pot", "properties": {"brand": "b"}},
            )

    @pytest.mark.parametrize(
        ("cell", "reason"),
        [
            ("1;2", "is not a JSON array"),
            ("[]", "does not have 1 to 1,024 numbers"),
            ("[1]", "does not have 2 numbers like the first one"),
            ("[0, 0]", "at least one of them not 0"),
            ("[1, null]", "finite numbers"),
            ('["a", "b"]', "vector"),
        ],
    )
    def test_names_invalid_vectors(self, tmp_path: Path, cell: str, reason: str) -> None:
        (tmp_path / "items.tsv").write_text(f"item_id\tvector\ntea\t[1, 2]\ncup\t{cell}\n")
        with pytest.raises(DataError, match=reason):
            read(tmp_path / "items.tsv", {})

    def test_the_command(self, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(httpx.Client, "post", lambda _self, path, **kept: client.request("POST", path, **kept))
        monkeypatch.setattr(httpx.Client, "get", lambda _self, path, **kept: client.request("GET", path, **kept))
        rows = {"item_id": [item_id(0), NEW], "vector": SHOP_VECTORS[:2].tolist()}
        pl.DataFrame(rows).write_parquet(tmp_path / "items.parquet")
        assert run_command("items", "import", tmp_path / "items.parquet", "--url", "http://service") == 0
        found = decode([stored(client, NEW)[NEW]])[0]
        np.testing.assert_allclose(found, SHOP_VECTORS[1], atol=2e-3)
