"""The measured device: its name and driver, its memory bandwidth, its power; and timing on it."""

from __future__ import annotations

import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from statistics import mean, median
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from benchmarks.machine import cpu

# bytes a second of the memory, from NVIDIA's data sheets; a longer name comes before its prefix
PUBLISHED_BANDWIDTH = {
    "H200": 4.8e12,
    "H100 NVL": 3.9e12,
    "H100 PCIe": 2.0e12,
    "H100": 3.35e12,
    "A100-SXM4-80GB": 2.039e12,
    "A100 80GB": 1.935e12,
    "A100": 1.555e12,
    "V100": 0.9e12,
    "L40": 0.864e12,
    "A10": 0.6e12,
    "T4": 0.32e12,
    "L4": 0.3e12,
}
COPIED_BYTES = 1 << 30
WARM_UPS = 5
POWER_INTERVAL_S = 0.5


def machine(device: str) -> dict[str, Any]:
    """Return the processor, the device, the driver and the versions, which every result includes."""
    found: dict[str, Any] = {
        "cpu": cpu(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version_of("triton"),
        "cuda": torch.version.cuda,
        "device": device,
    }
    if is_cuda(device):
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "driver": _asked_of_nvidia_smi("driver_version"),
            "published_bytes_per_s": published_bandwidth(properties.name),
        }
    return found


def is_cuda(device: str) -> bool:
    """Return whether this is a CUDA device of torch."""
    return torch.device(device).type == "cuda"


def published_bandwidth(name: str) -> float | None:
    """Return the bytes a second from the data sheet; None if the device is not listed."""
    return next((bandwidth for known, bandwidth in PUBLISHED_BANDWIDTH.items() if known in name), None)


def copy_bandwidth(device: str, size: int = COPIED_BYTES) -> float:
    """Return the bytes a second, read and written, of a copy on the device."""
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / median(seconds_of(lambda: target.copy_(source), device, rounds=10))


def seconds_of(run: Callable[[], Any], device: str, rounds: int) -> list[float]:
    """Return the seconds of each round on the device, excluding the wait before it."""
    for _ in range(min(WARM_UPS, rounds)):
        run()
    if not is_cuda(device):
        return wall_seconds_of(run, rounds)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    torch.cuda.synchronize()
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def wall_seconds_of(run: Callable[[], Any], rounds: int) -> list[float]:
    """Return the wall time of each round in seconds; `run` has to wait for the device itself."""
    seconds = []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin_s)
    return seconds


def percentiles_ms(seconds: list[float]) -> dict[str, float]:
    """Return the median, the 90th and the 99th percentile in milliseconds."""
    p50, p90, p99 = (np.percentile(seconds, [50, 90, 99]) * 1e3).tolist()
    return {"p50_ms": p50, "p90_ms": p90, "p99_ms": p99}


def peak_bytes(device: str) -> int | None:
    """Return the peak of torch's allocated memory since ``forget_peak``; None if the device is not a GPU."""
    return torch.cuda.max_memory_allocated() if is_cuda(device) else None


def forget_peak(device: str) -> None:
    """Release unused memory, and reset the peak."""
    if is_cuda(device):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class PowerMeter:
    """Reads the power from nvidia-smi twice a second; ``watts`` is the mean at the end, None if there is no reading."""

    def __init__(self) -> None:
        self.watts: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _measure(self) -> None:
        readings = []
        while not self._ended.wait(POWER_INTERVAL_S):
            try:
                readings.append(float(_asked_of_nvidia_smi("power.draw") or ""))
            except ValueError:  # no nvidia-smi, or "[N/A]"
                return
        self.watts = mean(readings) if readings else None


def _asked_of_nvidia_smi(field: str) -> str | None:
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    command = [program, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return None
    lines = answer.stdout.split("\n")
    return lines[0].strip() if answer.returncode == 0 and lines[0].strip() else None


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
