"""Running the archiver: turn after turn, through failures of the log and of the archive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server

from app.settings import StoreSettings
from storage.archive import ArchiveWriter
from storage.archiver import Log, Moved, RedisLog, SQLiteLog, archive
from storage.errors import StorageUnavailable

PAUSE_AFTER_FAILURE_S = 5.0
TURN_BUCKETS_S = (0.1, 0.5, 1, 5, 15, 60, 300, 1800)


@dataclass(frozen=True)
class Turns:
    """How often to archive (None: once), and how long events stay in Redis and in the archive."""

    every_s: float | None
    keep_tail_s: float
    keep_days: int | None


class ArchiverMetrics:
    """What Prometheus reads of an archiver."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._turn_seconds = Histogram(
            "lisarec_archive_turn_seconds", "Time of one turn", buckets=TURN_BUCKETS_S, registry=registry
        )
        self._failures = Counter("lisarec_archive_failures", "Turns that failed", registry=registry)
        self._events = Counter(
            "lisarec_archive_events", "Events by what was done: archived, trimmed, dropped", ["done"], registry=registry
        )
        for done in ("archived", "trimmed", "dropped"):
            self._events.labels(done)
        self._through = Gauge(
            "lisarec_archive_through_timestamp_seconds",
            "Everything that was logged before this moment is in the archive",
            registry=registry,
        )
        self._used = Gauge("lisarec_redis_used_bytes", "Memory that a Redis server uses", ["server"], registry=registry)
        self._limit = Gauge("lisarec_redis_limit_bytes", "Its maxmemory; 0: none", ["server"], registry=registry)

    def listen(self, host: str, port: int) -> None:
        """Answer GET /metrics in a thread of its own. raises OSError when nothing can listen there"""
        start_http_server(port, host, self._registry)

    @contextmanager
    def turn(self, log: Log) -> Iterator[Callable[[Moved], None]]:
        """Around one turn; gives what is to be told what it did."""
        began_s = time.time()
        try:
            with self._turn_seconds.time():
                yield self._count
        except Exception:
            self._failures.inc()
            raise
        self._through.set(began_s)
        for server, used, limit in log.memory():
            self._used.labels(server).set(used)
            self._limit.labels(server).set(limit)

    def _count(self, moved: Moved) -> None:
        self._events.labels("archived").inc(moved.archived)
        self._events.labels("trimmed").inc(moved.trimmed)
        self._events.labels("dropped").inc(moved.dropped)


def run(settings: StoreSettings, turns: Turns, say: Callable[[str], None], metrics: ArchiverMetrics) -> None:
    """Archive for ever, or once.

    raises  StorageUnavailable  when the one turn fails; in between turns failures are said and waited out
            StorageError        when log and archive do not belong together
    """
    while True:
        try:
            for moved in _turns(settings, turns, metrics):
                say(_summary(moved, settings.archive_dir))
            return
        except StorageUnavailable as exc:
            if turns.every_s is None:
                raise
            say(f"will try again: {exc}")
            time.sleep(PAUSE_AFTER_FAILURE_S)


def _turns(settings: StoreSettings, turns: Turns, metrics: ArchiverMetrics) -> Iterator[Moved]:
    assert settings.archive_dir is not None
    with ExitStack() as stack:
        log = stack.enter_context(_open_log(settings))
        writer = stack.enter_context(ArchiveWriter.open(settings.archive_dir))
        while True:
            with metrics.turn(log) as count:
                now = datetime.now(UTC)
                moved = archive(log, writer, now, keep_tail_s=turns.keep_tail_s, keep_days=turns.keep_days)
                writer.note_through(now.timestamp())
                count(moved)
            yield moved
            if turns.every_s is None:
                return
            time.sleep(turns.every_s)


def _open_log(settings: StoreSettings) -> AbstractContextManager[Log]:
    if settings.redis_url is None:
        return SQLiteLog.open(settings.data_dir)
    return RedisLog.open(settings.redis_url_with_password, settings.redis_prefix)


def _summary(moved: Moved, directory: Path | None) -> str:
    parts = [f"{moved.archived:,} events archived in {directory}", f"{moved.trimmed:,} removed from Redis"]
    return "; ".join([*parts, *([f"{moved.dropped:,} dropped as too old"] if moved.dropped else [])])
