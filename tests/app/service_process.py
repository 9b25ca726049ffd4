"""The service in its own process, or in a thread of the tests."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from app.main import create_app
from app.settings import Settings
from tests.app.conftest import logged_events
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]


class Process:
    """``lisarec serve`` in its own process on a free port, configured by environment variables."""

    def __init__(self, log: Path, environment: Mapping[str, str] | None = None, /, **settings: object) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LISAREC_")}
        # TMPDIR: a process that is killed leaves its temporary files behind
        environment = {**inherited, "TMPDIR": str(log.parent), **(environment or {})}
        environment |= {f"LISAREC_{name.upper()}": str(value) for name, value in {"port": 0, **settings}.items()}
        self._log = log
        with log.open("w") as file:
            command = [sys.executable, "-m", "app", "serve"]
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=file)

    def wait_until_ready(self) -> None:
        scheme, host, port = self._wait_for_line(r" on (https?)://(\S+):(\d+), ").groups()
        self.address = ("::1" if host.startswith("[") else "127.0.0.1", int(port))
        self.url = f"{scheme}://{host}:{port}"
        self._wait_for_line("startup complete")
        wait_until(self._lets_in, self.log)  # a worker of several says so just before it listens

    def _lets_in(self) -> bool:
        try:
            socket.create_connection(self.address).close()
        except ConnectionRefusedError:
            return False
        return True

    def _wait_for_line(self, pattern: str) -> re.Match[str]:
        found = wait_until(lambda: re.search(pattern, self.log()) or self.process.poll() is not None, self.log)
        assert isinstance(found, re.Match), self.log()
        return found

    def log(self) -> str:
        return self._log.read_text()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def running(directory: Path, model_dir: Path) -> Iterator[Process]:
    """Serve a model on a new SQLite store in the directory."""
    process = Process(directory / "log", model_dir=model_dir, data_dir=directory)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.kill()


@pytest.fixture
def launch(model_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start processes over the tiny model; those that the test leaves are killed."""
    launched: list[Process] = []

    def launch_process(**settings: object) -> Process:
        settings = {"model_dir": model_dir, "data_dir": tmp_path / "state", **settings}
        launched.append(Process(tmp_path / f"log-{len(launched)}", **settings))
        launched[-1].wait_until_ready()
        return launched[-1]

    yield launch_process
    for process in launched:
        process.kill()


@contextmanager
def serve_in_thread(settings: Settings) -> Iterator[str]:
    """Serve on a free port from a thread of this process; yields the URL."""
    server = uvicorn.Server(uvicorn.Config(create_app(settings), port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the service did not start"
        thread.join(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def raw_exchange(address: tuple[str, int], request: bytes) -> bytes:
    """Send bytes; return everything until the server closes or falls silent."""
    with socket.create_connection(address, timeout=PATIENCE_S) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(65_536):
            answer += chunk
    return answer


def logged_ids(model_dir: Path, data_dir: Path, user_id: str, **settings: Any) -> list[str]:
    events = asyncio.run(logged_events(Settings(model_dir=model_dir, data_dir=data_dir, **settings), user_id))
    return [event.event_id for event in events]
