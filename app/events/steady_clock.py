"""The clock that timestamps events. It ignores a system clock that is set wrong for seconds.

A state treats events older than the user's last one as late. So a single event from a clock that is a year ahead would
make all of the user's events late for a year.
"""

import time
from dataclasses import dataclass

MAX_DRIFT_NS = 60 * 10**9  # drift that is followed at once; anything larger is a jump
UPTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # continues while the machine sleeps, if supported


@dataclass(frozen=True, slots=True)
class Jump:
    """A change of the machine's clock.

    offset_ns  the clock's new time minus the uptime
    seen_ns    the uptime when it was first seen
    """

    offset_ns: int
    seen_ns: int


class SteadyClock:
    """The machine's clock, except that a jump is followed only after it has persisted for some time."""

    def __init__(self, follow_after_s: float) -> None:
        self._follow_after_ns = int(follow_after_s * 1e9)
        self._offset_ns = time.time_ns() - time.clock_gettime_ns(UPTIME)
        self._jump: Jump | None = None

    def now_us(self) -> int:
        """Return the time in microseconds since the epoch."""
        uptime_ns = time.clock_gettime_ns(UPTIME)
        offset_ns = time.time_ns() - uptime_ns
        if abs(offset_ns - self._offset_ns) > MAX_DRIFT_NS:
            if self._jump is None or abs(offset_ns - self._jump.offset_ns) > MAX_DRIFT_NS:
                self._jump = Jump(offset_ns, uptime_ns)
            if uptime_ns - self._jump.seen_ns < self._follow_after_ns:
                return (self._offset_ns + uptime_ns) // 1_000
        self._jump, self._offset_ns = None, offset_ns
        return (self._offset_ns + uptime_ns) // 1_000
