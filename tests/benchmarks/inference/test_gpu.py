"""The GPU benchmark, shortened: on a GPU, or on Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console

from app.jobs.datasets import synthetic_shop

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not there", allow_module_level=True)

from benchmarks.inference.gpu import captured, correctness, run, serving, synthetic_model, training
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
from model.config import ModelConfig
from model.inference.scan_gpu import TritonScan
from model.training.loop import EpochReport

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).parents[3]
Rows = dict[str, list[dict[str, Any]]]
"""What a visit has measured, by stage."""


@pytest.fixture
def options(tmp_path: Path) -> StageOptions:
    return StageOptions(tmp_path, seconds=600, device=DEVICE, is_quick=True, items=(20_000,))


@pytest.fixture
def recorder(options: StageOptions) -> StageRecorder:
    return StageRecorder("some", options)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Rows of a run without a GPU by stage, with an ample time limit."""
    out, printed = tmp_path_factory.mktemp("rehearsal"), StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(run, "console", Console(file=printed, width=160))
        with pytest.raises(typer.Exit) as ended:
            run.main(out, quick=True, budget_s=6000, items=None, model=None, data=None, stage=None)
    assert ended.value.exit_code == 0, printed.getvalue()
    assert "torch finds no GPU: the stages were rehearsed." in printed.getvalue()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["machine"]["torch"] == torch.__version__
    assert [(stage["stage"], stage["status"]) for stage in summary["stages"]] == [(name, DONE) for name in run.STAGES]
    assert all(json.loads((out / f"{stage['stage']}.json").read_text()) == stage for stage in summary["stages"])
    return {stage["stage"]: stage["rows"] for stage in summary["stages"]}


def test_the_interpreter_verifies_results(rehearsal: Rows) -> None:
    assert [row["holds"] for row in rehearsal["correctness"]] == [True] * (3 + 2 + 2)


def test_captured_batches_are_timed(rehearsal: Rows) -> None:
    timed = [row for row in rehearsal["captured"] if "ms_per_query" in row]
    assert len(timed) == 2 * 2 * 2  # sizes of batches, with and without a graph, with and without bitmaps
    for row in timed:
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert min(row["upload_ms"], row["graph_ms"], row["download_ms"]) > 0
        assert min(row["queries_per_s"], row["queries_per_s_of_two_callers"]) > 0


def test_the_scan_is_reported_as_a_share_of_the_bandwidth(rehearsal: Rows) -> None:
    shares = [row for row in rehearsal["scan_bandwidth"] if "share_of_copy" in row]
    assert [row["measured"] for row in shares] == [f"20,000 items, batch of 1, k {k}" for k in (1, 10)]
    assert all(row["share_of_copy"] > 0 and row["bytes"] == 20_000 * 12.125 for row in shares)


def test_a_service_is_measured_under_load(rehearsal: Rows) -> None:
    (row,) = rehearsal["serving"]
    assert row["measured"] == "20,000 items, 20 recommendations/s wanted"
    assert min(row["recommendations_per_s"], row["queries_per_batch"], row["step_ms_per_batch"]) > 0
    assert min(row["wait_for_batch_ms"], row["wait_for_engine_ms"]) >= 0
    assert "device_ms_per_batch" not in row  # the CPU has ranked


def test_trainings_are_timed_in_both_precisions(rehearsal: Rows) -> None:
    mixed, single = rehearsal["training"]
    assert [row["measured"] for row in (mixed, single)] == [
        "made-up shop, mixed precision",
        "made-up shop, float32",
    ]
    assert all(row["is_whole"] and row["epochs"] == 1 and row["events_per_s"] > 0 for row in (mixed, single))
    assert single["products"] == "torch.float32"


def test_missing_data_are_named(options: StageOptions, recorder: StageRecorder, tmp_path: Path) -> None:
    training.measure(replace(options, is_quick=False), recorder)
    training.measure(replace(options, is_quick=False, data=tmp_path), recorder)
    no_data, *absent = [row["skipped"] for row in recorder.result.rows]
    assert no_data == "no data; give --data or LISAREC_DATA"
    assert [skipped.removeprefix(f"{tmp_path}/") for skipped in absent] == [
        f"{name} is not there" for name in ("ml-1m", "completejourney") for _ in range(2)
    ]


def test_bytes_per_item_equal_the_documentation() -> None:
    model = synthetic_model.untrained(1_000, "cpu", ModelConfig())
    assert captured.resident_bytes(model) == 156 * 1_000


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.inference.gpu.run", "--out", str(tmp_path), "--stage", "training"]
    without_a_device = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=ROOT, env=without_a_device, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["stages"] == []


