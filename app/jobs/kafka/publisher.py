"""Publishes the event log to a topic, with the recommendation that led to each event.

The position in the log is stored in a file, which is replaced once the brokers have all entries up to it. A publisher
that is killed earlier writes the same entries again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson
from confluent_kafka import KafkaError, Message, Producer

from app.jobs.archive import PAUSE_AFTER_FAILURE_S, open_source
from app.jobs.kafka.attribution import Attribution
from app.jobs.kafka.clients import until_signalled
from app.jobs.kafka.failures import KafkaFailure, Stopped
from app.jobs.kafka.metrics import PublisherMetrics
from app.serving.store_factory import audit_command, opened_store, opened_tenant
from app.settings import StoreSettings
from storage.archive.writer import EventEntry
from storage.archiver.source import LogSource
from storage.errors import StorageError, StorageUnavailable
from storage.folders.local_folder import replace_file
from storage.state.event import Event, LogRecord, Undo

MAX_UNDELIVERED = 10_000
FLUSH_S = 0.2

MISSING = (
    "the log no longer has the next entries: they were archived more than --keep-tail ago, or the log differs. The "
    "archive has the missing entries; to publish the entries in the log, delete '{file}'"
)

logger = logging.getLogger(__name__)


def run_publisher(
    settings: StoreSettings,
    config: Mapping[str, Any],
    topic: str,
    positions: Path,
    every_s: float | None,
    metrics: PublisherMetrics,
) -> int:
    """Publish new entries periodically, or once (None). Return the number of entries.

    raises  StorageUnavailable  when the log cannot be read, without `every_s`
            KafkaFailure        when the log lacks the next entries, the brokers refuse a message, or no service has
                                served the tenant
    """
    published = 0
    is_recorded = False
    with until_signalled() as stopping:
        publisher = LogPublisher(config, topic, PositionsFile(positions, topic), stopping, metrics)
        while not stopping.is_set():
            try:
                _require_tenant(settings)
                with open_source(settings) as source:
                    source.attach()
                    attribution = Attribution(settings)
                    while not stopping.is_set():
                        with metrics.turn():
                            published += publisher.publish(source, attribution)
                        is_recorded = is_recorded or _record(settings, topic)
                        if every_s is None:
                            return published
                        stopping.wait(every_s)
            except Stopped:
                break
            except StorageUnavailable as exc:
                if every_s is None:
                    raise
                metrics.failures.inc()
                logger.warning("retrying: %s", exc)
                stopping.wait(PAUSE_AFTER_FAILURE_S)
            except StorageError as exc:
                raise KafkaFailure(MISSING.format(file=positions)) from exc
    return published


def _require_tenant(settings: StoreSettings) -> None:
    """Raise KafkaFailure if the tenant, whose audit log gets an entry, is one that no service has served."""

    async def check() -> None:
        async with opened_tenant(settings):
            pass

    try:
        asyncio.run(check())
    except StorageUnavailable:
        raise
    except StorageError as exc:
        raise KafkaFailure(str(exc)) from exc


def _record(settings: StoreSettings, topic: str) -> bool:
    """Add this export to the tenant's audit log; return whether it is there. Publishing does not wait for it."""

    async def append() -> None:
        async with opened_store(settings) as store:
            await audit_command(store, settings, "export.publish", topic)

    try:
        asyncio.run(append())
    except StorageUnavailable as exc:
        logger.warning("the audit log does not have this export yet: %s", exc)
        return exc.failure_cause == "unconfirmed"  # it is written, and not yet on every replica
    return True


class PositionsFile:
    """A file with the published position of each partition of the log. It is only replaced as a whole."""

    def __init__(self, path: Path, topic: str) -> None:
        self._path = path
        self._topic = topic
        self.positions: dict[int, str] = {}
        if path.exists():
            self.positions = self._read()

    def _read(self) -> dict[int, str]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            topic, positions = content["topic"], content["positions"]
            found = {int(number): str(position) for number, position in positions.items()}
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise ValueError(
                f"'{self._path}' is not a file of positions; if you delete it, the whole log is published again"
            ) from exc
        if topic != self._topic:
            raise ValueError(f"'{self._path}' has the positions of the topic '{topic}'; use one file per topic")
        return found

    def save(self) -> None:
        """Make the positions durable."""
        replace_file(self._path, json.dumps({"topic": self._topic, "positions": self.positions}).encode())


class LogPublisher:
    """Writes entries of the log to a topic, those of one user in order."""

    def __init__(
        self,
        config: Mapping[str, Any],
        topic: str,
        positions: PositionsFile,
        stopping: threading.Event,
        metrics: PublisherMetrics,
    ) -> None:
        self._producer = Producer({"compression.type": "lz4", **config, "enable.idempotence": True, "logger": logger})
        self._topic = topic
        self._positions = positions
        self._stopping = stopping
        self._metrics = metrics
        self._failure: KafkaError | None = None

    def publish(self, source: LogSource, attribution: Attribution) -> int:
        """Publish the log's entries after the positions; return their number.

        raises  Stopped       when the command ends first
                KafkaFailure  when the brokers refuse a message
        """
        published = undelivered = 0
        reached: dict[int, str] = {}
        for page in source.entries(lambda number: reached.get(number) or self._positions.positions.get(number)):
            entries = [entry for entry in page.entries if isinstance(entry, EventEntry)]
            self._produce(entries, attribution)
            undelivered += len(entries)
            reached[page.partition] = str(page.position)
            if undelivered >= MAX_UNDELIVERED:
                self._settle(reached, undelivered)
                published, undelivered = published + undelivered, 0
        if reached:
            self._settle(reached, undelivered)
        return published + undelivered

    def _produce(self, entries: Iterable[EventEntry], attribution: Attribution) -> None:
        for entry in entries:
            value = orjson.dumps(message_of(entry.tenant, entry.record, attribution))
            self._producer.produce(self._topic, value, entry.record.user_id.encode(), on_delivery=self._delivered)

    def _delivered(self, error: KafkaError | None, _: Message) -> None:
        self._failure = error or self._failure

    def _settle(self, reached: Mapping[int, str], entries: int) -> None:
        """Wait until the brokers have all messages, then save the positions."""
        while self._producer.flush(FLUSH_S):
            if self._stopping.is_set():
                raise Stopped
        if self._failure is not None:
            raise KafkaFailure(f"cannot write the log to the topic '{self._topic}': {self._failure.str()}")
        self._positions.positions |= reached
        self._positions.save()
        self._metrics.entries.inc(entries)


def message_of(tenant: str, record: LogRecord, attribution: Attribution) -> dict[str, Any]:
    """Return the message of a log entry. `recommended` is None if no recommendation led to the event."""
    about = {"tenant": tenant, "user_id": record.user_id, "timestamp": record.timestamp_us / 1e6}
    if isinstance(record, Event):
        return {
            "kind": "event",
            **about,
            "event_id": record.event_id,
            **({"items": record.items} if record.items else {"item_id": record.item_id}),
            "type": record.type,
            "value": record.value,
            "recommendation_id": record.recommendation_id,
            "order_id": record.order_id,
            "recommended": attribution.of(tenant, record),
        }
    if isinstance(record, Undo):
        return {"kind": "undo", **about, "event_id": record.event_id}
    return {"kind": "merge", **about, "into": record.target}
