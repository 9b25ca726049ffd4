"""Runs the archiver at intervals, and retries after failures of the log or the archive."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from app.events.steady_clock import SteadyClock
from app.observability.job_metrics import JobMetrics
from app.settings import StoreSettings
from storage.archive.writer import ArchiveWriter
from storage.archiver.archiver import TurnCounts, archive_log
from storage.archiver.redis_source import RedisSource
from storage.archiver.source import LogSource
from storage.archiver.sqlite_source import SQLiteSource
from storage.errors import StorageUnavailable
from storage.folders.place import Place

PAUSE_AFTER_FAILURE_S = 5.0
FOLLOW_JUMPS_AFTER_S = 3_600.0  # a clock that is wrong for less time drops nothing
TURN_BUCKETS_S = (0.1, 0.5, 1, 5, 15, 60, 300, 1800)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ArchiverPlan:
    """How often to archive (None: once), and how long events stay in Redis and in the archive."""

    every_s: float | None
    keep_tail_s: float
    keep_days: int | None


class ArchiverMetrics(JobMetrics):
    """The metrics of an archiver."""

    def __init__(self) -> None:
        super().__init__()
        instruments = self._instruments
        self._turn_seconds = instruments.histogram(
            "lisarec_archive_turn_seconds", "Duration of a run of the archiver", TURN_BUCKETS_S
        )
        self.failures = instruments.counter("lisarec_archive_failures", "Failed runs")
        self._events = instruments.counter(
            "lisarec_archive_events", "Events by outcome: archived, trimmed or dropped", ["done"]
        )
        for done in ("archived", "trimmed", "dropped"):
            self._events.labels(done)
        self._through = instruments.gauge(
            "lisarec_archive_through_timestamp_seconds",
            "All events logged before this time are archived; 0 before the first run",
        )
        self._used = instruments.gauge(
            "lisarec_redis_used_bytes", "Used memory of a Redis server, as of the archiver's last attempt", ["server"]
        )
        self._limit = instruments.gauge(
            "lisarec_redis_limit_bytes", "maxmemory of a Redis server; 0 means no limit", ["server"]
        )

    @contextmanager
    def turn(self, source: LogSource) -> Iterator[Callable[[TurnCounts], None]]:
        """Measure one turn. Yields a function that records its counts."""
        began_s = time.time()
        with self._turn_seconds.time():
            yield self._count
        self._through.set(began_s)
        self.read_memory(source)

    def read_memory(self, source: LogSource) -> None:
        """Record how full the servers of the log are, if all of them answer."""
        with suppress(StorageUnavailable):
            for server, used, limit in source.memory_usage():
                self._used.labels(server).set(used)
                self._limit.labels(server).set(limit)

    def _count(self, counts: TurnCounts) -> None:
        self._events.labels("archived").inc(counts.archived)
        self._events.labels("trimmed").inc(counts.trimmed)
        self._events.labels("dropped").inc(counts.dropped)


def run_archiver(
    settings: StoreSettings, plan: ArchiverPlan, report: Callable[[str], None], metrics: ArchiverMetrics
) -> None:
    """Archive for ever, or once.

    report  is called with a line for each turn
    raises  StorageUnavailable  when the only turn fails
            StorageError        when log and archive do not belong together
    """
    while True:
        try:
            for counts in _turns(settings, plan, metrics):
                report(_summary(counts, settings.archive_dir))
            return
        except StorageUnavailable as exc:
            if plan.every_s is None:
                raise
            metrics.failures.inc()
            logger.warning("retrying: %s", exc)
            time.sleep(PAUSE_AFTER_FAILURE_S)


def _turns(settings: StoreSettings, plan: ArchiverPlan, metrics: ArchiverMetrics) -> Iterator[TurnCounts]:
    assert settings.archive is not None
    with ExitStack() as stack:
        source = stack.enter_context(open_source(settings))
        metrics.read_memory(source)  # Redis fills up while the archive cannot be written
        writer = stack.enter_context(ArchiveWriter.open(settings.archive))
        clock = SteadyClock(FOLLOW_JUMPS_AFTER_S)
        while True:
            with metrics.turn(source) as count:
                began_s, now = time.time(), datetime.fromtimestamp(clock.now_us() / 1e6, UTC)
                counts = archive_log(source, writer, now, keep_tail_s=plan.keep_tail_s, keep_days=plan.keep_days)
                writer.note_through(began_s)  # by the clock of the services that read it, even if it has jumped
                count(counts)
            yield counts
            if plan.every_s is None:
                return
            time.sleep(plan.every_s)


def open_source(settings: StoreSettings) -> AbstractContextManager[LogSource]:
    """Open the log of the store that the settings name; StorageUnavailable when it cannot be read, now or later."""
    if settings.redis_url is None:
        return SQLiteSource.open(settings.data_dir)
    return RedisSource.open(settings.redis_url_with_password, settings.redis_prefix)


def _summary(counts: TurnCounts, place: Place | None) -> str:
    done = {"removed from Redis": counts.trimmed, "deleted after --keep-days": counts.dropped}
    parts = [f"{events:,} {what}" for what, events in done.items() if events]
    return "; ".join([f"{counts.archived:,} events archived to {place}", *parts])
