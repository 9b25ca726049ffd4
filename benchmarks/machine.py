"""The machine that a benchmark measures on, as it says beside its numbers."""

from __future__ import annotations

from pathlib import Path


def cpu() -> str:
    """Return the name of the CPU, as Linux says it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
