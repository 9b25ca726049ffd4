"""The command line: each command once, end to end; every failure in one line that says what to do."""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import httpx
import polars as pl
import pytest
import torch
from pydantic import ValidationError

from app.cli.main import main
from app.cli.options import StoreOptions, size_in_bytes
from app.jobs.reports.training_progress import TrainingProgress
from app.settings import Settings, problem_of_unknown_variables
from benchmarks.harness.service_process import free_port, is_ready
from model.data.readers import read_interactions
from tests.app.support import run_command
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[3]
COMMANDS = (
    "train",
    "evaluate",
    "sign",
    "serve",
    "rebuild",
    "activate",
    "drop",
    "archive",
    "consume",
    "publish",
    "recommend",
    "replay",
    "data",
    "demo",
    "keys",
    "items",
)


class Outcome:
    """The exit status and output of a command."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> None:
        self.status = run_command(*arguments)
        self.out, self.err = capsys.readouterr()


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "shop"
    assert run_command("train", "--data", data, "--out", out, "--epochs", "1") == 0
    return out


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of ``lisarec serve`` on a new store."""
    port = str(free_port())
    state = tmp_path_factory.mktemp("state")
    command = [sys.executable, "-m", "app", "serve", "--data-dir", str(state), "--port", port]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LISAREC_MODEL_DIR": str(model)}
    with subprocess.Popen(command, cwd=state, env=environment, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_ready(url) or process.poll() is not None)
        yield url
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


class TestHelp:
    def test_names_every_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        shown = Outcome(capsys, "--help")
        assert shown.status == 0
        assert all(f"  {command} " in shown.out for command in COMMANDS)

    @pytest.mark.parametrize("command", COMMANDS)
    def test_describes_a_command(self, capsys: pytest.CaptureFixture[str], command: str) -> None:
        assert Outcome(capsys, command, "--help").status == 0

    def test_does_not_import_torch(self) -> None:
        quick = "import sys, app.cli; sys.exit(bool({'torch', 'polars', 'fastapi', 'httpx'} & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", quick], cwd=ROOT, check=False).returncode == 0


