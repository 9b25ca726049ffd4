"""LISAREC_MODEL_KEYS_FILE: the service loads no unsigned model and none of another signer, in any way."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.main import create_app
from app.serving import switcher
from app.serving.bucket_models import BucketModels
from app.settings import Settings
from model.artifact.model_directory import MANIFEST, ArtifactError, verified_tag
from model.artifact.signatures import SIGNATURE, SignatureError, make_key
from storage.folders.place import ObjectUrl
from tests.app.conftest import Client, item_id, write_model
from tests.app.support import run_command
from tests.storage.folders.durability import Disk
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
FAILED = re.compile(r'lisarec_switches_total\{outcome="failed",tenant="main"\} [1-9]')
NAMES = ("may", "june", "unsigned", "forged", "foreign")


class Deployment:
    """A models folder whose `may` and `june` are signed, a store, and commands on both."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.models, self.directory, self._patch, self._capsys = directory / "models", directory, patch, capsys
        self.key, self.keys, self._clients = directory / "key", directory / "keys", list[Client]()
        make_key(self.key, self.keys)
        make_key(directory / "another", directory / "others")
        for seed, name in enumerate(NAMES):
            write_model(self.models / name, seed)
            if name != "unsigned":
                self.run("sign", self.models / name, "--key", directory / ("another" if name == "foreign" else "key"))
        with (self.models / "forged" / MANIFEST).open("a") as manifest:
            manifest.write(" ")
        self.trust(self.keys)

    def trust(self, keys: Path | None) -> None:
        """Let processes that start from here on load models signed by these keys."""
        if keys is None:
            self._patch.delenv("LISAREC_MODEL_KEYS_FILE")
        else:
            self._patch.setenv("LISAREC_MODEL_KEYS_FILE", str(keys))

    def settings(self, model: str | None = "may") -> Settings:
        place = None if model is None else self.models / model
        return Settings(model_dir=place, models_dir=self.models, data_dir=self.directory / "state")

    def begin(self, model: str | None = "may") -> Client:
        self._clients.append(Client(self.settings(model)))
        return self._clients[-1]

    def run(self, *arguments: object) -> tuple[int, str]:
        """Run a command; return its exit status and output."""
        status = run_command(*arguments)
        printed = self._capsys.readouterr()
        return status, " ".join((printed.out + printed.err).split())

    def on_store(self, *arguments: object) -> tuple[int, str]:
        return self.run(*arguments, "--data-dir", self.directory / "state")

    def close(self) -> None:
        for client in self._clients:
            client.close()


def test_a_key_pair_and_a_signature_survive_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise services may trust a lost key, or refuse a signed model."""
    write_model(tmp_path / "model", 0)
    disk, private, public = Disk(monkeypatch), tmp_path / "private" / "key", tmp_path / "public" / "keys"
    for file in (private, public):
        file.parent.mkdir()
    assert run_command("keys", "model", "--key", private, "--public", public) == 0
    assert disk.lost(private, public) == []
    assert run_command("sign", tmp_path / "model", "--key", private) == 0
    assert disk.lost(tmp_path / "model" / SIGNATURE) == []
    assert disk.torn == []


@pytest.fixture
def deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path, monkeypatch, capsys)
    yield deployment
    deployment.close()


REFUSED = {"unsigned": "is not signed", "forged": "is not a valid signature", "foreign": "is not a valid signature"}


def test_signed_models_are_loaded_in_every_way(deployment: Deployment) -> None:
    client, models = deployment.begin(), deployment.models
    client.click("ada", *(item_id(row) for row in range(3)))
    assert deployment.on_store("rebuild", "--model", models / "june")[0] == 0
    assert client.post("/v1/admin/generations/june/activate").status_code == 200
    assert deployment.on_store("activate", "may", "--models-dir", models)[0] == 0
    wait_until(lambda: client.get("/v1/model").json()["generation"] == "may")
    shares = {"may": 0.5, "june": 0.5}
    assert client.request("PUT", "/v1/admin/experiment", json={"name": "x", "shares": shares}).status_code == 200
    assert client.recommend("ada")["source"] == "personalised"


@pytest.mark.parametrize("name", REFUSED)
def test_unsigned_models_are_refused_and_change_nothing(
    deployment: Deployment, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    client, models, reason = deployment.begin(), deployment.models, REFUSED[name]
    client.click("ada", item_id(1))
    store, runner = client.service.store, client.runner
    before = runner.run(store.pointers())

    with pytest.raises(ArtifactError, match=reason):
        create_app(deployment.settings(name))
    for method, path, body in (
        ("POST", f"generations/{name}/activate", None),
        ("PUT", "experiment", {"name": "x", "shares": {"may": 0.5, name: 0.5}}),
    ):
        answer = client.request(method, f"/v1/admin/{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_unusable")
        assert reason in caplog.text
        caplog.clear()
    backup = deployment.directory / "log.gz"
    assert deployment.on_store("backup", "--out", backup)[0] == 0
    empty = deployment.directory / "empty"
    for status, printed in (
        deployment.on_store("rebuild", "--model", models / name),
        deployment.on_store("activate", name, "--models-dir", models),
        deployment.on_store("experiment", "x", "may=0.5", f"{name}=0.5", "--models-dir", models),
        deployment.run("restore", backup, "--model", models / name, "--data-dir", empty),
        deployment.run("verify", models / name),
    ):
        assert (status, reason in printed) == (1, True), printed
    assert runner.run(store.pointers()) == before
    assert not empty.exists()
    assert client.recommend("ada")["generation"] == "may"


def test_an_unsigned_model_activated_elsewhere_is_not_loaded(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write access to the store without a signing key is not enough; once signed, the model is served."""
    monkeypatch.setattr(switcher, "RETRY_AFTER_S", 0.05)
    clients = [deployment.begin(), deployment.begin(None)]
    deployment.trust(None)
    assert deployment.on_store("activate", "unsigned", "--models-dir", deployment.models)[0] == 0
    for client, served in zip(clients, ("may", "none"), strict=True):
        wait_until(lambda client=client: FAILED.search(client.get("/metrics").text) is not None)  # type: ignore[misc]
        assert client.get("/v1/model").json()["generation"] == served
    assert deployment.run("sign", deployment.models / "unsigned", "--key", deployment.key)[0] == 0
    for client in clients:
        wait_until(lambda client=client: client.get("/v1/model").json()["generation"] == "unsigned")  # type: ignore[misc]


