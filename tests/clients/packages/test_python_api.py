"""`import lisarec`: lists equal those of the service; training, evaluation, and the notebook."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import lisarec
from app.jobs.datasets import synthetic_shop
from app.schemas.recommendations import RecommendationRequest
from app.settings import Settings
from model.artifact import model_directory
from model.evaluation.evaluate import evaluate as evaluate_models
from model.evaluation.evaluate import load_model
from model.training.threads import openblas_functions, threads_kept, use_threads
from tests.app.conftest import Client, write_model
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "docs" / "how-to" / "integrate" / "python-api.ipynb"
HISTORY = ["item-3", "item-17", "item-30"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def recommender(model: Path) -> Iterator[lisarec.Recommender]:
    with lisarec.load(model) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Items in the service's responses to the same requests."""
    client = Client(Settings(model_dir=model, data_dir=tmp_path_factory.mktemp("state")))

    def ask(**request: Any) -> list[dict[str, Any]]:
        answer = client.request("POST", "/v1/recommendations", json=request)
        assert answer.status_code == 200, answer.text
        items: list[dict[str, Any]] = answer.json()["items"]
        return items

    yield ask
    client.close()


@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"k": 5, "categories": ("tea",), "categories_none": ["pot"]},
        {"exclude_seen": "all", "exclude": ["item-4"], "diversity": 0.5, "max_per_category": 2},
        {"filter": "'cup' in item.categories && params.least < 2.0", "params": {"least": 1.0}},
        {"boost": {"tea": 0.7}, "pin": [{"item_id": "item-50", "place": 2}]},
        {"candidates": ["item-1", "item-2", "item-3"]},
        {"because": "item-9"},
        {"basket": ["item-1"], "k": 3},
    ],
)
def test_lists_equal_those_of_the_service(
    recommender: lisarec.Recommender, served: Callable[..., list[dict[str, Any]]], wishes: Any
) -> None:
    assert recommender.recommend(HISTORY, **wishes) == served(history=HISTORY, **wishes)
    assert recommender.explain(HISTORY, **wishes) == served(history=HISTORY, explain=True, **wishes)


def test_batches_equal_single_histories(recommender: lisarec.Recommender) -> None:
    histories = [HISTORY[:length] for length in range(4)] + [["unheard-of"]]
    lists = recommender.recommend_many(histories, k=7)
    assert lists == [recommender.recommend(history, k=7) for history in histories]
    assert lists[0] == lists[-1]  # popular items, as for who is unknown


def test_items_are_found_by_search_and_similarity(
    recommender: lisarec.Recommender, served: Callable[..., list[dict[str, Any]]]
) -> None:
    assert "item-7" in recommender
    assert "unheard-of" not in recommender
    assert len(recommender) == 60
    assert [item["item_id"] for item in recommender.search("green thing", limit=3)]
    assert recommender.similar("item-9", k=4) == served(history=[], because="item-9", k=4)
    with pytest.raises(ValueError, match="this item is in no model"):
        recommender.similar("unheard-of")


def test_wishes_accept_the_options_of_requests() -> None:
    about_users = {"user_id", "history", "state", "exclude_events", "within", "mode", "rotation", "rotation_days"}
    about_a_store = {"scenario", "objective", "max_per", "debug", "explain", "k"}
    taken = RecommendationRequest.model_fields.keys() - about_users - about_a_store
    assert lisarec.Wishes.__annotations__.keys() == taken


def test_invalid_options_raise_value_error(recommender: lisarec.Recommender, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"filter at character \d+"):
        recommender.recommend(HISTORY, filter="item.title ==")
    with pytest.raises(ValueError, match="the request is not valid; k "):
        recommender.recommend(HISTORY, k=0)
    with pytest.raises(ValueError, match="did you mean categories"):
        recommender.recommend(HISTORY, categorie=["tea"])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="not one text"):
        recommender.recommend("item-3")
    with pytest.raises(ValueError, match=r"manifest\.json; run 'lisarec train"):
        lisarec.load(tmp_path)


def test_any_thread_may_use_it_until_closed(model: Path) -> None:
    before = {*threading.enumerate()}
    recommender = lisarec.load(model)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(recommender.recommend(HISTORY))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [recommender.recommend(HISTORY)] * 8
    recommender.close()
    recommender.close()
    wait_until(lambda: {*threading.enumerate()} <= before, lambda: str(threading.enumerate()))
    with pytest.raises(RuntimeError, match="closed"):
        recommender.recommend(HISTORY)


def test_thread_settings_of_the_program_are_kept(model: Path) -> None:
    def threads() -> list[int]:
        return [torch.get_num_threads(), *(get_threads() for get_threads in openblas_functions("get"))]

    with threads_kept():
        use_threads(2)
        with lisarec.load(model):
            assert threads() == [2, 2]


def test_settings_of_a_service_in_the_environment_are_ignored(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"REDIS_URL": "redis://no-such-host", "KEYS_FILE": "no-keys", "MODEL_DIR": "none"}.items():
        monkeypatch.setenv(f"LISAREC_{name}", value)
    with lisarec.load(model) as recommender:
        assert recommender.description["generation"] == "tiny"


@pytest.mark.usefixtures("interpreter_starts")
def test_an_unclosed_recommender_leaves_no_files(model: Path, tmp_path: Path) -> None:
    program = "import sys, lisarec; print(len(lisarec.load(sys.argv[1]).recommend(['item-1'])), 'torch' in sys.modules)"
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            f"import lisarec, sys; assert 'torch' not in sys.modules; {program}",
            str(model),
        ],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "10 True\n", "")
    assert [*tmp_path.iterdir()] == []


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data") / "shop"
    directory.mkdir()
    synthetic_shop.generate(directory, shoppers=60)
    return directory


