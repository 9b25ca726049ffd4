"""What all tests share: the real data where it lies, and the rule that CI skips nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import hypothesis
import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.fork_server import ForkedPopen, RealPopen

# before anything imports torch, and for the processes that tests start: what is trained here is small, and threads
# that wait for each other make it ten times slower where other processes want the same cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

# before anything imports Triton, which then runs its kernels on the CPU
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# how long an example takes says more about the machine than about the law
hypothesis.settings.register_profile("lisarec", deadline=None)
hypothesis.settings.load_profile("lisarec")

# a process that is forked is there at once, one of its own after four seconds of imports
if sys.platform == "linux":
    subprocess.Popen = ForkedPopen  # type: ignore[misc]

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory of real data sets that LISAREC_DATA names; without it such tests are skipped, and fail in CI."""
    directory = os.environ.get("LISAREC_DATA")
    if not directory:
        pytest.skip("LISAREC_DATA does not point at the real data")
    return Path(directory)


@pytest.fixture
def interpreter_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the Python processes of this test start as operators start them, not as forks."""
    monkeypatch.setattr(subprocess, "Popen", RealPopen)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of this module alone: while it runs, this thread has an event loop, which others could not bear."""
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("there is no chromium; .ci/install brings Debian's")
    with sync_playwright() as playwright:
        # the sandbox does not work for root, as whom containers run tests, and nothing here is a stranger's
        browser = playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


class Server(ThreadingHTTPServer):
    daemon_threads = False  # closing the server waits for every answer

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that hang up: the tests make them do so."""


@pytest.fixture
def serve_http() -> Iterator[Callable[[type[BaseHTTPRequestHandler]], str]]:
    """Serve requests with a handler on a free port of this machine; gives the address."""
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
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure in CI, save for tests of hardware that a machine may lack."""
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("gpu") is None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "no reason"
        report.outcome = "failed"
        report.longrepr = f"in CI nothing is skipped: {reason}"
    return report