def test_a_service_does_not_start_without_the_key_file(deployment: Deployment) -> None:
    deployment.trust(deployment.directory / "missing")
    with pytest.raises(SignatureError, match="missing"):
        deployment.begin(None)


def test_commands_create_rotate_and_remove_keys(deployment: Deployment) -> None:
    """A running service reads the key file whenever it loads a model."""
    client, second = deployment.begin(), deployment.directory / "second"
    status, printed = deployment.run("keys", "model", "--key", second)
    assert (status, f"LISAREC_MODEL_KEYS_FILE={deployment.keys}" in printed) == (0, True)
    status, printed = deployment.run("sign", deployment.models / "unsigned", "--key", second)
    assert (status, f"generation {verified_tag(deployment.models / 'unsigned')} is signed" in printed) == (0, True)
    for name in ("june", "unsigned"):
        assert client.post(f"/v1/admin/generations/{name}/activate").status_code == 200
    of_second = deployment.keys.read_text().split("# ")[2]
    deployment.keys.write_text(of_second)
    for name, status in (("june", 409), ("unsigned", 200)):
        assert client.post(f"/v1/admin/generations/{name}/activate").status_code == status
    assert deployment.run("verify", deployment.models / "unsigned") == (
        0,
        f"{deployment.models / 'unsigned'}: generation {verified_tag(deployment.models / 'unsigned')} is intact, "
        f"signed by a key in '{deployment.keys}'",
    )
    assert deployment.run("sign", deployment.models / "june")[0] == 2
    (deployment.models / "june" / "model.safetensors").write_bytes(b"torn")
    assert "does not match its manifest" in deployment.run("sign", deployment.models / "june", "--key", second)[1]


def test_models_in_a_bucket_have_signatures(deployment: Deployment, s3: Callable[[], str]) -> None:
    url, cache = ObjectUrl(s3()), deployment.directory / "cache"
    models = BucketModels(url, cache, deployment.keys)
    for name in NAMES:
        shutil.copytree(deployment.models / name, models.work / name)
        models.publish(name)
    assert [models.load(name).name for name in ("may", "june")] == ["may", "june"]
    for name, reason in REFUSED.items():
        with pytest.raises(ArtifactError, match=reason):
            models.load(name)
        assert BucketModels(url, cache).load(name).name == name

    deployment.run("sign", models.work / "unsigned", "--key", deployment.key)
    models.publish("unsigned")
    tag = models.load("unsigned").tag
    (copy,) = (path for path in cache.glob("models/*/*/unsigned") if (path / SIGNATURE).exists())
    (copy / SIGNATURE).write_bytes(b"damaged")
    assert models.load("unsigned").tag == tag, "a damaged copy is made anew"
    (models.work / "unsigned" / SIGNATURE).unlink()
    models.publish("unsigned")
    with pytest.raises(ArtifactError, match="is not signed"):
        models.load("unsigned")
    models.remove("june")
    assert not any(name.startswith("june/") for name in models.folder.names())


def test_no_other_file_loads_models_without_verification() -> None:
    """The exceptions serve no model: trainer, demo and load test load what they have just created."""
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "app").rglob("*.py")
        for call in path.read_text().split("model_directory.load(")[1:]
        if "keys_file" not in call.splitlines()[0]
    }
    assert found == {
        "app/cli/models.py",
        "app/jobs/demo.py",
        "app/jobs/loadtest/synthetic_catalogue.py",
        "app/jobs/retraining/round.py",
    }