class TestTraining:
    def test_trains_and_evaluates_a_model(self, shop: Path, tmp_path: Path) -> None:
        with lisarec.train(shop, tmp_path / "shop", epochs=1, lift=1.5, event_weights={"purchase": 2}) as trained:
            (popular, *_) = trained.recommend([])
            assert trained.recommend([popular["item_id"]], k=3)
            assert trained.description["config"]["event_weights"]["purchase"] == 2
        artifact = model_directory.load(tmp_path / "shop")
        assert artifact.config.training.epochs == 1
        measured = lisarec.evaluate(tmp_path / "shop", shop, protocol="loo_sampled100")
        assert measured == evaluate_models([load_model(tmp_path / "shop")], shop, "loo_sampled100").to_json()

    def test_runs_the_example_of_the_package(self, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "shop").symlink_to(shop)
        monkeypatch.chdir(tmp_path)
        example = textwrap.dedent("\n".join(re.findall(r"^    .*$", str(lisarec.__doc__), re.MULTILINE)))
        example = example.replace("tea-2", "school-bag-red").replace("cup-1", "pencil-case-red").replace("=5)", "=1)")
        exec(compile(example, "example", "exec"), {})

    def test_refuses_invalid_arguments(self, shop: Path, tmp_path: Path) -> None:
        for settings, reason in (
            ({"preset": "linear"}, "is a mechanism"),
            ({"preset": "lisa-micro"}, "lisa-micro"),
            ({"event_weights": {"purchase": -1}}, "purchase"),
            ({"timezone": "Mars/Base"}, "Mars/Base"),
            ({"columns": {"customer": "user"}}, "user"),
            ({"epochs": 0}, "epochs: Input should be greater than or equal to 1"),
            ({"lift": -1.0}, "lift: Input should be greater than or equal to 0"),
            ({"lift": float("inf")}, "lift: Input should be less than or equal to 1000"),
            ({"seed": 2**32}, "seed: Input should be less than or equal to 4294967295"),
            ({"protocol": "loo"}, "protocol: Input should be 'loo_full', 'loo_sampled100'"),
            ({"train_on": "test"}, "train_on: Input should be 'train', 'validation' or 'all'"),
            ({"unseen": "view"}, "unseen: 'str' instances are not allowed as a Sequence value"),
            ({"since": datetime(2026, 1, 1)}, "since: Input should have timezone info"),
            ({"threads": 0}, "threads: Input should be greater than or equal to 1"),
            ({"device": "tpu"}, "device: Input should be 'cpu' or 'cuda'"),
        ):
            with pytest.raises(ValueError, match=reason):
                lisarec.train(shop, tmp_path / "none", **settings)
        with pytest.raises(TypeError, match=r"no setting 'epoch'; valid settings: .*epochs"):
            lisarec.train(shop, tmp_path / "none", epoch=1)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="no setting 'warm_from'"):
            lisarec.train(shop, tmp_path / "none", warm_from=tmp_path)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="protocol: Input should be 'loo_full', 'loo_sampled100'"):
            lisarec.evaluate(tmp_path / "none", shop, protocol="loo")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="no setting 'protokoll'"):
            lisarec.evaluate(tmp_path / "none", shop, protokoll="loo_full")  # type: ignore[call-arg]
        assert not (tmp_path / "none").exists()

    def test_learns_from_fewer_events(self, shop: Path, tmp_path: Path) -> None:
        fewer: dict[str, Any] = {
            "since": datetime(2000, 1, 1, tzinfo=UTC),
            "users_sample": 0.5,
            "events_per_user": 8,
            "lift": None,
        }
        lisarec.train(shop, tmp_path / "model", epochs=1, **fewer).close()
        config = model_directory.load(tmp_path / "model").config
        assert (config.data.since, config.data.users_sample) == (fewer["since"], 0.5)
        assert config.training.model_dump()["events_per_user"] == 8

    @pytest.mark.parametrize(
        ("table", "settings", "argument"),
        [
            ("Kunde,Artikel,Datum\n", {}, "columns={'Kunde': 'user_id', 'Artikel': 'item_id', 'Datum': 'timestamp'}"),
            ("user_id,item_id,timestamp\nu,i,24.12.2025 18:30\n", {}, "timezone='Europe/Berlin' or timezone='UTC'"),
            ("user_id,item_id,timestamp\nu,i,20251224\n", {}, "timezone='Europe/Berlin'"),
            ('user_id,item_id,timestamp,value\nu,i,1,"1,5"\n', {"timezone": "UTC"}, "decimal=','"),
            ("user_id,item_id,timestamp\nu,i,1\n,i,1\n", {"timezone": "UTC"}, "skip_bad_lines=True"),
            ("user_id,item_id,timestamp,type\nu,i,1,a\n", {"types": {"aa": "view"}}, "which types names"),
        ],
    )
    def test_names_arguments_in_errors_of_tables(
        self, tmp_path: Path, table: str, settings: dict[str, Any], argument: str
    ) -> None:
        (tmp_path / "events.csv").write_text(table)
        with pytest.raises(ValueError, match=r"\.csv") as refused:
            lisarec.train(tmp_path / "events.csv", tmp_path / "model", **settings)
        assert argument in str(refused.value)
        assert "--" not in str(refused.value)


RUN = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
nbformat.write(notebook, "run.ipynb")
"""


@pytest.mark.usefixtures("interpreter_starts")
def test_the_notebook_reproduces_its_output(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")}
    command = [sys.executable, "-c", RUN, str(NOTEBOOK)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    run, shown = (json.loads(path.read_text()) for path in (tmp_path / "run.ipynb", NOTEBOOK))
    outputs = [[one["data"] for cell in each["cells"] for one in cell.get("outputs", [])] for each in (run, shown)]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 6
