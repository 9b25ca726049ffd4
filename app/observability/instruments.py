"""Creates the metrics of a process, and remembers them all: prometheus_client lists only those that were used."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from app.observability.buffers import BufferedCounter, BufferedHistogram
from app.observability.version import own_version


class DeclaredMetric(NamedTuple):
    """A metric as Prometheus sees it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    documentation: str
    labels: tuple[str, ...]


class Instruments:
    """Makes counters, gauges and buffered histograms in one registry, beginning with the version of the program.

    declared  the metrics, in the order of their creation
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.declared: list[DeclaredMetric] = []
        self._buffered: list[BufferedHistogram | BufferedCounter] = []
        build_info = self.gauge("lisarec_build_info", "Always 1; labelled with the version", ["version"], "livemax")
        build_info.labels(own_version()).set(1)

    def counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        """Create a counter. Prometheus adds ``_total`` to its name."""
        self.declared.append(DeclaredMetric(f"{name}_total", "counter", documentation, tuple(labels)))
        return Counter(name, documentation, labels, registry=self.registry)

    def gauge(
        self, name: str, documentation: str, labels: Sequence[str] = (), mode: Literal["livesum", "livemax"] = "livesum"
    ) -> Gauge:
        """Create a gauge. Of several living workers, the values are summed, or the largest is reported."""
        self.declared.append(DeclaredMetric(name, "gauge", documentation, tuple(labels)))
        return Gauge(name, documentation, labels, registry=self.registry, multiprocess_mode=mode)

    def histogram(
        self, name: str, documentation: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        """Create a histogram. `buffered` returns the object that observes it, or one of its series."""
        self.declared.append(DeclaredMetric(name, "histogram", documentation, tuple(labels)))
        return Histogram(name, documentation, labels, buckets=buckets, registry=self.registry)

    def buffered(self, histogram: Histogram, buckets: Sequence[float]) -> BufferedHistogram:
        """Create a buffer for the histogram, or for one of its series."""
        buffered = BufferedHistogram(histogram, buckets)
        self._buffered.append(buffered)
        return buffered

    def buffered_counter(self, counter: Counter) -> BufferedCounter:
        """Make a buffer in front of the counter, or of one of its series."""
        buffered = BufferedCounter(counter)
        self._buffered.append(buffered)
        return buffered

    def flush(self) -> None:
        """Write all buffers into their instruments."""
        for buffered in self._buffered:
            buffered.flush()
