"""The visit to a GPU in short: on one where there is one, else by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.jobs.datasets import synthetic_shop

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not there", allow_module_level=True)

from benchmarks.inference.gpu import captured, correctness, run, scan_bandwidth, serving, training
from benchmarks.inference.gpu.device import PUBLISHED_BANDWIDTH, published_bandwidth
from benchmarks.inference.gpu.stage import (
    DONE,
    FAILED,
    RUNNING,
    SKIPPED,
    StageOptions,
    StageRecorder,
    read_result,
)
from model.inference.scan_gpu import TritonScan

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def options(tmp_path: Path) -> StageOptions:
    return StageOptions(tmp_path, seconds=600, device=DEVICE, is_quick=True, items=(20_000,))


@pytest.fixture
def recorder(options: StageOptions) -> StageRecorder:
    return StageRecorder("some", options)


def visit(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.inference.gpu.run", "--out", str(out), *arguments]
    without_a_device = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=without_a_device, capture_output=True, text=True)


def test_without_a_device_the_interpreter_shows_that_answers_are_right(tmp_path: Path) -> None:
    ended = visit(tmp_path, "--quick", "--items", "11000")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "need one, and were left out" in " ".join(ended.stdout.split())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [stage["stage"] for stage in summary["stages"]] == ["correctness"]
    (stage,) = summary["stages"]
    assert stage["status"] == DONE
    assert [row["holds"] for row in stage["rows"]] == [True] * 5
    assert summary["machine"]["torch"] == torch.__version__
    assert json.loads((tmp_path / "correctness.json").read_text()) == stage


def test_without_a_device_and_quick_nothing_was_measured(tmp_path: Path) -> None:
    ended = visit(tmp_path, "--stage", "training")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["stages"] == []


def test_a_stage_that_fails_does_not_stop_the_others(options: StageOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "STAGES", {"absent": 0.5, "correctness": 0.5})
    absent, good = run.run_stages(replace(options, items=(1_000,)), ["absent", "correctness"])
    assert (absent.status, absent.is_good) == (FAILED, False)
    assert "ModuleNotFoundError" in absent.reason
    assert (good.status, good.is_good) == (DONE, True)


def test_stages_for_which_no_time_is_left_are_skipped_and_named(options: StageOptions) -> None:
    results = run.run_stages(replace(options, seconds=1), ["captured", "serving"])
    assert [(result.status, result.reason) for result in results] == [(SKIPPED, "the time was up")] * 2
    assert read_result(options.out, "serving").status == SKIPPED


def test_a_result_stands_there_after_every_row(options: StageOptions, recorder: StageRecorder) -> None:
    recorder.add("a law", holds=True)
    found = read_result(options.out, "some")
    assert (found.status, found.rows, found.is_good) == (RUNNING, [{"measured": "a law", "holds": True}], True)
    assert not recorder.fits("what takes long", 10_000)
    assert "would take about 10000 s" in read_result(options.out, "some").rows[1]["skipped"]
    recorder.add("another law", holds=False)
    assert not read_result(options.out, "some").is_good


def test_options_reach_the_process_of_a_stage(options: StageOptions) -> None:
    for given in (options, replace(options, data=Path("data"), model=Path("model"), items=())):
        assert StageOptions.from_json(given.to_json()) == given


def test_the_bandwidth_of_a_name_is_that_of_the_longest_one_in_it() -> None:
    assert published_bandwidth("NVIDIA H200") == 4.8e12
    assert published_bandwidth("NVIDIA H100 80GB HBM3") == 3.35e12
    assert published_bandwidth("NVIDIA L40S") == 0.864e12
    assert published_bandwidth("something else") is None
    assert all(published_bandwidth(name) == bandwidth for name, bandwidth in PUBLISHED_BANDWIDTH.items())


def test_a_scan_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert correctness.scan_equals_brute_force(11_000, DEVICE)
    find = TritonScan.top_k
    monkeypatch.setattr(TritonScan, "top_k", lambda self, *asked: tuple(part[:, ::-1] for part in find(self, *asked)))
    assert not correctness.scan_equals_brute_force(11_000, DEVICE)


def test_captured_batches_are_timed(options: StageOptions, recorder: StageRecorder) -> None:
    captured.measure(replace(options, items=()), recorder)
    timed = [row for row in recorder.result.rows if "ms_per_query" in row]
    assert len(timed) == 2 * 2 * 2  # sizes of batches, with and without a graph, with and without bitmaps
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in timed)


def test_the_scan_is_a_share_of_the_bandwidth(options: StageOptions, recorder: StageRecorder) -> None:
    scan_bandwidth.measure(options, recorder)
    shares = [row for row in recorder.result.rows if "share_of_copy" in row]
    assert [row["measured"] for row in shares] == [f"20,000 items, batch of 1, k {k}" for k in (1, 10)]
    assert all(row["share_of_copy"] > 0 and row["bytes"] == 20_000 * 12.125 for row in shares)


def test_trainings_are_timed_in_both_precisions(options: StageOptions, recorder: StageRecorder, tmp_path: Path) -> None:
    (tmp_path / "ml-1m").mkdir()
    synthetic_shop.generate(tmp_path / "ml-1m", shoppers=60)
    training.measure(replace(options, data=tmp_path), recorder)
    mixed, single, *others = recorder.result.rows
    assert [row["measured"] for row in (mixed, single)] == ["ml-1m, mixed precision", "ml-1m, float32"]
    assert all(row["is_whole"] and row["epochs"] == 1 and row["events_per_s"] > 0 for row in (mixed, single))
    assert all("is not there" in row["skipped"] for row in others)


def test_a_training_whose_time_is_up_is_said_to_be_cut(
    options: StageOptions, recorder: StageRecorder, tmp_path: Path
) -> None:
    (data := tmp_path / "shop").mkdir()
    synthetic_shop.generate(data, shoppers=60)
    training.measure_training(data, "cut", 0.0, True, (options, recorder))
    (row,) = recorder.result.rows
    assert (row["is_whole"], row["epochs"], row["events_per_s"]) == (False, 0, None)


def test_a_service_is_measured_under_load(options: StageOptions, recorder: StageRecorder, model: Path) -> None:
    serving.measure(replace(options, model=model), recorder)
    row = recorder.result.rows[0]
    assert row["measured"] == "20,000 items, 20 recommendations/s wanted"
    assert row["recommendations_per_s"] > 0


def test_the_mean_of_a_batch_is_that_of_the_time_between_two_scrapes() -> None:
    spent = {
        "lisarec_batch_queries_sum": 12.0,
        "lisarec_batch_queries_count": 4.0,
        'lisarec_engine_seconds_sum{stage="scan"}': 0.5,
        'lisarec_engine_seconds_count{stage="scan"}': 2.0,
        'lisarec_engine_seconds_sum{stage="step"}': 0.0,
        'lisarec_engine_seconds_count{stage="step"}': 0.0,
    }
    assert serving.of_batches(spent) == {"queries_per_batch": 3.0, "scan_ms_per_batch": 250.0}
