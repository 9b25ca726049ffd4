"""A file that operators edit while the service runs."""

import math
import time
from pathlib import Path

POLL_EVERY_S = 1.0  # a change is noticed within this time


class WatchedFile:
    """Detects changes of a file. It checks the file at most once per `POLL_EVERY_S`, except on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._polled_at_s = -math.inf
        self._stamp = _stamp(path)

    def has_changed(self, *, now: bool = False) -> bool:
        """Return whether the file has changed since the last check; with `now`, check it in any case."""
        if not now and time.monotonic() < self._polled_at_s + POLL_EVERY_S:
            return False
        self._polled_at_s = time.monotonic()
        before, self._stamp = self._stamp, _stamp(self.path)
        return self._stamp != before


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes when the file changes; None if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
