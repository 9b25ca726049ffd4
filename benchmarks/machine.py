"""The machine that a benchmark measures on: its CPU, which stands beside the numbers, and its browser."""

from __future__ import annotations

import shutil
from pathlib import Path


def cpu() -> str:
    """Return the name of the CPU, as Linux says it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def chromium() -> str | None:
    """Return the path of Chromium, if there is one: the headless shell, which needs less CPU time, or the browser."""
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")
