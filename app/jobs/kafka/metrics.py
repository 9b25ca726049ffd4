"""The metrics of a consumer, and those of a publisher."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

from app.observability.job_metrics import JobMetrics

Outcome = Literal["accepted", "duplicate", "dead_letter"]
Rebalance = Literal["assigned", "revoked", "lost"]
BATCH_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60, 600)


class ConsumerMetrics(JobMetrics):
    """Outcomes of records, consumer lag, and waiting times."""

    def __init__(self) -> None:
        super().__init__()
        instruments = self._instruments
        self._records = instruments.counter(
            "lisarec_consume_records", "Processed records by outcome: accepted, duplicate or dead_letter", ["outcome"]
        )
        self.failures = instruments.counter(
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
        self.paused = instruments.gauge(
            "lisarec_consume_paused", "1 while a batch has been waiting for the service for more than a second"
        )
        self.batch_seconds = instruments.histogram(
            "lisarec_consume_batch_seconds", "Time to process a batch", BATCH_BUCKETS_S
        )
        for outcome in get_args(Outcome):
            self._records.labels(outcome)
        for change in get_args(Rebalance):
            self._rebalances.labels(change)

    def count(self, outcome: Outcome, records: int) -> None:
        """Count settled records."""
        self._records.labels(outcome).inc(records)

    def rebalanced(self, change: Rebalance, partitions: int) -> None:
        """Count partitions that came or went."""
        self._rebalances.labels(change).inc(partitions)

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


class PublisherMetrics(JobMetrics):
    """Published entries, how far the log is published, and failures."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = self._instruments.counter(
            "lisarec_publish_entries", "Log entries that the brokers have acknowledged"
        )
        self.failures = self._instruments.counter(
            "lisarec_publish_failures", "Failed reads of the log that are retried"
        )
        self._through = self._instruments.gauge(
            "lisarec_publish_through_timestamp_seconds",
            "All entries logged before this time are published; 0 before the log was read to its end",
        )

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Record the time at which a turn that publishes the whole log began, once it has ended."""
        began_s = time.time()
        yield
        self._through.set(began_s)
