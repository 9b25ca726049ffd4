"""Models at s3://: complete and as published or not at all, and served on while the store is away."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.serving import switcher
from app.serving.bucket_models import BucketModels
from app.serving.model_registry import NoSuchModel
from app.settings import Settings
from benchmarks.storage.s3_server import S3Server
from model.artifact import model_directory
from model.artifact.model_directory import MANIFEST, WEIGHTS, ArtifactError
from storage.folders.place import ObjectUrl
from tests.app.conftest import Client, item_id, write_model
from tests.waiting import wait_until


def publish(url: str, cache: Path, *names: str) -> BucketModels:
    """Publish a different small model under each name."""
    models = BucketModels(ObjectUrl(url), cache)
    for seed, name in enumerate(names):
        write_model(models.work / name, seed)
        models.publish(name)
    return models


@pytest.fixture
def models(s3: Callable[[], str], tmp_path: Path) -> BucketModels:
    """The models `may` and `june`."""
    return publish(s3(), tmp_path / "cache", "may", "june")


def copies(models: BucketModels) -> list[Path]:
    """Local copies of complete models."""
    return [path for path in models.work.parents[1].glob("models/*/*/*") if (path / MANIFEST).exists()]


class TestCopies:
    def test_a_model_equals_the_published_one(self, models: BucketModels) -> None:
        assert models.names() == ["june", "may"]
        for name in models.names():
            made, loaded = model_directory.load(models.work / name), models.load(name)
            assert (loaded.name, loaded.tag) == (name, made.tag)
        with pytest.raises(NoSuchModel, match="existing models: june, may"):
            models.load("july")

    def test_an_incomplete_model_is_not_found(self, models: BucketModels) -> None:
        models.folder.remove(f"may/{MANIFEST}")
        assert models.names() == ["june"]
        with pytest.raises(NoSuchModel, match="no model 'may'"):
            models.load("may")
        models.publish("may")
        models.folder.remove(f"june/{WEIGHTS}")
        with pytest.raises(ArtifactError, match="lacks files"):
            models.load("june")
        assert [copy.name for copy in copies(models)] == []

    def test_files_that_differ_from_the_manifest_are_refused(self, models: BucketModels) -> None:
        models.folder.add(f"may/{WEIGHTS}", b"forged")
        with pytest.raises(ArtifactError, match="differs from what was uploaded"):
            models.load("may")
        models.publish("may")
        assert models.load("may").tag == model_directory.load(models.work / "may").tag

    def test_a_damaged_copy_is_downloaded_again(self, models: BucketModels) -> None:
        tag = models.load("may").tag
        (copy,) = copies(models)
        (copy / WEIGHTS).write_bytes(b"damaged")
        assert models.load("may").tag == tag

    def test_a_republished_model_replaces_the_copy(self, models: BucketModels) -> None:
        before = models.load("may").tag
        shutil.rmtree(models.work / "may")
        write_model(models.work / "may", 7)
        models.publish("may")
        assert models.load("may").tag != before
        models.load("june")
        models.remove("may")
        assert models.names() == ["june"]
        assert sorted(copy.name for copy in copies(models)) == ["june", "may"]
        publish(str(models.folder), models.work.parents[1], "july").load("july")
        assert sorted(copy.name for copy in copies(models)) == ["july", "june"]

    def test_concurrent_loads_share_one_copy(self, models: BucketModels) -> None:
        with ThreadPoolExecutor(4) as threads:
            tags = [artifact.tag for artifact in threads.map(models.load, ["may"] * 4)]
        assert len(set(tags)) == len(copies(models)) == 1


def test_a_service_survives_an_outage_of_the_bucket(
    s3_server: S3Server,
    s3: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(switcher, "RETRY_AFTER_S", 0.1)
    url = s3()
    publish(url, tmp_path / "publisher", "may", "june", "july")
    settings = Settings(model_dir=ObjectUrl(f"{url}/may"), data_dir=tmp_path / "state", cache_dir=tmp_path / "cache")
    first, second = Client(settings), Client(settings)

    def served(client: Client) -> object:
        return client.get("/v1/model").json()["generation"]

    def activate(name: str) -> int:
        return first.post(f"/v1/admin/generations/{name}/activate").status_code

    first.click("ada", *(item_id(row) for row in range(5)))
    assert activate("june") == 200
    wait_until(lambda: served(second) == "june")
    s3_server.freeze()
    assert activate("july") >= 400  # nobody has a copy of it
    assert activate("may") == 200  # of which there is one
    assert "using a local copy of model 'may'" in caplog.text
    for client in (first, second):
        wait_until(lambda client=client: served(client) == "may")  # type: ignore[misc]
        assert client.recommend("ada")["source"] == "personalised"
    third = Client(settings)  # one that starts meanwhile
    assert (served(third), third.recommend("ada")["source"]) == ("may", "personalised")
    s3_server.thaw()
    assert activate("july") == 200
    for client in (first, second, third):
        wait_until(lambda client=client: served(client) == "july")  # type: ignore[misc]
        client.close()
