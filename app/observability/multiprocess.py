"""Metrics of several worker processes, which write their numbers into files of one folder."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector
from typing_extensions import override

SERVED = "lisarec_generation"
"""The gauge of the processes that serve a generation."""


def living_workers(shared_dir: Path) -> list[int]:
    """Return the process ids of living workers, and drop the gauges of dead ones; their counters stay."""
    workers = {int(file.stem.rpartition("_")[2]) for file in shared_dir.glob("*.db")}
    living = {pid for pid in workers if _is_alive(pid)}
    for dead in workers - living:
        with suppress(FileNotFoundError):  # another worker does the same
            mark_process_dead(dead, str(shared_dir))
    return sorted(living)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process: the id was reused
        return False
    return True


class WorkerNumbers(Collector):
    """Collects the numbers of all workers, without generations that none serves, and skips files that are empty."""

    def __init__(self, shared_dir: Path) -> None:
        self._shared_dir = shared_dir

    @override
    def collect(self) -> Iterator[Metric]:
        files = [str(file) for file in self._shared_dir.glob("*.db") if _has_numbers(file)]
        for metric in MultiProcessCollector.merge(files):
            if metric.name == SERVED:
                metric.samples = [sample for sample in metric.samples if sample.value]
            yield metric


def _has_numbers(file: Path) -> bool:
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:  # it belonged to a worker that died
        return False


class WorkerProcesses(Collector):
    """Collects memory, processor time and open files of each worker, labelled with its process id."""

    def __init__(self, workers: Sequence[int]) -> None:
        self._workers = workers

    @override
    def collect(self) -> Iterator[Metric]:
        by_name: dict[str, Metric] = {}
        for worker in self._workers:
            for metric in ProcessCollector(pid=partial(int, worker), registry=None).collect():
                merged = by_name.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    merged.add_sample(sample.name, {**sample.labels, "pid": str(worker)}, sample.value)
        yield from by_name.values()
