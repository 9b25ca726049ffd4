"""Switching of models by request or command, in both directions and without failed requests."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest

from app.serving import lifespan, served_generation, switcher
from app.serving.served_generation import generation_of
from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from model.inference.engine import Engine
from storage.records import ItemCodes
from storage.sqlite.database import FILE_NAME
from tests.app.conftest import Client, item_id, write_model
from tests.app.support import run_command
from tests.storage.oracles.naive_fold import assert_histogram_is, fold
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with the models `may` and `june`."""
    folder = tmp_path / "models"
    for seed, name in enumerate(("may", "june")):
        write_model(folder / name, seed)
    return folder


@pytest.fixture
def begin(models: Path, tmp_path: Path) -> Iterator[Callable[..., Client]]:
    """Start a service on the store of this test."""
    clients: list[Client] = []

    def begin_client(model: str = "may", **settings: object) -> Client:
        from app.settings import Settings

        client = Client(Settings(model_dir=models / model, data_dir=tmp_path / "state", **settings))  # type: ignore[arg-type]
        clients.append(client)
        return client

    yield begin_client
    for client in clients:
        client.close()


@pytest.fixture
def command(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run a command on the store of this test; return its exit status and output."""

    def run(*arguments: object) -> tuple[int, str]:
        given = [*map(str, arguments), "--data-dir", str(tmp_path / "state")]
        if given[0] == "activate":
            given += ["--models-dir", str(models)]
        status = run_command(*given)
        printed = capsys.readouterr()
        return status, " ".join((printed.out + printed.err).split())

    return run


def activate(client: Client, name: str) -> tuple[int, dict[str, str]]:
    answer = client.post(f"/v1/admin/generations/{name}/activate")
    body = answer.json()
    return answer.status_code, body.get("error", body)


def served(client: Client) -> str:
    return str(client.get("/v1/model").json()["generation"])


def wait_until_served(client: Client, name: str) -> None:
    wait_until(lambda: served(client) == name)


def assert_right(client: Client, model: Path, user_id: str) -> None:
    """Assert that the state is the fold of the log in this model's generation, and that it serves."""
    expected = fold(generation_of(model_directory.load(model)), client.log(user_id))
    state = client.get(f"/v1/users/{user_id}").json()
    assert (state["generation"], state["event_count"]) == (model.name, len(expected.ids))
    assert_histogram_is(state["histogram"], expected.histogram())
    answer = client.recommend(user_id)
    assert (answer["generation"], answer["source"]) == (model.name, "personalised")


def fail_engines(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> list[str]:
    """Make every further engine fail to open; return the names of the models tried."""
    tried = list[str]()

    def fail(artifact: Artifact, _: str) -> Engine:
        tried.append(artifact.name)
        raise failure

    monkeypatch.setattr(served_generation, "open_engine", fail)
    return tried


class TestSwitching:
    def test_a_request_activates_and_rolls_back(self, begin: Callable[..., Client], models: Path) -> None:
        client = begin()
        client.click("ada", *(item_id(row) for row in range(30)))
        assert_right(client, models / "may", "ada")
        for name, previous in (("june", "may"), ("may", "june")):
            status, answer = activate(client, name)
            assert (status, answer["generation"], answer["previous"]) == (200, name, previous)
            assert answer["tag"] == model_directory.load(models / name).tag == client.get("/v1/model").json()["tag"]
            client.click("ada", item_id(31))
            assert_right(client, models / name, "ada")

    def test_every_process_follows_and_a_new_one_starts_with_the_active_model(
        self, begin: Callable[..., Client], command: Callable[..., tuple[int, str]]
    ) -> None:
        clients = [begin(), begin()]
        clients[0].click("ada", *(item_id(row) for row in range(5)))
        status, printed = command("rebuild", "--model", clients[0].settings.models_folder / "june")
        state, models = clients[0].settings.data_dir, clients[0].settings.models_folder
        switch = f"To switch, run 'lisarec activate june --data-dir {state} --models-dir {models}'"
        assert (status, f"5 events of 1 users folded. {switch}" in printed) == (0, True)
        assert [served(client) for client in clients] == ["may", "may"]
        for name in ("june", "may"):
            status, printed = command("activate", name)
            assert (status, f"{name}, generation" in printed) == (0, True)
            for client in clients:
                wait_until_served(client, name)
        assert f"to roll back, run 'lisarec activate june --data-dir {state} --models-dir {models}'" in printed
        assert f"to delete the old states, run 'lisarec drop june --data-dir {state}'" in printed
        command("activate", "june")
        assert served(begin("may")) == "june"

    def test_suggested_commands_are_for_the_same_tenant(
        self,
        models: Path,
        begin: Callable[..., Client],
        command: Callable[..., tuple[int, str]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        begin()
        monkeypatch.setenv("LISAREC_TENANT", "books")
        printed = command("rebuild", "--model", models / "june")[1]
        assert "run 'LISAREC_TENANT=books lisarec activate june " in printed
        for name in ("june", "may"):
            printed = command("activate", name)[1]
        assert "run 'LISAREC_TENANT=books lisarec activate june " in printed
        assert "run 'LISAREC_TENANT=books lisarec drop june " in printed

    def test_an_unserved_tenant_is_reported(
        self,
        begin: Callable[..., Client],
        command: Callable[..., tuple[int, str]],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        begin()
        command("activate", "june")
        assert "LISAREC_TENANT" not in caplog.text
        monkeypatch.setenv("LISAREC_TENANT", "books")
        command("activate", "june")
        assert "no service has served tenant 'books' from this store, only others: main;" in caplog.text
        caplog.clear()
        command("activate", "june")
        assert "LISAREC_TENANT" not in caplog.text

    def test_a_response_comes_from_a_single_model(self, begin: Callable[..., Client], models: Path) -> None:
        client = begin()
        client.click("ada", item_id(1))
        by_name = {name: client.recommend("ada")["items"] for name in ("may", "june") if activate(client, name)}
        assert by_name["may"] != by_name["june"]
        for name in ("may", "june", "may"):
            activate(client, name)
            answer = client.recommend("ada")
            assert (answer["generation"], answer["items"]) == (name, by_name[name])

    def test_a_replaced_model_is_freed(self, begin: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> None:
        """By Python's garbage collection, when the tenth model follows at the latest."""
        monkeypatch.setattr(lifespan, "COLLECT_EVERY_S", 0.1)
        client, names = begin(), cycle(["june", "may"])
        client.recommend("ada")
        replaced = weakref.ref(client.service.catalogue), weakref.ref(client.service.switcher.current.engine)
        gc.disable()
        try:
            wait_until(lambda: activate(client, next(names)) and not any(part() for part in replaced))
        finally:
            gc.enable()

    def test_users_with_long_logs_get_popular_items_until_their_state_is_folded(
        self, begin: Callable[..., Client], models: Path
    ) -> None:
        client = begin()
        for _ in range(6):
            client.click("ada", *(item_id(row % 60) for row in range(100)))
        client.click("bea", item_id(1))
        activate(client, "june")
        assert client.recommend("bea")["source"] == "personalised"
        assert client.recommend("ada")["source"] == "popular"
        wait_until(lambda: client.recommend("ada")["source"] != "popular")
        assert_right(client, models / "june", "ada")


class TestRefusals:
    def test_a_missing_or_broken_model_changes_nothing(
        self, begin: Callable[..., Client], command: Callable[..., tuple[int, str]], models: Path
    ) -> None:
        client = begin()
        shutil.copytree(models / "june", models / "torn")
        (models / "torn" / "model.safetensors").write_bytes(b"torn")
        (models / "empty").mkdir()
        shutil.copytree(models / "june", models / "circle")
        (models / "circle" / "config.json").unlink()
        (models / "circle" / "config.json").symlink_to("config.json")
        shutil.copytree(models / "june", models / "pipe")
        (models / "pipe" / "config.json").unlink()
        os.mkfifo(models / "pipe" / "config.json")
        for name, status, code in (
            ("july", 404, "model_not_found"),
            ("torn", 409, "model_unusable"),
            ("empty", 409, "model_unusable"),
            ("circle", 409, "model_unusable"),
            ("pipe", 409, "model_unusable"),
            ("a b", 422, "invalid_request"),
            ("..", 404, "not_found"),
            ("..%2Fmodels", 422, "invalid_request"),
        ):
            answered, error = activate(client, name)
            assert (answered, error["code"]) == (status, code), name
        for name, reason in (
            ("july", "no model 'july'"),
            ("torn", "does not match its manifest"),
            ("empty", "has no manifest.json"),
            ("circle", "cannot be read"),
            ("pipe", "lacks"),
            ("../models/june", "no model '"),
        ):
            failed, printed = command("activate", name)
            assert (failed, reason in printed) == (1, True), printed
        assert client.runner.run(client.service.store.generations.active()) is None
        assert served(client) == "may"

    def test_links_out_of_the_models_folder_are_refused(
        self, begin: Callable[..., Client], models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        client = begin()
        write_model(tmp_path / "elsewhere" / "other", seed=9)
        (models / "away").symlink_to(tmp_path / "elsewhere" / "other")
        shutil.copytree(models / "june", models / "half")
        (models / "half" / "model.safetensors").unlink()
        (models / "half" / "model.safetensors").symlink_to(tmp_path / "elsewhere" / "other" / "model.safetensors")
        for name in ("away", "half"):
            status, error = activate(client, name)
            assert (status, error["code"]) == (409, "model_unusable")
        assert caplog.text.count("is outside the models folder") == 2
        (models / "current").symlink_to("june")
        assert activate(client, "current")[0] == 200
        assert served(client) == "current"

    def test_the_old_model_serves_until_a_missing_one_arrives(
        self,
        begin: Callable[..., Client],
        command: Callable[..., tuple[int, str]],
        models: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """As on a replica whose disk lacks the model, or has another one of that name."""
        monkeypatch.setattr(switcher, "RETRY_AFTER_S", 0.05)
        client = begin()
        client.click("ada", item_id(1))
        shutil.copytree(models / "june", models / "new")
        command("activate", "new")
        (models / "new").rename(models / "away")
        shutil.copytree(models / "may", models / "new")
        wait_until(lambda: 'outcome="failed",tenant="main"} 0.0' not in client.get("/metrics").text)
        assert client.recommend("ada")["generation"] == "may"
        shutil.rmtree(models / "new")
        (models / "away").rename(models / "new")
        wait_until_served(client, "new")

    @pytest.mark.parametrize("failure", [RuntimeError("CUDA error: unspecified launch failure"), MemoryError()])
    def test_a_model_that_cannot_be_loaded_is_not_retried_at_every_poll(
        self,
        begin: Callable[..., Client],
        command: Callable[..., tuple[int, str]],
        monkeypatch: pytest.MonkeyPatch,
        failure: Exception,
    ) -> None:
        monkeypatch.setattr(switcher, "RETRY_AFTER_S", PATIENCE_S)
        client = begin()
        loads = fail_engines(monkeypatch, failure)
        status, error = activate(client, "june")
        assert (status, error["code"]) == (409, "model_unusable")
        command("activate", "june")
        wait_until(lambda: 'lisarec_switches_total{outcome="failed",tenant="main"} 1.0' in client.get("/metrics").text)
        for _ in range(3):
            client.runner.run(client.service.switcher.poll())
        assert loads == ["june", "june"]
        assert served(client) == "may"

    def test_without_the_store_nothing_changes(self, begin: Callable[..., Client]) -> None:
        client = begin()
        client.close_store()
        status, error = activate(client, "june")
        assert (status, error["code"]) == (503, "storage_unavailable")
        assert served(client) == "may"

    def test_activation_without_keys_is_local_only(self, begin: Callable[..., Client]) -> None:
        for host, status in (("0.0.0.0", 404), ("127.0.0.1", 200), ("localhost", 200), ("::1", 200), ("::", 404)):
            assert activate(begin(host=host), "june")[0] == status


class TestDropping:
    def test_only_unserved_generations_are_dropped(
        self, begin: Callable[..., Client], command: Callable[..., tuple[int, str]], models: Path
    ) -> None:
        client = begin()
        client.click("ada", *(item_id(row) for row in range(5)))
        command("rebuild", "--model", models / "june")
        assert "in use by a process" in command("drop", "june")[1]
        activate(client, "june")
        store, runner = client.service.store, client.runner
        for name, reason in (("june", "'june' is active"), ("may", "in use"), ("july", "in the store: june (")):
            failed, printed = command("drop", name)
            assert (failed, reason in printed) == (1, True), printed
        (may,) = [known.named for known in runner.run(store.generations.known()) if known.named.name == "may"]
        runner.run(store.generations.drop(may.tag))
        runner.run(store.generations.announce(may, 0))  # as it is when it has not been served for long
        runner.run(store.states("main", ["ada"], generation_of(model_directory.load(models / "may"))))
        assert command("drop", "may") == (0, "1 states of may deleted")
        assert_right(client, models / "june", "ada")
        assert activate(client, "may")[0] == 200
        assert_right(client, models / "may", "ada")

    def test_a_retrained_model_of_the_same_name_is_another_generation(
        self, begin: Callable[..., Client], command: Callable[..., tuple[int, str]], models: Path
    ) -> None:
        client = begin()
        client.click("ada", item_id(1))
        activate(client, "june")
        first = client.get("/v1/model").json()["tag"]
        write_model(models / "june", seed=5)
        assert served(client) == "june"
        assert client.get("/v1/model").json()["tag"] == first
        activate(client, "june")
        assert client.get("/v1/model").json()["tag"] == model_directory.load(models / "june").tag != first
        assert_right(client, models / "june", "ada")

    def test_a_missing_store_is_not_created(
        self, command: Callable[..., tuple[int, str]], models: Path, tmp_path: Path
    ) -> None:
        for arguments in (("rebuild", "--model", models / "june"), ("activate", "june"), ("drop", "june")):
            failed, printed = command(*arguments)
            assert (failed, "has no users" in printed) == (1, True)
        assert not (tmp_path / "state" / FILE_NAME).exists()


def test_a_failed_rebuild_of_the_catalogue_is_not_retried_at_every_poll(
    begin: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(switcher, "REBUILD_EVERY_S", PATIENCE_S)
    client = begin()
    served_now = client.service.switcher.current
    shape = served_now.artifact.config.model
    codes = bytes(shape.history_codebooks), bytes(shape.target_codebooks)
    new = ItemCodes("new", served_now.named.tag, 20, 0.0, *codes)
    rebuilds = fail_engines(monkeypatch, RuntimeError("CUDA error: unspecified launch failure"))
    client.runner.run(client.service.store.put_item_codes(client.settings.tenant, [new]))
    wait_until(lambda: served(client) == "may" and "failed to follow the active generation" in caplog.text)
    for _ in range(3):
        client.runner.run(client.service.switcher.poll())
    assert rebuilds == ["may"]
    assert client.service.switcher.current is served_now


def test_failed_background_work_is_logged_and_restarted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lifespan, "BEGIN_AGAIN_AFTER_S", 0)
    begun = []

    async def law() -> None:
        goes_on = asyncio.Event()

        async def work() -> None:
            begun.append(1)
            if len(begun) < 3:
                raise RuntimeError("a mistake")
            goes_on.set()
            await asyncio.Event().wait()

        async with lifespan.in_background(work), asyncio.timeout(PATIENCE_S):
            await goes_on.wait()

    asyncio.run(law())
    assert len(begun) == 3
    assert [record.levelname for record in caplog.records if record.name == lifespan.__name__] == ["ERROR", "ERROR"]
