"""The whole loop in real processes: events, archive, a killed trainer, and the first model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from app.settings import Settings
from benchmarks.harness.service_process import free_port
from benchmarks.rollout.retraining import LoopSizes, measure
from tests.app.conftest import Client
from tests.waiting import wait_until

ROOT = Path(__file__).parents[4]


def test_the_first_generation_is_activated_without_failed_requests() -> None:
    tally = measure(
        "redis", LoopSizes(shoppers=170, test_shoppers=60, epochs=1, kills=1, kill_within_s=1), all_seasons=False
    )
    assert tally.kills == 1
    assert not tally.failures
    assert not tally.faults, (tally.faults, tally.findings)
    found = tally.findings["spring"]
    assert found["first"] > found["popular"]
    assert tally.findings["first generation"]["outcome"] == "activated"
    assert {name.split()[1] for name in tally.generations} == {"popular", "personalised"}


@pytest.mark.parametrize("kind", ["redis", "sqlite"])
def test_a_trainer_waits_for_the_first_service_without_counting_failures(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "sqlite":
        settings, store = Settings(data_dir=tmp_path / "state"), ["--data-dir", str(tmp_path / "state")]
    else:
        url = request.getfixturevalue("redis_server").url
        settings, store = Settings(redis_url=url), ["--redis-url", url]
    metrics, said = f"127.0.0.1:{free_port()}", tmp_path / "said"
    folders = ["--archive-dir", str(tmp_path / "archive"), "--models-dir", str(tmp_path / "models")]
    command = [sys.executable, "-m", "app", "retrain", "--every", "24h", "--metrics", metrics, *store, *folders]
    with said.open("w") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as trainer:
        try:
            wait_until(lambda: "retrying: " in said.read_text(), said.read_text)
            Client(settings).close()  # a service has made the store
            wait_until(lambda: "waiting: 0 events are archived" in said.read_text(), said.read_text)
            rounds = httpx.get(f"http://{metrics}/metrics").text
        finally:
            trainer.kill()
    assert 'lisarec_trainer_rounds_total{outcome="failed"} 0.0' in rounds


@pytest.mark.parametrize("command", [["archive", "--once"], ["retrain", "--models-dir", "models"]])
def test_jobs_log_json_if_configured(command: list[str], tmp_path: Path) -> None:
    Client(Settings(data_dir=tmp_path / "state")).close()  # a service has made the store
    done = subprocess.run(
        [sys.executable, "-m", "app", *command, "--data-dir", "state", "--archive-dir", "archive"],
        env={**os.environ, "LISAREC_LOG_FORMAT": "json", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {line["logger"] for line in lines} == {f"app.jobs.{'archive' if '--once' in command else 'retraining.loop'}"}
    assert done.stdout == ""
