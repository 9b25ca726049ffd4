"""The metrics of a consumer, and the server that Prometheus scrapes."""

from __future__ import annotations

from typing import Any, Literal, get_args

from prometheus_client import ProcessCollector, start_http_server

from app.observability.instruments import Instruments

Outcome = Literal["accepted", "duplicate", "dead_letter"]
Rebalance = Literal["assigned", "revoked", "lost"]
BATCH_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60, 600)


class ConsumerMetrics:
    """Outcomes of records, consumer lag, and waiting times."""

    def __init__(self) -> None:
        instruments = Instruments()
        self.registry, self.declared = instruments.registry, instruments.declared
        ProcessCollector(registry=self.registry)
        self._records = instruments.counter(
            "lisarec_consume_records", "Processed records by outcome: accepted, duplicate or dead_letter", ["outcome"]
        )
        self._failures = instruments.counter(
            "lisarec_consume_failures", "Failed requests to the service that are retried"
        )
        self._rebalances = instruments.counter(
            "lisarec_consume_rebalances", "Partitions by change: assigned, revoked or lost", ["change"]
        )
        self._lag = instruments.gauge(
            "lisarec_consume_lag_records",
            "Unprocessed records of a partition of this consumer, updated every two seconds",
            ["topic", "partition"],
        )
        self._paused = instruments.gauge(
            "lisarec_consume_paused", "1 while a batch has been waiting for the service for more than a second"
        )
        self.batch_seconds = instruments.histogram(
            "lisarec_consume_batch_seconds", "Time to process a batch", BATCH_BUCKETS_S
        )
        for outcome in get_args(Outcome):
            self._records.labels(outcome)
        for change in get_args(Rebalance):
            self._rebalances.labels(change)

    def listen(self, host: str, port: int) -> None:
        """Serve GET /metrics in a separate thread; OSError when the address is not available."""
        start_http_server(port, host, self.registry)

    def count(self, outcome: Outcome, records: int) -> None:
        """Count settled records."""
        self._records.labels(outcome).inc(records)

    def count_failure(self) -> None:
        """Count a request that is retried."""
        self._failures.inc()

    def rebalanced(self, change: Rebalance, partitions: int) -> None:
        """Count partitions that came or went."""
        self._rebalances.labels(change).inc(partitions)

    def pause(self, is_paused: bool) -> None:
        """Record whether partitions are paused."""
        self._paused.set(is_paused)

    def read_lag(self, statistics: Any) -> None:
        """Read the lags from librdkafka's statistics: of the stored offset, else the committed one, else the first."""
        self._lag.clear()
        for topic, of_topic in statistics["topics"].items():
            for number, partition in of_topic["partitions"].items():
                known = [partition["consumer_lag_stored"], partition["consumer_lag"]]
                if partition["lo_offset"] >= 0:
                    known.append(partition["hi_offset"] - partition["lo_offset"])
                lag = next((records for records in known if records >= 0), None)
                if partition["fetch_state"] == "active" and lag is not None:
                    self._lag.labels(topic, number).set(lag)
