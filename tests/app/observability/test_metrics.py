"""Metrics: latency by stage, failures, and aggregation over workers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from app.http import services
from app.http.auth.keys import add, make
from app.jobs.archive import ArchiverMetrics, ArchiverPlan
from app.jobs.archive import run_archiver as archive
from app.observability.buffers import BufferedHistogram
from app.observability.metrics import LATENCY_BUCKETS_S
from app.observability.version import own_version
from benchmarks.harness.service_process import fetch, free_port
from storage.archive.manifest import archived_through_s
from storage.archive.writer import ArchiveWriter
from storage.folders.folder import Folder
from tests.app.conftest import Client
from tests.app.service_process import Process
from tests.app.support import bearer
from tests.waiting import PATIENCE_S, until, wait_until

Labels = tuple[tuple[str, str], ...]


def samples(text: str) -> dict[tuple[str, Labels], float]:
    """Samples by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def samples_of(registry: CollectorRegistry) -> dict[tuple[str, Labels], float]:
    return samples(generate_latest(registry).decode())


def scrape(url: str) -> dict[tuple[str, Labels], float]:
    """Scrape over a new connection, so that any worker may answer."""
    return samples(fetch(f"{url}/metrics").raise_for_status().text)


def value(found: dict[tuple[str, Labels], float], name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def spans_of(response: httpx.Response) -> dict[str, float]:
    """Milliseconds by name from the Server-Timing header."""
    pairs = re.findall(r"(\w+);dur=([0-9.]+)", response.headers.get("server-timing", ""))
    return {name: float(ms) for name, ms in pairs}


def test_recommendations_report_time_by_stage(client: Client) -> None:
    client.click("ada", "item-1")
    for response in (
        client.get("/v1/users/ada/recommendations"),
        client.post("/v1/recommendations", json={"requests": [{"user_id": "ada"}, {"history": ["item-2"]}]}),
    ):
        spans = spans_of(response)
        assert spans.keys() == {"store", "step", "scan"}
        assert 0 < sum(spans.values()) < response.elapsed.total_seconds() * 1e3
    assert spans_of(client.get("/v1/users/nobody/recommendations")).keys() == {"store"}
    assert spans_of(client.post("/v1/recommendations", json={"history": ["item-2"]})).keys() == {"step", "scan"}
    assert "server-timing" not in client.get("/v1/model").headers


def test_stages_of_a_batch_are_counted(client: Client) -> None:
    client.click("ada", "item-1")
    client.post("/v1/recommendations", json={"requests": [{"user_id": "ada"}, {"history": ["item-2"]}]})
    found = samples(client.get("/metrics").text)
    assert value(found, "lisarec_batch_queries_sum") == 2
    assert value(found, "lisarec_engine_seconds_count", stage="step") == 1
    assert value(found, "lisarec_engine_seconds_count", stage="scan") == 1
    assert value(found, "lisarec_engine_seconds_count", stage="device") == 0  # of a GPU
    assert value(found, "lisarec_batch_wait_seconds_count", until="batch") == 2  # requests
    assert value(found, "lisarec_batch_wait_seconds_count", until="engine") == 1  # batches
    assert value(found, "lisarec_batch_wait_seconds_sum", until="batch") > 0
    assert value(found, "lisarec_store_seconds_count", call="append") == 1
    assert value(found, "lisarec_store_seconds_count", call="states") == 1


def test_events_are_counted_by_tenant(start: Callable[..., Client], tmp_path: Path) -> None:
    text = {}
    for tenant in ("main", "books"):
        text[tenant], key = make(tenant, ["events:write", "metrics:read"])
        add(tmp_path / "keys", key)
    client = start(tmp_path, tenants={"books": tmp_path / "books" / "first"}, keys_file=tmp_path / "keys")
    for tenant, item_ids in (("main", ["item-1", "unheard-of"]), ("books", ["unheard-of"] * 2)):
        events = [{"user_id": "ada", "item_id": one, "event_id": str(n)} for n, one in enumerate(item_ids)]
        client.post("/v1/events", json=events, headers=bearer(text[tenant]))
    found = samples(client.get("/metrics", headers=bearer(text["main"])).text)
    for tenant, accepted, unknown in (("main", 2, 1), ("books", 2, 2)):
        for outcome, count in (("accepted", accepted), ("unknown_item", unknown), ("duplicate", 0)):
            assert value(found, "lisarec_tenant_events_total", tenant=tenant, outcome=outcome) == count
    assert value(found, "lisarec_events_total", outcome="accepted") == 4
    client.close()


def test_metrics_name_the_served_generation(client: Client) -> None:
    model = client.get("/v1/model").json()
    found = samples(client.get("/metrics").text)
    labels = {"tenant": "main", "generation": model["generation"], "tag": model["tag"]}
    assert value(found, "lisarec_generation", **labels) == 1
    assert value(found, "lisarec_state_bytes", tenant="main") > 100
    assert value(found, "lisarec_build_info", version=own_version()) == 1
    assert value(found, "lisarec_queue_depth", queue="requests") == 1  # the one that asks


@pytest.mark.usefixtures("interpreter_starts")  # prometheus_client reads the environment when it is imported
@pytest.mark.parametrize("has_workers", [False, True], ids=["one-process", "workers"])
def test_metrics_omit_generations_that_no_process_serves(tmp_path: Path, *, has_workers: bool) -> None:
    program = """if True:
        from app.observability.metrics import Metrics
        from pathlib import Path
        import os
        shared_dir = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        metrics = Metrics(shared_dir and Path(shared_dir))
        for generation in ("may", "june", "june", "may", "july"):
            metrics.generations.set_served("main", generation, "tag", 100)
            metrics.generations.set_served("books", "spring", "tag", 100)
        print(metrics.exposition().decode())
    """
    environment = os.environ | ({"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} if has_workers else {})
    text = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    ).stdout
    told = {labels: count for (name, labels), count in samples(text).items() if name == "lisarec_generation"}
    assert {(dict(labels)["tenant"], dict(labels)["generation"]): count for labels, count in told.items()} == {
        ("main", "july"): 1,
        ("books", "spring"): 1,
    }


def test_metrics_show_the_lag_of_the_archive(
    start: Callable[..., Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_s: list[float | None] = []

    def note_through_s(folder: Folder) -> float | None:
        found_s.append(archived_through_s(folder))
        return found_s[-1]

    monkeypatch.setattr(services, "ASK_ARCHIVE_EVERY_S", 0.0)
    monkeypatch.setattr(services, "archived_through_s", note_through_s)
    archive_dir = tmp_path / "archive"
    client = start(tmp_path / "state", archive_dir=archive_dir)
    client.click("ada", "item-1")

    def lag_s() -> float | None:
        enough = len(found_s) + 2  # the first of them may have begun before, and what the second found is not yet told
        client.runner.run(until(lambda: len(found_s) > enough))
        return samples(client.get("/metrics").text).get(("lisarec_log_lag_seconds", ()))

    assert lag_s() is None  # no archiver has ever taken a turn
    once = ArchiverPlan(every_s=None, keep_tail_s=0, keep_days=None)
    archive(client.settings.model_copy(update={"archive_dir": archive_dir}), once, print, ArchiverMetrics())
    assert 0 < (lag_s() or 0) < PATIENCE_S
    with ArchiveWriter.open(archive_dir) as writer:
        writer.note_through(time.time() - 1000)
    assert 1000 < (lag_s() or 0) < 1000 + PATIENCE_S
    client.close()


def test_sampling_continues_while_the_archive_does_not_respond(
    start: Callable[..., Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, sampled = threading.Event(), 0
    sample = services.Services.sample

    def count_sample(own: services.Services) -> None:
        nonlocal sampled
        sampled += 1
        sample(own)

    monkeypatch.setattr(services, "SAMPLE_EVERY_S", 0.0)
    monkeypatch.setattr(services, "archived_through_s", lambda _: answers.wait(PATIENCE_S) and None)
    monkeypatch.setattr(services.Services, "sample", count_sample)
    client = start(tmp_path / "state", archive_dir=tmp_path / "archive")
    client.runner.run(until(lambda: sampled > 3))
    answers.set()
    client.close()


def test_store_failures_are_counted_by_call(client: Client) -> None:
    client.close_store()
    client.post("/v1/events", json={"user_id": "ada", "item_id": "item-1"})
    client.recommend("ada", exclude_seen="all")
    found = samples(client.get("/metrics").text)
    for call in ("append", "states", "log"):
        assert value(found, "lisarec_store_failures_total", call=call) == 1


def test_a_valid_request_id_is_kept_and_others_are_replaced(shared_client: Client) -> None:
    def answered(**headers: str | bytes) -> str:
        return str(shared_client.get("/healthz", headers=headers).headers["x-request-id"])

    assert answered(**{"X-Request-ID": "a-b_c.9"}) == "a-b_c.9"
    made = [
        answered(),
        answered(),
        *(answered(**{"X-Request-ID": wrong}) for wrong in ("", "a b", "x" * 65, b"\xc3\x85")),
    ]
    assert all(re.fullmatch("[0-9a-f]{16}", one) for one in made)
    assert len(set(made)) == len(made)


@given(st.lists(st.floats(0, 20) | st.sampled_from(LATENCY_BUCKETS_S)))
def test_buffered_observations_equal_direct_ones(values: list[float]) -> None:
    registries = [CollectorRegistry() for _ in range(2)]
    once, later = (Histogram("x", "x", buckets=LATENCY_BUCKETS_S, registry=registry) for registry in registries)
    buffered = BufferedHistogram(later, LATENCY_BUCKETS_S)
    for place, value in enumerate(values):
        once.observe(value)
        buffered.observe(value)
        if place % 3 == 0:
            buffered.flush()
    buffered.flush()
    expected, found = ({key: v for key, v in samples_of(one).items() if key[0] != "x_created"} for one in registries)
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(expected[key]) for key in expected)


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def crowd(model_dir: Path, temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A service of two workers with its own directory for temporary files."""
    directory = tmp_path_factory.mktemp("crowd")
    process = Process(
        directory / "log",
        {"TMPDIR": str(temporary)},
        model_dir=model_dir,
        data_dir=directory / "state",
        workers=2,
        port=free_port(),
        drain_s=0,
        log_format="json",
    )
    process.wait_until_ready()
    wait_until(lambda: len(workers(process.url)) == 2)
    yield process
    process.kill()


def workers(url: str) -> set[int]:
    """Process ids."""
    return {
        int(dict(labels)["pid"]) for (name, labels), _ in scrape(url).items() if name == "process_resident_memory_bytes"
    }


def post_clicks(url: str, count: int) -> None:
    for n in range(count):  # a connection each, so that both workers get some
        event = {"user_id": f"user-{n}", "item_id": f"item-{n % 7}"}
        httpx.post(f"{url}/v1/events", json=event).raise_for_status()


def test_scrapes_sum_all_workers_including_dead_ones(crowd: Process, temporary: Path) -> None:
    def accepted() -> float:
        return value(scrape(crowd.url), "lisarec_events_total", outcome="accepted")

    def serving() -> float:
        return sum(count for (name, _), count in scrape(crowd.url).items() if name == "lisarec_generation")

    post_clicks(crowd.url, 40)
    assert [accepted() for _ in range(8)] == [40] * 8
    wait_until(lambda: serving() == 2, lambda: str(serving()))
    assert value(scrape(crowd.url), "lisarec_build_info", version=own_version()) == 1
    before = workers(crowd.url)
    (shared,) = temporary.glob("lisarec-metrics-*")
    (shared / f"summary_{min(before)}.db").touch()  # as a worker leaves it for a moment when it makes one
    assert [accepted() for _ in range(8)] == [40] * 8
    os.kill(min(before), signal.SIGKILL)
    wait_until(lambda: len(now := workers(crowd.url)) == 2 and now != before)
    assert [accepted() for _ in range(8)] == [40] * 8
    wait_until(lambda: serving() == 2, lambda: str(serving()))
    post_clicks(crowd.url, 5)
    assert accepted() == 45
    crowd.terminate()
    assert crowd.exit_code() == 0
    assert list(temporary.iterdir()) == []
    lines = [json.loads(line) for line in crowd.log().splitlines()]
    assert {line["level"] for line in lines} >= {"info", "warning"}
    (died,) = (line["message"] for line in lines if line["level"] == "error")
    assert f"worker process {min(before)} has died" in died
