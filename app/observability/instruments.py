"""Makes the instruments of a process, and remembers what they are: prometheus_client tells of those that were used."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from app.observability.buffered_histogram import BufferedHistogram


class DeclaredMetric(NamedTuple):
    """A metric as Prometheus sees it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    documentation: str
    labels: tuple[str, ...]


class Instruments:
    """Makes counters, gauges and buffered histograms in one registry.

    declared  what was made, in order
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.declared: list[DeclaredMetric] = []
        self._buffered: list[BufferedHistogram] = []

    def counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        """Make a counter, which Prometheus sees under the name with ``_total`` behind it."""
        self.declared.append(DeclaredMetric(f"{name}_total", "counter", documentation, tuple(labels)))
        return Counter(name, documentation, labels, registry=self.registry)

    def gauge(
        self, name: str, documentation: str, labels: Sequence[str] = (), mode: Literal["livesum", "livemax"] = "livesum"
    ) -> Gauge:
        """Make a gauge, whose values of several living workers are added up, or of which the largest counts."""
        self.declared.append(DeclaredMetric(name, "gauge", documentation, tuple(labels)))
        return Gauge(name, documentation, labels, registry=self.registry, multiprocess_mode=mode)

    def histogram(
        self, name: str, documentation: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        """Make a histogram; `buffered` makes what observes it, or one of its series."""
        self.declared.append(DeclaredMetric(name, "histogram", documentation, tuple(labels)))
        return Histogram(name, documentation, labels, buckets=buckets, registry=self.registry)

    def buffered(self, histogram: Histogram, buckets: Sequence[float]) -> BufferedHistogram:
        """Make a buffer in front of the histogram, or of one of its series."""
        buffered = BufferedHistogram(histogram, buckets)
        self._buffered.append(buffered)
        return buffered

    def flush(self) -> None:
        """Write all buffers into their histograms."""
        for buffered in self._buffered:
            buffered.flush()