class TestTrainAndEvaluate:
    def test_write_a_model_and_its_metrics(
        self, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        numbers = tmp_path / "numbers.json"
        shown = Outcome(capsys, "evaluate", "--model", model, "--data", data, "--json", numbers)
        found = json.loads(numbers.read_text())
        assert shown.status == 0
        assert (found["protocol"], found["users"]) == ("loo_full", 120)
        assert f"{found['metrics']['hr_at_10_full']:.4f}" in shown.out

    @pytest.mark.parametrize("option", ["--json", "--ranks"])
    def test_refuse_an_unwritable_file_at_the_start(
        self, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
    ) -> None:
        refused = Outcome(capsys, "evaluate", "--model", model, "--data", data, option, tmp_path / "out" / "numbers")
        assert refused.status == 2
        assert "there is no directory" in refused.err
        assert Outcome(capsys, "evaluate", "--model", model, "--data", data, option, tmp_path).status == 2

    def test_evaluate_only_the_named_baselines(
        self, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "numbers.json"
        names = ("--baseline", "markov", "--baseline", "popularity")
        assert Outcome(capsys, "evaluate", "--model", model, "--data", data, "--json", file, *names).status == 0
        assert list(json.loads(file.read_text())["baselines"]) == ["popularity", "markov"]
        refused = Outcome(capsys, "evaluate", "--model", model, "--data", data, "--baseline", "oracle")
        assert refused.status == 2
        assert "sasrec" in refused.err

    def test_compare_with_baselines_and_write_all_outputs(
        self, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        numbers, ranks, report = tmp_path / "numbers.json", tmp_path / "ranks.parquet", tmp_path / "report"
        files = ("--json", numbers, "--ranks", ranks, "--report", report)
        other = tmp_path / "other"
        assert Outcome(capsys, "train", "--data", data, "--out", other, "--epochs", 1, "--seed", 1).status == 0
        shown = Outcome(capsys, "evaluate", "--model", model, "--model", other, "--data", data, "--baselines", *files)
        assert shown.status == 0
        found = json.loads(numbers.read_text())
        assert " ".join(found["baselines"]) == "popularity markov co-visitation log-co-visitation item-knn ease ridge"
        assert all(words in shown.out for words in (found["verdict"], *found["baselines"]))
        assert "mean of 2" in shown.out
        of_each = [each["metrics"]["ndcg_at_50_full"] for each in found["models"]]
        assert found["spread"]["ndcg_at_50_full"]["standard_deviation"] == pytest.approx(statistics.stdev(of_each))
        assert set(pl.read_parquet(ranks)["scorer"]) == {"lisa-mini", *found["baselines"]}
        assert f"--model {other} --data {data} --baselines --json " in (report / "index.html").read_text("utf-8")

    def test_compare_other_models_with_the_first(
        self, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other, numbers, report = tmp_path / "unlifted", tmp_path / "numbers.json", tmp_path / "report"
        assert "lift:" not in Outcome(capsys, "train", "--data", data, "--out", other, "--epochs", 1, "--lift", 0).out
        files = ("--json", numbers, "--report", report, "--report-seed", 4)
        shown = Outcome(capsys, "evaluate", "--model", model, "--model", other, "--data", data, *files)
        assert shown.status == 0
        found = json.loads(numbers.read_text())
        assert found["other_models"]["unlifted"]["verdict"] in shown.out.splitlines()
        assert "mean of 2" not in shown.out
        assert "selected with seed 4" in (report / "index.html").read_text(encoding="utf-8")

    def test_train_the_same_model_with_the_same_seed(self, model: Path, data: Path, tmp_path: Path) -> None:
        for name, seed in (("same", "0"), ("other", "1")):
            assert run_command("train", "--data", data, "--out", tmp_path / name, "--epochs", "1", "--seed", seed) == 0
        weights = [(path / "model.safetensors").read_bytes() for path in (model, tmp_path / "same", tmp_path / "other")]
        assert weights[0] == weights[1]
        assert weights[0] != weights[2]

    def test_train_on_one_core_unless_asked_for_more(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Without data, because two threads would train for long on a busy machine."""
        arguments = ("train", "--data", tmp_path / "nowhere", "--out", tmp_path / "model")
        cores = len(os.sched_getaffinity(0))
        shown = Outcome(capsys, *arguments, "--threads", 2)
        assert shown.out.splitlines()[0] == f"training lisa-mini on 2 of {cores} cores (--threads 2)"
        assert torch.get_num_threads() == 2
        shown = Outcome(capsys, *arguments)
        assert shown.out.splitlines()[0] == f"training lisa-mini on 1 of {cores} cores (--threads 1)"
        assert torch.get_num_threads() == 1

    def test_train_on_all_events_with_the_lift_of_another_model(
        self, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "everything"
        arguments = ("train", "--data", data, "--out", out, "--epochs", 1, "--train-on", "all", "--lift-from", model)
        assert Outcome(capsys, *arguments, "--lift", 3).status == 2
        shown = Outcome(capsys, *arguments)
        assert shown.status == 0
        lifts = [json.loads((path / "metrics.json").read_text())["lift"] for path in (model, out)]
        assert lifts[0] == lifts[1]
        strength, count = lifts[1]["strength"], lifts[1]["followers"]
        assert f"get a higher score (strength {strength:g}, {8 * count} bytes per item)" in " ".join(shown.out.split())
        refused(Outcome(capsys, "evaluate", "--model", out, "--data", data), "train with --train-on train")

    @pytest.mark.parametrize(
        ("call", "hint"),
        [("stage", "To start again, run the same command"), ("epoch", "the same command with --resume")],
    )
    def test_an_interrupted_training_says_how_to_continue(
        self, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], call: str, hint: str
    ) -> None:
        with patch.object(TrainingProgress, call, side_effect=KeyboardInterrupt):
            shown = Outcome(capsys, "train", "--data", data, "--out", tmp_path / "m", "--epochs", 1)
        assert shown.status == 130
        assert shown.out.splitlines()[-1].endswith(hint)

    def test_train_and_serve_a_model_with_learned_codes(
        self, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out, arguments = tmp_path / "base codes", ("train", "--data", data, "--epochs", 1, "--preset")
        assert "lisarec evaluate" in Outcome(capsys, *arguments, "transformer-paper", "--out", tmp_path / "t").out
        shown = Outcome(capsys, *arguments, "lisa-base", "--codes-from", tmp_path / "t", "--out", out)
        assert f"Next: 'lisarec serve --model '{out}''" in " ".join(shown.out.split())
        assert Outcome(capsys, "evaluate", "--model", out, "--data", data).status == 0


class TestServeAndReplay:
    def test_deliver_every_event_once(self, service: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
        without_last = Outcome(capsys, "replay", "--data", data, "--url", service, "--hold-out", 1, "--batch", 64)
        assert without_last.status == 0
        assert "0 duplicates, 0 for unknown items" in without_last.out
        everything = Outcome(capsys, "replay", "--data", data, "--url", service)
        assert "120 events accepted" in everything.out
        first = read_interactions(data)
        user = httpx.get(f"{service}/v1/users/{first.user_ids[0]}").raise_for_status().json()
        assert user["event_count"] == first.starts[1]
        assert user["last_item_id"] == first.item_ids[first.item[first.starts[1] - 1]]


LOADING = "INFO     app.cli.service: loading "


def refused(outcome: Outcome, reason: str) -> None:
    """Assert that the command failed with one line that contains this text; `serve` prints what it loads before."""
    assert outcome.status == 1
    (line,) = [one for one in outcome.err.splitlines() if LOADING not in one]
    assert line.startswith("lisarec: ")
    assert reason in line


class TestFailures:
    def test_no_data(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        nowhere = tmp_path / "nowhere"
        for command in (["train", "--out", tmp_path / "m"], ["replay"]):
            refused(
                Outcome(capsys, *command, "--data", nowhere), "does not exist; download one with 'lisarec data NAME'"
            )

    def test_no_model(self, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        refused(Outcome(capsys, "evaluate", "--model", tmp_path, "--data", data), "lisarec train")
        served = Outcome(capsys, "serve", "--model", tmp_path)
        refused(served, "lisarec train")
        assert f"{LOADING}{tmp_path}; " in served.err.splitlines()[0]

    def test_a_model_is_not_overwritten(self, model: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
        refused(Outcome(capsys, "train", "--data", data, "--out", model), "already contains a model; choose another")

    def test_nothing_to_resume(self, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        refused(Outcome(capsys, "train", "--data", data, "--out", tmp_path / "m", "--resume"), "omit --resume")

    def test_no_service(self, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("app.jobs.replay.START_FOR_S", 0.2)
        refused(
            Outcome(capsys, "replay", "--data", data, "--url", "http://127.0.0.1:9"), "the service with 'lisarec serve'"
        )

    def test_bench_without_a_service(self, capsys: pytest.CaptureFixture[str]) -> None:
        refused(Outcome(capsys, "bench", "--url", "recs.shop.example"), "is not an HTTP URL")
        refused(Outcome(capsys, "bench", "--url", "http://127.0.0.1:9"), "http://127.0.0.1:9 does not answer")

    def test_serving_other_hosts_requires_keys(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        refused(Outcome(capsys, "serve", "--model", model, "--host", "0.0.0.0"), "only on this machine")

    def test_no_keys(self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        serve = ("serve", "--model", model, "--data-dir", tmp_path, "--port", 0, "--keys", tmp_path / "keys")
        refused(Outcome(capsys, *serve), "create a key with 'lisarec keys add'")

    def test_unknown_data_set(self, capsys: pytest.CaptureFixture[str]) -> None:
        refused(Outcome(capsys, "data", "netflix"), "choose one of: ml-1m, beauty, ml-latest-small")

    def test_existing_data_set(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        shown = Outcome(capsys, "data", "ml-1m", "--out", tmp_path)
        assert shown.status == 1
        assert "remove it or choose another directory with --out" in shown.err
        assert "no redistribution" in shown.out

    def test_port_in_use(self, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            refused(Outcome(capsys, "demo", "--port", taken.getsockname()[1]), "--port 8001")

    def test_bugs_show_their_traceback(self, data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def broken(*_: object, **__: object) -> None:
            raise AssertionError("a bug")

        monkeypatch.setattr("model.training.train.train", broken)
        with pytest.raises(AssertionError, match="a bug"):
            main(["train", "--data", str(data), "--out", str(tmp_path / "m")])


def test_conflicting_settings_exit_2_without_showing_passwords(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LISAREC_REDIS_PASSWORD", "sesame-1")
    url = "redis://lisarec:sesame-2@127.0.0.1:1/0"
    shown = Outcome(capsys, "serve", "--model", "m", "--redis-url", url, "--tenant", "books=b")
    assert shown.status == 2
    assert "--keys FILE" in " ".join(shown.err.split())
    assert "sesame" not in shown.err + shown.out
    with pytest.raises(ValidationError) as refused:
        Settings(redis_url=url, tenants={"books": Path("b")})
    assert "sesame" not in str(refused.value)


def test_documented_environment_variables_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "Makefile", "docker-compose.yml"))]
    files += [file for file in (ROOT / "docker").rglob("*") if file.is_file()]
    text = "".join(file.read_text() for file in files if file.suffix in ("", ".md", ".yml", ".cfg", ".env"))
    names = set(re.findall(r"\bLISAREC_[A-Z_]*[A-Z]\b", text)) - {"LISAREC_MAX_REQUEST"}  # an example of a wrong one
    assert len(names) > 50
    for name in names:
        monkeypatch.setenv(name, "1")
    assert problem_of_unknown_variables() is None
    for name in ("SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_8000_TCP_ADDR", "REDIS_SERVICE_HOST"):
        monkeypatch.setenv(f"LISAREC_{name}", "10.0.0.1")  # Kubernetes sets these for a Service of that name
    assert problem_of_unknown_variables() is None
    monkeypatch.setenv("LISAREC_MAX_REQUEST", "")  # as good as not set, like every empty one
    assert problem_of_unknown_variables() is None


@pytest.mark.parametrize(
    "command",
    [
        ["serve"],
        ["rebuild", "--model", "m"],
        ["activate", "june"],
        ["experiment", "--end"],
        ["drop", "june"],
        ["archive", "--archive-dir", "a"],
        ["retrain"],
        ["backup", "--out", "file"],
        ["restore", "file", "--model", "m"],
    ],
    ids=" ".join,
)
def test_redis_and_data_dir_together_are_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shown = Outcome(capsys, *command, "--redis-url", "redis://127.0.0.1:1", "--data-dir", "d")
    assert shown.status == 2
    assert "pass one of --redis-url and --data-dir" in " ".join(shown.err.replace("│", " ").split())


def test_data_dir_overrides_redis_of_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LISAREC_REDIS_URL", "redis://127.0.0.1:1")
    refused(Outcome(capsys, "backup", "--out", tmp_path / "f", "--data-dir", tmp_path), f"'{tmp_path}' has no users")
    assert "lisarec: Redis failed" in Outcome(capsys, "backup", "--out", tmp_path / "f").err


def test_a_suggested_command_names_the_store_without_its_password() -> None:
    assert StoreOptions().command("lisarec serve") == "'lisarec serve'"
    assert StoreOptions(data_dir=Path("my shop")).command("lisarec serve") == "'lisarec serve --data-dir 'my shop''"
    assert StoreOptions("redis://db:6379/0").command("lisarec activate june", Path("models")) == (
        "'lisarec activate june --redis-url redis://db:6379/0 --models-dir models'"
    )
    shown = StoreOptions("redis://shop:sesame@db:6379,db2:6379/0").command("lisarec drop june")
    assert shown == "'lisarec drop june --redis-url redis://shop:PASSWORD@db:6379,db2:6379/0'"


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("512MiB", 512 << 20), ("1.5 gib", 3 << 29), ("4g", 4 << 30), ("2T", 2 << 40)]
)
def test_sizes_are_binary_in_all_notations(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train"], "--data"),
        (["train", "--data", "http://shop/data", "--out", "m"], "s3://"),
        (["train", "--data", "d", "--out", "m", "--preset", "huge"], "lisa-mini"),
        (["train", "--data", "d", "--out", "m", "--epochs", "0"], "epochs"),
        (["train", "--data", "d", "--out", "m", "--seed", str(2**32)], "4294967295"),
        (["train", "--data", "d", "--out", "m", "--lift", "inf"], "1000"),
        (["train", "--data", "d", "--out", "m", "--preset", "lisa-base", "--event-weight", "like=3"], "0 or 1"),
        (["train", "--data", "d", "--out", "m", "--memory", "much"], "4GiB"),
        (["train", "--data", "d", "--out", "m", "--preset", "lisa-base", "--memory", "3GiB"], "omit --memory"),
        (["evaluate", "--model", "m", "--data", "d", "--protocol", "best"], "loo_full"),
        (["serve", "--model", "m", "--port", "70000"], "port"),
        (["replay", "--data", "d", "--batch", "1001"], "batch"),
        (["serve", "--model", "m", "--tenant", "books"], "NAME=DIR"),
        (["serve", "--model", "m", "--insecure", "--keys", "k"], "omit one of them"),
        (["serve", "--model", "m", "--tls-certificate", "c"], "--tls-certificate needs --tls-key"),
        (["keys", "add", "--scope", "fly"], "recs:read"),
        (["fly"], "fly"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_exits_2(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Outcome(capsys, *arguments)
    assert shown.status == 2
    assert hint in " ".join(shown.err.split())