def test_a_failed_stage_does_not_stop_the_others(options: StageOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "STAGES", {"absent": 0.5, "correctness": 0.5})
    absent, good = run.run_stages(replace(options, items=(1_000,)), ["absent", "correctness"])
    assert (absent.status, absent.is_good) == (FAILED, False)
    assert "ModuleNotFoundError" in absent.reason
    assert (good.status, good.is_good) == (DONE, True)


def test_stages_without_time_left_are_skipped_and_named(options: StageOptions) -> None:
    results = run.run_stages(replace(options, seconds=1), ["captured", "serving"])
    assert [(result.status, result.reason) for result in results] == [(SKIPPED, "the time was up")] * 2
    assert read_result(options.out, "serving").status == SKIPPED


def test_results_are_saved_after_every_row(options: StageOptions, recorder: StageRecorder) -> None:
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


def test_the_longest_matching_device_name_gives_the_bandwidth() -> None:
    assert published_bandwidth("NVIDIA H200") == 4.8e12
    assert published_bandwidth("NVIDIA H100 80GB HBM3") == 3.35e12
    assert published_bandwidth("NVIDIA L40S") == 0.864e12
    assert published_bandwidth("something else") is None
    assert all(published_bandwidth(name) == bandwidth for name, bandwidth in PUBLISHED_BANDWIDTH.items())


def test_a_wrong_scan_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert correctness.scan_equals_brute_force(11_000, DEVICE)
    find = TritonScan.top_k
    monkeypatch.setattr(TritonScan, "top_k", lambda self, *asked: tuple(part[:, ::-1] for part in find(self, *asked)))
    assert not correctness.scan_equals_brute_force(11_000, DEVICE)


def test_a_training_out_of_time_is_reported_as_truncated(
    options: StageOptions, recorder: StageRecorder, tmp_path: Path
) -> None:
    (data := tmp_path / "shop").mkdir()
    synthetic_shop.generate(data, shoppers=60)
    training.measure_training(data, "cut", 0.0, True, (options, recorder))
    (row,) = recorder.result.rows
    assert (row["is_whole"], row["epochs"], row["events_per_s"]) == (False, 0, None)


def test_time_to_cpu_quality_ends_at_the_first_epoch_that_reaches_it() -> None:
    progress = training.TimedProgress(seconds=1_000)
    for epoch, ndcg_at_10 in enumerate([0.15, 0.196, 0.199]):
        progress.epoch(EpochReport(epoch, 1.0, ndcg_at_10, 0.3, 1.0))
    assert training.seconds_to_quality(progress, 0.1949) == progress.seconds_to_epochs[1]
    assert training.seconds_to_quality(progress, 0.197) == progress.seconds_to_epochs[1]  # 99 % of it
    assert training.seconds_to_quality(progress, 0.25) is None
    assert training.seconds_to_quality(progress, None) is None


def test_the_rate_of_a_truncated_training_is_taken_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [100.0]
    monkeypatch.setattr("benchmarks.inference.gpu.training.time.monotonic", lambda: clock_s[0])
    progress = training.TimedProgress(seconds=50)
    assert progress.epochs_per_s is None
    for clock_s[0], share in ((110.0, 0.25), (112.0, 0.5), (114.0, 0.75)):
        progress.batch(1, share, 1.0, 100)
    assert progress.epochs_per_s == 0.5 / 4
    clock_s[0] = 151.0
    with pytest.raises(training.TimeUp):
        progress.batch(2, 1.0, 1.0, 100)
    assert progress.epochs_per_s == 1.75 / 41


def test_the_mean_batch_is_taken_between_two_scrapes() -> None:
    spent = {
        "lisarec_batch_queries_sum": 12.0,
        "lisarec_batch_queries_count": 4.0,
        'lisarec_engine_seconds_sum{stage="scan"}': 0.5,
        'lisarec_engine_seconds_count{stage="scan"}': 2.0,
        'lisarec_engine_seconds_sum{stage="step"}': 0.0,
        'lisarec_engine_seconds_count{stage="step"}': 0.0,
        'lisarec_batch_wait_seconds_sum{until="batch"}': 0.6,
        'lisarec_batch_wait_seconds_count{until="batch"}': 12.0,
        'lisarec_batch_wait_seconds_sum{until="engine"}': 0.5,
        'lisarec_batch_wait_seconds_count{until="engine"}': 4.0,
    }
    means = serving.of_batches(spent)
    assert means == pytest.approx(
        {"queries_per_batch": 3.0, "scan_ms_per_batch": 250.0, "wait_for_batch_ms": 50.0, "wait_for_engine_ms": 125.0}
    )
