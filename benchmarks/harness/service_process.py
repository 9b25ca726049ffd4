"""A service in its own process on a free port, with a store that is empty at the start and gone at the end."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

START_TIMEOUT_S = 120.0


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_service(model: Path, *options: str) -> Iterator[str]:
    """Serve a model directory, on an empty SQLite unless the options name a store; yields the URL once it is ready."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    with TemporaryDirectory() as store:
        command = [sys.executable, "-m", "app", "serve", "--model", str(model), "--port", str(port), *options]
        store_options = [] if {"--redis-url", "--data-dir"} & set(options) else ["--data-dir", store]
        service = subprocess.Popen([*command, *store_options], stdout=subprocess.DEVNULL)
        try:
            wait_until_ready(url, service)
            yield url
        finally:
            service.terminate()
            service.wait(timeout=30)


def wait_until_ready(url: str, service: subprocess.Popen[bytes], path: str = "/readyz") -> None:
    """Wait until the path is answered with 200; raises RuntimeError if the process ends or takes too long."""
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_s:
        if service.poll() is not None:
            raise RuntimeError(f"the service ended with {service.returncode} before it was ready")
        try:
            if httpx.get(f"{url}{path}").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the service was not ready within {START_TIMEOUT_S:g} s")
