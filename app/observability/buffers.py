"""Buffers in front of Prometheus metrics, because single increments and observations cost ten times as much."""

from collections.abc import Sequence

import numpy as np
from prometheus_client import Counter, Histogram


class BufferedCounter:
    """Counts in memory, and adds the count to the counter when it is flushed.

    count  the increments since the last flush; its owner increments it
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.count = 0

    def flush(self) -> None:
        """Add the count to the counter."""
        if self.count:
            self._counter.inc(self.count)
            self.count = 0


class BufferedHistogram:
    """Buffers observations, and writes them into the histogram when it is flushed."""

    def __init__(self, histogram: Histogram, buckets: Sequence[float]) -> None:
        self._histogram = histogram
        self._bounds = np.array(buckets)
        self._observed: list[float] = []
        self.observe = self._observed.append

    def flush(self) -> None:
        """Write the buffer into the histogram. Other threads may observe meanwhile; only one may flush."""
        if not self._observed:
            return
        values = np.array(self._observed)
        del self._observed[: len(values)]
        counts = np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._bounds) + 1)
        # The library has no method that adds many observations at once; a test compares the result with `observe`.
        for bucket in counts.nonzero()[0]:
            self._histogram._buckets[bucket].inc(float(counts[bucket]))  # noqa: SLF001
        self._histogram._sum.inc(float(values.sum()))  # noqa: SLF001
