"""Benchmarks, shortened, so that they keep working."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
import typer

from app.jobs.loadtest import load_generator, synthetic_catalogue
from app.jobs.loadtest.rate_sweep import Row
from benchmarks.harness import service_process
from benchmarks.harness.compose import ROOT
from benchmarks.harness.redis_cluster import BUS, free_node_port
from benchmarks.harness.service_process import LISTENING_PORTS
from benchmarks.inference import attention, constant_cost, personal_search, scan, worker_memory
from benchmarks.quality import mechanisms, served_equals_offline
from benchmarks.quality.training import threads
from benchmarks.rollout import model_switch
from benchmarks.service import closed_loop, long_logs, overload
from benchmarks.service.comparison.wrk import Answered
from benchmarks.storage import bucket, exactly_once, rebuild, redis_memory
from benchmarks.storage.s3_server import environment_for
from model.artifact import model_directory
from model.config import (
    MECHANISMS,
    Config,
    DataCard,
    MechanismRecipe,
    MechanismTraining,
    ModelConfig,
    SeenRule,
    TrainConfig,
)
from model.inference.scan import supported_paths
from model.mechanisms.train import train as train_mechanism
from model.training.loop import EpochReport, Progress
from model.training.train import train
from tests.benchmarks.support import require_servers
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "shop"
    config = Config(model=ModelConfig(width=32), training=TrainConfig(epochs=2))
    train(data, directory, config, progress=Progress())
    return directory


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_long_logs_do_not_delay_other_users(
    model: Path, store: Literal["sqlite", "redis"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only outcomes are checked; waiting times need an idle machine."""
    monkeypatch.setattr(long_logs, "VISITOR_EVENTS", 3_000)
    for turn in long_logs.measure(model, store, events=3_000, seconds=0.5):
        assert turn.plain, turn
        assert turn.posts, turn
        assert set(turn.statuses) <= {200, 202, 503}, turn  # 503: a state that is still being folded


@pytest.mark.parametrize("exclude_seen", ["none", "recent", "all"])
def test_served_equals_offline(data: Path, model: Path, exclude_seen: SeenRule) -> None:
    served_equals_offline.main(data, model, exclude_seen, users=150)


def test_served_equals_offline_on_redis_behind_the_load_balancer(data: Path, model: Path) -> None:
    require_servers()
    served_equals_offline.main(data, model, "all", users=150, replicas=2)


def test_events_count_once_through_several_replicas(model: Path) -> None:
    require_servers()
    exactly_once.main(model, events=3_000, replicas=2)


