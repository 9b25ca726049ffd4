"""The machine that a benchmark measures on: its CPU and load, the memory of this process, and its browser."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def cpu() -> str:
    """Return the name of the CPU, as Linux says it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def load_averages() -> str:
    """Return the load averages of the last 1, 5 and 15 minutes as text."""
    return ", ".join(f"{load:.1f}" for load in os.getloadavg())


def memory_bytes(field: str) -> int:
    """Return VmRSS, the current memory of this process, or VmHWM, its peak, as Linux reports them.

    `getrusage` would include the peak of the process that started this one.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def chromium() -> str | None:
    """Return the path of Chromium, if there is one: the headless shell, which needs less CPU time, or the browser."""
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")
