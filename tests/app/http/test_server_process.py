"""The service as a process: start-up, malformed requests, and shutdown without losses."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn

from app.main import serve
from app.observability.version import own_version
from app.serving.model_locations import load_model
from app.settings import Settings
from benchmarks.harness.service_process import free_port
from model.artifact.model_directory import Artifact, ArtifactError
from storage.errors import StorageUnavailable
from tests.app.conftest import write_model
from tests.app.service_process import ROOT, Process, logged_ids, raw_exchange, running
from tests.storage.redis.servers import RedisServer
from tests.waiting import PATIENCE_S, wait_until

DRAIN_S = 5  # long enough to see it


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A shared process for tests that do not end it."""
    with running(tmp_path_factory.mktemp("server"), model_dir) as process:
        yield process


def test_startup_logs_what_is_served(server: Process, model_dir: Path) -> None:
    model = httpx.get(f"{server.url}/v1/model").json()
    log = server.log()
    assert f"lisarec {own_version()} on {server.url}, one process, device cpu" in log
    assert "no API keys; store: SQLite in '" in log
    assert f"tenant main: model {model_dir.name} ({model['tag']}), {model['items']:,} items" in log


class Clicker(threading.Thread):
    """Posts events on one connection until the server ends; records the acknowledged ones."""

    def __init__(self, url: str, user_id: str) -> None:
        super().__init__()
        self._url = url
        self.user_id = user_id
        self.acknowledged: list[str] = []
        self.statuses: Counter[int] = Counter()
        self.start()

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as client:
            for n in range(1_000_000):
                event = {"event_id": f"e-{n}", "user_id": self.user_id, "item_id": "item-1"}
                try:
                    response = client.post("/v1/events", json=event)
                except httpx.TransportError:
                    return
                self.statuses[response.status_code] += 1
                if response.status_code == 200:
                    self.acknowledged.append(event["event_id"])


