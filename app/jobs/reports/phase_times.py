"""The duration of each phase of a job, and the peak memory of its process."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

MIB = 1 << 20
BLOCK_BYTES = 1024  # the unit in which Linux reports the peak memory of a process


class PhaseTimes:
    """Adds up the seconds of phases, which run one after another and may run again.

    seconds  of each phase that has ended, in the order in which they began
    """

    def __init__(self, get_time: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self._get_time = get_time
        self._phase: str | None = None
        self._begin_s = 0.0

    def begin(self, phase: str) -> None:
        """End the current phase, and begin this one; do nothing if it is the same."""
        if phase != self._phase:
            self.end()
            self._phase, self._begin_s = phase, self._get_time()

    def end(self) -> None:
        """End the current phase, if there is one."""
        if self._phase is not None:
            passed_s = self._get_time() - self._begin_s
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + passed_s
            self._phase = None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the time of a block for a phase."""
        self.begin(phase)
        try:
            yield
        finally:
            self.end()

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add the phases of a part of the job."""
        for phase, one in seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + one

    def __str__(self) -> str:
        parts = [f"{phase} {seconds:.0f} s" for phase, seconds in self.seconds.items()]
        return ", ".join([*parts, f"peak memory {peak_bytes() / MIB:,.0f} MiB"])


def peak_bytes() -> int:
    """Return the peak memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BLOCK_BYTES