def test_memory_of_a_state_in_redis_is_bounded(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_servers()
    redis_memory.main(model)
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│ 1")]
    sizes = [int(line[2].strip().removesuffix(" B").replace(",", "")) for line in lines]
    assert len(sizes) == len(redis_memory.LENGTHS)
    assert sizes[0] < sizes[1] < sizes[2]  # that of a long history depends on its last items
    assert max(sizes) <= 4_300  # the largest state, and what Redis adds


def test_loads_of_both_versions_are_printed_with_ratios(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_servers("wrk")
    monkeypatch.setattr(closed_loop, "WARM_UP_S", 1)
    loads = ["hundred:1", "mixed:2"]
    closed_loop.main(model, other=ROOT, items=1_000, redis=1, load=loads, turns=1, seconds=1)
    printed = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│ ")]
    medians, ratios = ([row for row in printed if len(row) == width] for width in (10, 6))
    names = [*loads, f"mixed:2 {closed_loop.PAUSES}"]
    assert [row[1].strip() for row in medians] == [name for name in names for _ in ("this", "other")]
    assert [row[1].strip() for row in ratios] == names


def test_an_unknown_load_is_refused() -> None:
    for text in ("event", "event:0", "purchase:4", "event:x"):
        with pytest.raises(typer.BadParameter, match="event:16"):
            closed_loop.Load.of(text)


def test_a_rebuild_is_timed_by_stage_and_equals_single_folds(capsys: pytest.CaptureFixture[str]) -> None:
    require_servers()
    rebuild.main(events=3_000, users=100)
    printed = capsys.readouterr().out
    assert "fold alone:" in printed
    assert all(store in printed for store in ("SQLite", "Redis"))


def test_a_killed_archiver_archives_into_a_bucket_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_servers()
    for name in (*environment_for(""), "LISAREC_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # the bench sets them
    monkeypatch.setattr(bucket, "PART", 1 << 20)
    monkeypatch.setattr(bucket, "KILL_WITHIN_S", 0.5)
    bucket.main(events=2_000, kills=2, users=50)
    assert "each event is in the archive once" in capsys.readouterr().out


@pytest.fixture(scope="module")
def other_model(data: Path, model: Path) -> Path:
    directory = model.parent / "other"
    config = Config(model=ModelConfig(width=32, decay_rates=(0.1, 0.5)), training=TrainConfig(epochs=1))
    train(data, directory, config, progress=Progress())
    return directory


@pytest.mark.parametrize("redis", [True, False], ids=["redis", "sqlite"])
def test_no_request_fails_while_a_model_is_rebuilt_and_switched(
    model: Path, other_model: Path, redis: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_servers()
    for limit in ("RESPONSE_TIMEOUT_S", "CONNECT_TIMEOUT_S"):  # else those of a machine with nothing else to do
        monkeypatch.setattr(load_generator, limit, PATIENCE_S)
    model_switch.main(model, other_model, redis, events=100, recommendations=20, pause_s=0.5)


def test_a_failed_request_or_a_wrong_state_fails_the_benchmark(
    model: Path, other_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_servers()

    async def one_wrong(*_: object) -> list[str]:
        return ["user-1"]

    monkeypatch.setattr(model_switch, "wrong_states", one_wrong)
    with pytest.raises(typer.Exit):
        model_switch.main(model, other_model, False, events=100, recommendations=20, pause_s=0.1)


def test_a_service_that_differs_from_the_evaluation_fails_the_benchmark(
    data: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = served_equals_offline.serve_ranks
    monkeypatch.setattr(served_equals_offline, "serve_ranks", lambda *args: asked(*args) * 0 + 11)
    with pytest.raises(typer.Exit):
        served_equals_offline.main(data, model, "none", users=150)


def test_the_state_of_a_long_history_stays_within_its_size_limit(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(constant_cost.measure(model_directory.load(model), tmp_path, (10, 3000), rounds=5))
    (sizes,) = (line for line in capsys.readouterr().out.splitlines() if "bytes of the state" in line)
    of_short, of_long = (int(size.replace(",", "")) for size in sizes.replace("│", " ").split()[4:6])
    assert of_short < of_long <= 4_000


def test_the_memory_of_a_worker_is_measured(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic_catalogue.write_enlarged(tmp_path, model, 2_000, "trained")
    worker_memory.main(model, users=20, large=tmp_path)
    printed = capsys.readouterr().out
    assert "2,000 items" in printed
    assert printed.count(" MB") == 12


def test_free_ports_are_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this and other processes, also before a server listens."""
    first = random.randrange(*LISTENING_PORTS)  # others who run this test have taken ports, too
    ports = range(first, first + 8)
    monkeypatch.setattr(service_process, "LISTENING_PORTS", (ports.start, ports.stop))
    others = "from benchmarks.harness import service_process as s; s.LISTENING_PORTS = {}, {}; print(s.free_port())"
    mine = {service_process.free_port() for _ in range(3)}
    other = subprocess.run(
        [sys.executable, "-c", others.format(ports.start, ports.stop)], capture_output=True, text=True, check=True
    )
    assert len(mine) == 3
    assert int(other.stdout) not in mine


def test_no_connection_gets_the_port_of_a_node_or_its_bus() -> None:
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {free_node_port() for _ in range(5)}
    assert len(ports) == 5
    assert all(LISTENING_PORTS[1] <= port < port + BUS < first_of_connections for port in ports)


def test_a_soak_detects_growing_memory_and_failed_requests() -> None:
    row = Row(10, 5, 60, 1, 1, 1, 1, {}, 0, 1, 1, 1, resident_mb=[100, 200])
    assert list(overload.misses_of_soak([row, replace(row, resident_mb=[102, 190])])) == []
    grown, failed = replace(row, resident_mb=[100, 205]), replace(row, errors={"503": 1})
    assert len(list(overload.misses_of_soak([row, grown]))) == 1
    assert len(list(overload.misses_of_soak([row, failed, row]))) == 1


def test_attention_is_timed() -> None:
    with torch.inference_mode():
        found = attention.stepwise([1, 20], rounds=1)
        assert {tuple(one.seconds) for one in found.values()} == {(1, 20)}
        for name in ("LISA", "softmax", "softmax, fused"):
            assert attention.FORWARD[name](130)().shape == (130, attention.WIDTH)


def test_attention_by_chunks_equals_attention_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        torch.manual_seed(0)
        whole = attention.lisa(300)()
        torch.manual_seed(0)
        monkeypatch.setattr(attention, "CHUNK_POSITIONS", 64)
        torch.testing.assert_close(attention.lisa(300)(), whole)


def test_every_scan_path_is_timed_beside_torch(capsys: pytest.CaptureFixture[str]) -> None:
    scan.main([3_000], [10], rounds=2)
    printed = capsys.readouterr().out
    assert all(printed.count(f"{path}, k 10 ") == 3 for path in (*supported_paths(), "torch"))


@pytest.mark.parametrize(("name", "expected"), [("lisa-base-paper", 3.19), ("lisa-mini-paper", 2.51)])
def test_compression_equals_table_2_of_the_paper(name: str, expected: float) -> None:
    shape = MECHANISMS[name]
    books = [(shape.codebooks, shape.codewords), (shape.target_codebooks, shape.target_codewords)]
    kept = [each for each in books if each[1]]
    assert round(mechanisms.compression_ratio(3_416, shape.width, kept), 2) == expected


def test_the_scan_of_a_trained_model_is_timed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scan.main([3_000], [10], rounds=2, model=model)
    printed = capsys.readouterr().out
    assert f"3,000 {model.name}'s items" in printed
    assert all(printed.count(f"{path}, k 10 ") == 1 for path in (*supported_paths(), "torch"))


@pytest.mark.parametrize(("words", "put"), [(0, 0), (500, 0), (500, 300)])
def test_searches_are_timed_beside_plain_requests(
    model: Path, words: int, put: int, capsys: pytest.CaptureFixture[str]
) -> None:
    personal_search.main(model, items=2_000, words=words, rounds=4, put=put)
    printed = capsys.readouterr().out
    for kind in ("plain", "the first search", "two words, for a user", "a typo", "nothing, for a user"):
        assert f"│ {kind} " in printed


def test_trainings_are_timed_beside_busy_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one thread, and a sleeping process as load, because more would take long on a busy machine."""
    monkeypatch.setattr(threads, "BUSY", "import signal; signal.pause()")
    monkeypatch.delenv("OMP_NUM_THREADS")  # as the trainings lack it, so that they can be forks
    shop = threads.make_shop(tmp_path / "shop", items=200, users=60)
    threads.main([shop], threads=[1], busy=[1], epochs=1, repeats=1)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "as with one thread" in line]
    assert shop.name in line


def test_mechanisms_are_trained_and_evaluated_once(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = mechanisms.TrainingOptions(epochs=1, loss="softmax", histories_per_batch=32, learning_rate=0.01)
    run = partial(mechanisms.main, data, tmp_path, training=training, rounds=1)
    two = ["lisa-soft-paper", "transformer-paper"]
    run(preset=two[:1], only_report=False, plot=None)
    weights = (tmp_path / data.name / two[0] / model_directory.WEIGHTS).stat().st_mtime_ns
    run(preset=two, only_report=True, plot=None)  # the other one is not there yet
    assert not model_directory.exists(tmp_path / data.name / two[1])
    run(preset=two, only_report=False, plot=tmp_path / "plot.svg")
    printed = capsys.readouterr().out
    soft, softmax = json.loads((tmp_path / data.name / "mechanisms.json").read_text())
    assert [soft["preset"], softmax["preset"]] == two
    assert (soft["state_bytes"], softmax["state_bytes"]) == (4 * 8 * 16, 4 * 2 * 300 * 128)
    assert soft["ties"]["hr_at_10"] >= soft["sampled100"]["hr_at_10"] > 0
    assert all(f"`{name}`" in printed for name in two)
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    assert (tmp_path / data.name / two[0] / model_directory.WEIGHTS).stat().st_mtime_ns == weights


def test_changed_codes_are_counted_across_interruptions(data: Path, tmp_path: Path) -> None:
    training = MechanismTraining(epochs=3, loss="softmax", histories_per_batch=64, learning_rate=0.01)
    recipe = MechanismRecipe(
        model=MECHANISMS["lisa-mini-paper"], training=training, data=DataCard(train_on="validation")
    )

    class Interrupted(mechanisms.TrainingRecorder):
        def epoch(self, report: EpochReport) -> None:
            super().epoch(report)
            if report.epoch == 1:
                raise KeyboardInterrupt

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for out in (whole, broken):
        out.mkdir()
    train_mechanism(data, whole, recipe, progress=mechanisms.TrainingRecorder(whole))
    with pytest.raises(KeyboardInterrupt):
        train_mechanism(data, broken, recipe, progress=Interrupted(broken))
    train_mechanism(data, broken, recipe, resume=True, progress=mechanisms.TrainingRecorder(broken))
    changed = json.loads((whole / "codes_changed.json").read_text())
    assert changed[0] is None
    assert all(0 < share < 1 for share in changed[1:])
    assert json.loads((broken / "codes_changed.json").read_text()) == changed


WRK_SAYS = """Running 1s test @ http://127.0.0.1:8000
  1 threads and 16 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     4.37ms  808.51us  11.05ms   86.77%
    Req/Sec     3.67k   317.83     4.11k    63.64%
  Latency Distribution
     50%    4.25ms
     75%    4.56ms
     90%    4.89ms
     99%    9.96ms
  4022 requests in 1.10s, 5.36MB read
Requests/sec:   3654.50
"""


def test_output_of_wrk_is_parsed() -> None:
    answered = Answered.of(WRK_SAYS)
    assert answered.requests == 4022
    assert (answered.p50_us, answered.p90_us, answered.p99_us) == pytest.approx((4250, 4890, 9960))
    assert Answered.of(WRK_SAYS.replace("4.25ms", "425.00us")).p50_us == pytest.approx(425)
    for fault in ("  Non-2xx or 3xx responses: 5\n", "  Socket errors: connect 0, read 5, write 0, timeout 0\n"):
        with pytest.raises(RuntimeError, match="requests in"):
            Answered.of(WRK_SAYS + fault)