def test_startup_warns_of_too_few_file_descriptors(launch: Callable[..., Process]) -> None:
    process = launch(max_open_connections=resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    assert process.log().count("LISAREC_MAX_OPEN_CONNECTIONS") == 1


def test_a_missing_body_times_out(launch: Callable[..., Process]) -> None:
    process = launch(body_timeout_s=0.5, drain_s=0)
    with socket.create_connection(process.address, timeout=PATIENCE_S) as slow:
        slow.sendall(b"POST /v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        answer = b""
        while b"}}" not in answer and (chunk := slow.recv(65_536)):  # head and body may come apart
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 408"), answer
    assert b'"body_too_slow"' in answer


@pytest.mark.usefixtures("interpreter_starts")
def test_sigterm_answers_accepted_requests_and_loses_nothing(
    launch: Callable[..., Process], model_dir: Path, tmp_path: Path
) -> None:
    process = launch(drain_s=DRAIN_S, body_timeout_s=PATIENCE_S)
    assert httpx.get(f"{process.url}/readyz").status_code == 200
    clickers = [Clicker(process.url, f"user-{n}") for n in range(6)]
    wait_until(lambda: all(len(clicker.acknowledged) > 10 for clicker in clickers))

    body = b'{"event_id": "slow", "user_id": "slow", "item_id": "item-1"}'
    slow = accepted_without_body(process.address, len(body))
    slow.sendall(body[:10])
    process.terminate()
    draining = wait_until(lambda: answer if (answer := httpx.get(f"{process.url}/readyz")).is_error else None)
    assert (draining.status_code, draining.json()["error"]["code"]) == (503, "draining")
    assert draining.headers["connection"] == "close"
    assert httpx.get(f"{process.url}/healthz").status_code == 200
    process.terminate()  # whoever supervises it may tell it again
    wait_until_refused(process.address)
    process.terminate()
    slow.sendall(body[10:])
    assert slow.recv(65_536).startswith(b"HTTP/1.1 200")
    slow.close()

    assert process.exit_code() == 0, process.log()
    assert logged_ids(model_dir, tmp_path / "state", "slow") == ["slow"]
    for clicker in clickers:
        clicker.join(PATIENCE_S)
        assert set(clicker.statuses) == {200}
        assert len(clicker.acknowledged) > 10
        logged = logged_ids(model_dir, tmp_path / "state", clicker.user_id)
        assert logged[: len(clicker.acknowledged)] == clicker.acknowledged
        assert len(logged) <= len(clicker.acknowledged) + 1  # the one whose answer did not arrive
    assert "Traceback" not in process.log()


def test_a_killed_process_leaves_no_partial_response(server: Process) -> None:
    """Head and body are sent in one write; otherwise a kill between two writes would truncate the response."""
    event = b'{"user_id": "whole", "item_id": "item-1"}'
    requests = [
        b"POST /v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(event), event),
        b"GET /v1/users/whole/recommendations HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/model HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n",
    ]
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        for request in requests * 50:
            connection.sendall(request)
            head, _, body = connection.recv(1 << 20).partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None
            assert len(body) == int(length[1])
        connection.sendall(b"HEAD /v1/model HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(1 << 20).endswith(b"\r\n\r\n")


def test_requests_longer_than_the_shutdown_timeout_get_503(launch: Callable[..., Process]) -> None:
    process = launch(drain_s=0, shutdown_timeout_s=1, body_timeout_s=PATIENCE_S)
    with accepted_without_body(process.address, 100) as slow:
        process.terminate()
        head, _, body = slow.recv(65_536).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in head
    assert json.loads(body)["error"]["code"] == "draining"
    assert process.exit_code() == 0
    assert "Traceback" not in process.log()


@pytest.mark.usefixtures("interpreter_starts")
def test_ctrl_c_skips_the_drain_delay(launch: Callable[..., Process]) -> None:
    process = launch(drain_s=600)
    process.process.send_signal(signal.SIGINT)
    assert process.exit_code() == 0
    assert "Traceback" not in process.log()


def require_shared_users(process: Process) -> None:
    """Assert that each worker counts the events of the others."""
    with httpx.Client(base_url=process.url, timeout=PATIENCE_S) as client:
        client.post("/v1/events", json={"user_id": "ada", "item_id": "item-0"})
    counts = []
    for n in range(1, 8):  # a connection each, so that both workers are asked
        httpx.post(f"{process.url}/v1/events", json={"user_id": "ada", "item_id": f"item-{n}"})
        counts.append(httpx.get(f"{process.url}/v1/users/ada").json()["event_count"])
    assert counts == list(range(2, 9))


def test_workers_share_users_and_answer_accepted_requests(launch: Callable[..., Process]) -> None:
    process = launch(workers=2, port=free_port(), drain_s=0, body_timeout_s=PATIENCE_S)
    require_shared_users(process)
    body = b'{"user_id": "slow", "item_id": "item-1"}'
    with accepted_without_body(process.address, len(body)) as slow:
        slow.sendall(body[:1])
        process.terminate()
        wait_until_refused(process.address)
        slow.sendall(body[1:])
        assert slow.recv(65_536).startswith(b"HTTP/1.1 200")
    assert process.exit_code() == 0


@pytest.mark.slow
def test_a_worker_that_is_unresponsive_for_seconds_is_not_killed(launch: Callable[..., Process]) -> None:
    """As on an overloaded machine; uvicorn's default would kill it after five seconds."""
    process = launch(workers=2, port=free_port())
    children = psutil.Process(process.process.pid).children()
    workers = [child for child in children if not any("resource_tracker" in part for part in child.cmdline())]
    assert len(workers) == 2
    workers[0].suspend()
    time.sleep(8)
    workers[0].resume()
    assert all(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)
    assert "has died" not in process.log()
    require_shared_users(process)


SWITCH_OF_A_WORKER = """
import asyncio, gc, signal, weakref
from app.main import create_worker_app

async def law():
    async with app.router.lifespan_context(app) as state:
        service = state["services"].by_tenant["main"]
        replaced = weakref.ref(service.catalogue)
        await service.switcher.activate("june")
        while replaced() is not None:
            await asyncio.sleep(0.1)
            gc.collect()

signal.signal(signal.SIGTERM, lambda *_: None)  # as a server does
app = create_worker_app()
asyncio.run(law())
"""


def test_a_worker_frees_its_initial_model_after_a_switch(tmp_path: Path) -> None:
    for seed, name in enumerate(("may", "june")):
        write_model(tmp_path / name, seed)
    environment = {"LISAREC_MODEL_DIR": str(tmp_path / "may"), "LISAREC_DATA_DIR": str(tmp_path / "state")}
    (program := tmp_path / "switch.py").write_text(SWITCH_OF_A_WORKER)
    command = [sys.executable, str(program)]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True, timeout=PATIENCE_S)


def test_workers_share_redis_and_end_with_their_killed_parent(
    launch: Callable[..., Process], redis_server: RedisServer
) -> None:
    process = launch(workers=2, port=free_port(), drain_s=0, redis_url=redis_server.url)
    require_shared_users(process)
    workers = psutil.Process(process.process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.kill()
    _, left = psutil.wait_procs(workers, timeout=PATIENCE_S)
    assert left == []


def accepted_without_body(address: tuple[str, int], length: int) -> socket.socket:
    """A connection with an accepted event whose body has not been sent."""
    connection = socket.create_connection(address, timeout=PATIENCE_S)
    head = b"POST /v1/events HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % length)
    assert connection.recv(65_536) == b"HTTP/1.1 100 Continue\r\n\r\n"
    return connection


def wait_until_refused(address: tuple[str, int]) -> None:
    """Wait until new connections are refused, when all workers have closed their sockets."""

    def is_refused() -> bool:
        try:
            socket.create_connection(address).close()
        except ConnectionRefusedError:
            return True
        return False

    wait_until(is_refused)


def test_acknowledged_events_survive_a_kill_of_redis(
    launch: Callable[..., Process], model_dir: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    process = launch(redis_url=redis_server.url, drain_s=0)
    clickers = [Clicker(process.url, f"user-{n}") for n in range(4)]

    def wait_for_more(status: int) -> None:
        before = [clicker.statuses[status] for clicker in clickers]
        wait_until(lambda: all(one.statuses[status] > n for one, n in zip(clickers, before, strict=True)), process.log)

    for _ in range(3):
        wait_for_more(200)
        redis_server.kill()
        wait_for_more(503)
        redis_server.start()
    wait_for_more(200)
    process.terminate()
    assert process.exit_code() == 0, process.log()
    for clicker in clickers:
        clicker.join(PATIENCE_S)
        assert set(clicker.statuses) == {200, 503}
        logged = logged_ids(model_dir, tmp_path / "state", clicker.user_id, redis_url=redis_server.url)
        assert len(set(logged)) == len(logged)
        assert set(clicker.acknowledged) <= set(logged)


def test_malformed_requests_are_refused_and_disturb_no_others(server: Process) -> None:
    nonsense = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a plain port
        b"GET\r\n\r\n",
        b"GET /v1/users/\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /v1/events HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ]
    for request in nonsense:
        answer = raw_exchange(server.address, request)
        if answer:
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400"), request
            assert json.loads(body)["error"]["code"] in ("not_http", "invalid_json"), request
    raw_exchange(server.address, b'POST /v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"user_id"')
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/readyz").status_code == 200
        assert client.get("/v1/users/a%1Fb").status_code == 422
        counted = 'lisarec_request_seconds_count{method="other",route="unmatched",status="400"} '
        assert counted in client.get("/metrics").text
    assert "Traceback" not in server.log()
    assert "Invalid HTTP" not in server.log()  # or anybody could fill it


@pytest.mark.parametrize("declared", [True, False])
def test_a_too_large_upload_gets_413(server: Process, declared: bool) -> None:
    chunks = [b" " * 65_536] * 64
    with httpx.Client(base_url=server.url) as client:
        response = client.post("/v1/events", content=b"".join(chunks) if declared else iter(chunks))
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        assert client.get("/readyz").status_code == 200  # the connection is still good


def test_expect_100_continue_of_a_too_large_body_gets_413(server: Process) -> None:
    head = b"POST /v1/events HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2000000\r\n\r\n"
    assert raw_exchange(server.address, head).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("settings", "failure", "message"),
    [
        ({"model_dir": "no-such-model"}, ArtifactError, "run 'lisarec train"),
        ({"redis_url": "http://127.0.0.1"}, ValueError, "redis://"),
        ({"data_dir": "/dev/null/state"}, StorageUnavailable, "cannot open"),
    ],
)
def test_a_failed_start_names_its_cause(
    model_dir: Path, tmp_path: Path, settings: dict[str, Any], failure: type[Exception], message: str
) -> None:
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(failure, match=message):
            serve(Settings(**{"model_dir": model_dir, "data_dir": tmp_path, **settings}))
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)


def test_idle_timeouts_exceed_those_of_proxies(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that reuses a connection while the service closes it answers a POST with 502."""

    def run(server: uvicorn.Server, sockets: Sequence[socket.socket]) -> None:
        timeouts.append(server.config.timeout_keep_alive)
        for listener in sockets:
            listener.close()

    monkeypatch.setattr("uvicorn.Server.run", run)
    timeouts: list[int] = []
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        serve(Settings(model_dir=model_dir, data_dir=tmp_path, port=0))
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)
    (timeout_s,) = timeouts
    assert timeout_s > 600  # of Google Cloud's load balancers, the longest that nobody can set


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_sigterm_during_startup_ends_the_process(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while Python ignores exceptions of the handler, as in a destructor."""

    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def load(place: Path, settings: Settings) -> Artifact:
        Dying()
        return load_model(place, settings)

    monkeypatch.setattr("app.serving.model_locations.load_model", load)
    monkeypatch.setattr("uvicorn.Server.run", lambda *_: pytest.fail("it serves"))
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            serve(Settings(model_dir=model_dir, data_dir=tmp_path, port=0))
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)
    assert ended.value.code == 0
