"""Distributed training: the same result as one process, a common end, and resuming with another number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.service_process import free_port
from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from model.config import Config
from model.data.interactions import Histories
from model.evaluation.trial import model_scorer
from model.training import train, trainer
from model.training.distributed.ending import ENDED
from model.training.distributed.processes import Processes
from model.training.loop import LAST_CHECKPOINT
from tests.model.training.train_together import EPOCHS
from tests.waiting import PATIENCE_S

Make = Callable[..., Any]
SCRIPT = Path(__file__).with_name("train_together.py")
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True, scope="module")
def _products_in_float32() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "matmul_dtype", lambda _: torch.float32)
        yield


@pytest.fixture(scope="module")
def config(tiny_config: Make) -> Config:
    made: Config = tiny_config(epochs=EPOCHS)
    return made


@pytest.fixture(scope="module")
def alone(shop: Path, config: Config, silent: Make, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return train.train(shop, tmp_path_factory.mktemp("alone") / "model", config, progress=silent())


def given(count: int) -> list[dict[str, str]]:
    """Environment variables that torchrun sets for its processes."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    shared |= {"TORCHELASTIC_RUN_ID": "test", "PYTHONPATH": str(ROOT)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def run_together(count: int, *arguments: object) -> list[tuple[int, str, str]]:
    """Run the script in processes like torchrun; return their statuses and outputs."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, arguments)],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in given(count)
    ]
    outputs = [process.communicate() for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def assert_same(one: Artifact, other: Artifact) -> None:
    """Assert equal codes, and equal losses and scores up to rounding."""
    assert one.config == other.config
    np.testing.assert_array_equal(one.target_codes, other.target_codes)
    for name, tolerance in (("loss", 1e-4), ("ndcg_at_10", 5e-3)):
        found, expected = ([epoch[name] for epoch in made.metrics["epochs"]] for made in (one, other))
        np.testing.assert_allclose(found, expected, rtol=tolerance)
    item = np.arange(20, dtype=np.int32)
    histories = Histories(item, np.ones(20, np.float32), np.array([0, 3, 4, 20]))
    np.testing.assert_allclose(model_scorer(one)(histories), model_scorer(other)(histories), atol=0.02)


def test_resuming_with_another_number_of_processes_gives_the_same_model(
    shop: Path, config: Config, alone: Artifact, silent: Make, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train.train(shop, tmp_path / "model", config, progress=silent(stop_after=0))
    done = run_together(2, shop, tmp_path / "model")
    made = model_directory.load(tmp_path / "model")
    assert [(status, printed.split()) for status, printed, _ in done] == 2 * [(0, [made.tag])], done
    assert_same(made, alone)
    assert {path.name for path in (tmp_path / "model").iterdir()} == {*model_directory.FILES, model_directory.MANIFEST}


def test_four_processes_with_limited_memory_give_the_same_model(shop: Path, alone: Artifact, tmp_path: Path) -> None:
    done = run_together(4, shop, tmp_path / "model", "", 2 << 30)
    made = model_directory.load(tmp_path / "model")
    assert [(status, printed.split()) for status, printed, _ in done] == 4 * [(0, [made.tag])], done
    assert_same(made, alone)


def test_bfloat16_processes_give_nearly_the_same_model(
    shop: Path, config: Config, silent: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "matmul_dtype", lambda _: torch.bfloat16)
    alone = train.train(shop, tmp_path / "alone", config, progress=silent())
    done = run_together(2, shop, tmp_path / "model", "", "", "bfloat16")
    made = model_directory.load(tmp_path / "model")
    assert [status for status, *_ in done] == [0, 0], done
    np.testing.assert_array_equal(made.target_codes, alone.target_codes)
    found, expected = ([epoch["loss"] for epoch in one.metrics["epochs"]] for one in (made, alone))
    np.testing.assert_allclose(found, expected, rtol=0.02)


def test_a_killed_process_ends_the_others_and_training_resumes(
    shop: Path, config: Config, alone: Artifact, silent: Make, tmp_path: Path
) -> None:
    (first, second) = run_together(2, shop, tmp_path / "model", 0)
    assert second[0] == -signal.SIGKILL
    assert (first[0], first[2].strip().splitlines()[-1]) == (1, f"error: {ENDED}")
    assert (tmp_path / "model" / LAST_CHECKPOINT).exists()
    assert not model_directory.exists(tmp_path / "model")
    rest = silent()
    made = train.train(shop, tmp_path / "model", config, resume=True, progress=rest)
    assert [report.epoch for report in rest.reports] == [1], "the epoch that had ended is kept"
    assert_same(made, alone)


JOIN_AND_STAY = """
import time
from model.training.distributed.processes import Processes
try:
    Processes.joined()
    print("joined", flush=True)
    while True:
        time.sleep(0.05)  # shortly, as a signal that another thread gets interrupts no sleep
except ValueError as exc:
    print(exc)
"""
SLOW_TORCH = """
import time
print("importing", flush=True)
time.sleep(120)
"""


def test_processes_end_when_torchrun_is_killed() -> None:
    shell = ["sh", "-c", '"$0" -c "$1" & wait', sys.executable, JOIN_AND_STAY]  # in the place of torchrun
    with subprocess.Popen(shell, env=os.environ | given(1)[0], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "joined\n"
        parent.kill()
        assert parent.stdout.read() == f"{ENDED}\n"  # at whose end the process has ended, too


def test_a_failure_is_reported_even_while_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    environment = os.environ | given(1)[0] | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    arguments = ["train", "--data", str(tmp_path), "--out", str(tmp_path / "model")]
    command = [sys.executable, "-c", "from app.cli.main import main; main()", *arguments]  # not forked with torch
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGTERM)
        _, printed = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, printed) == (1, f"lisarec: {ENDED}\n")


def test_without_torchrun_there_is_one_process() -> None:
    assert Processes.joined() == Processes(0, 1)
