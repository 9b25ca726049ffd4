"""Closed loops of requests by wrk, which leaves the cores to the service (Debian, Ubuntu: apt install wrk)."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

UNITS_US = {"us": 1.0, "ms": 1e3, "s": 1e6}
PERCENTILE = re.compile(r"(\d+)%\s+([\d.]+)(us|ms|s)\b")


@dataclass(frozen=True)
class Answered:
    """The result of wrk: the number of requests, all of them successful, and percentiles of their times."""

    requests: int
    p50_us: float
    p90_us: float
    p99_us: float

    @classmethod
    def of(cls, said: str) -> Answered:
        """Parse the output of wrk; raise RuntimeError if a request failed."""
        requests = re.search(r"(\d+) requests in", said)
        times = {share: float(time) * UNITS_US[unit] for share, time, unit in PERCENTILE.findall(said)}
        if "Non-2xx" in said or "Socket errors" in said or requests is None or requests[1] == "0" or "50" not in times:
            raise RuntimeError(said)
        return cls(int(requests[1]), times["50"], times["90"], times["99"])


def require_wrk() -> None:
    """End with a message if there is no wrk."""
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is missing; on Debian and Ubuntu: apt install wrk")


def send(url: str, script: str, connections: int, seconds: int) -> Answered:
    """Send the requests that a script in Lua makes, each after the answer to the one before it."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "requests.lua"
        path.write_text(script, encoding="utf-8")
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(path), url]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 60).stdout
    return Answered.of(said)


def cpu_s(service: psutil.Process) -> float:
    """Return the CPU seconds that the service's processes have used."""
    return sum(sum(process.cpu_times()[:2]) for process in (service, *service.children(recursive=True)))
