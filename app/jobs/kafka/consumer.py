"""Moves the records of topics into a service, each exactly once, however often it is killed.

Two threads share the work. The caller's thread reads and parses records, and keeps the membership of the group. An
executor's thread settles one batch at a time: it posts the events, and writes the dead letters. A batch is settled when
the service has acknowledged its events and the brokers its dead letters. Only then are its offsets stored. librdkafka
commits them once a second, when partitions leave and when the consumer closes. A consumer that was killed before that
reads the same records again, with the same ids, which the service recognises.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from app.jobs.kafka.clients import until_signalled
from app.jobs.kafka.dead_letters import DeadLetter, DeadLetters
from app.jobs.kafka.failures import KafkaFailure, Stopped
from app.jobs.kafka.metrics import ConsumerMetrics
from app.jobs.kafka.records import Decode, PoisonRecord, event_of
from app.jobs.kafka.service import EventService
from app.jobs.replay import ServiceAddress

PAUSE_AFTER_S = 1.0  # a batch that takes longer pauses the partitions
POLL_S = 0.2
REVOKE_WAIT_S = 5.0  # for the batch in flight, so that the next owner does not read it again
STATISTICS_MS = 2_000

# operators may change these
DEFAULTS = {
    "auto.offset.reset": "earliest",
    "partition.assignment.strategy": "cooperative-sticky",
    "queued.max.messages.kbytes": 16_384,
}
# the delivery guarantees depend on these
REQUIRED = {"enable.auto.commit": True, "auto.commit.interval.ms": 1_000, "enable.auto.offset.store": False}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConsumerPlan:
    """The topics, and the size of a batch: up to `batch_size` records, or those of `linger_s` seconds."""

    topics: Sequence[str]
    group: str
    batch_size: int
    linger_s: float


class Batch(NamedTuple):
    """Records that were read together: events in JSON, with their records, and dead letters."""

    records: Sequence[Message]
    events: Sequence[bytes]
    letters: Sequence[DeadLetter]

    @classmethod
    def of(cls, records: Sequence[Message], decode: Decode) -> Batch:
        """Parse the records."""
        kept, events, letters = [], [], []
        for record in records:
            try:
                events.append(event_of(record, decode))
                kept.append(record)
            except PoisonRecord as exc:
                letters.append(DeadLetter(record, str(exc)))
        return cls(kept, events, letters)

    def offsets(self) -> list[TopicPartition]:
        """Return the offsets after the batch."""
        newest: dict[tuple[str, int], int] = {}
        for record in (*self.records, *(letter.record for letter in self.letters)):
            place = str(record.topic()), int(record.partition() or 0)
            newest[place] = max(newest.get(place, 0), int(record.offset() or 0))
        return [TopicPartition(topic, number, offset + 1) for (topic, number), offset in newest.items()]


class Settling(NamedTuple):
    """A batch that is being settled, and the offsets behind it."""

    done: Future[None]
    offsets: list[TopicPartition]


class EventConsumer:
    """A member of a group of consumers."""

    def __init__(
        self,
        config: Mapping[str, Any],
        plan: ConsumerPlan,
        decode: Decode,
        settle: Callable[[Batch], None],
        metrics: ConsumerMetrics,
    ) -> None:
        self._consumer = Consumer(
            {
                **DEFAULTS,
                "statistics.interval.ms": STATISTICS_MS,
                **config,
                **REQUIRED,
                "group.id": plan.group,
                "stats_cb": lambda text: metrics.read_lag(json.loads(text)),
                "logger": logger,
            }
        )
        self._plan = plan
        self._decode = decode
        self._settle = settle
        self._metrics = metrics
        self._settling: Settling | None = None
        self._early: list[Message] = []  # arrived while partitions were about to be paused

    def run(self, stopping: threading.Event) -> None:
        """Consume until a stop is requested; then commit the processed batches.

        raises  KafkaFailure  when the brokers or the service reject its requests
        """
        self._consumer.subscribe(
            list(self._plan.topics), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )
        with ThreadPoolExecutor(1, thread_name_prefix="settle") as executor:
            try:
                while not stopping.is_set():
                    batch = Batch.of(self._read(), self._decode)
                    self._finish()
                    if batch.events or batch.letters:
                        self._settling = Settling(executor.submit(self._settle, batch), batch.offsets())
                self._finish()
            except Stopped:
                pass
            finally:
                stopping.set()
                self._consumer.close()

    def _read(self) -> list[Message]:
        """Return the next records: at most a batch, after at most `linger_s` seconds."""
        early, self._early = self._early, []
        found = self._consumer.consume(max(1, self._plan.batch_size - len(early)), self._plan.linger_s)
        return [*early, *filter(self._is_record, found)]

    def _is_record(self, message: Message) -> bool:
        error = message.error()
        if error is not None and error.fatal():
            raise KafkaFailure(f"the brokers reject this consumer: {error.str()}")
        if error is not None:
            logger.warning("%s: %s", message.topic(), error.str())
        return error is None

    def _finish(self) -> None:
        """Wait until the batch in flight is settled, and store its offsets.

        Meanwhile nothing is read, but polls keep this member in the group.
        """
        if self._settling is None:
            return
        done = self._settling.done
        if not _ends(done, PAUSE_AFTER_S):
            self._metrics.paused.set(1)
            while not done.done():
                self._consumer.pause(self._consumer.assignment())  # there may be new ones
                message = self._consumer.poll(POLL_S)
                if message is not None and self._is_record(message):
                    self._early.append(message)
            self._consumer.resume(self._consumer.assignment())
            self._metrics.paused.set(0)
        self._store()

    def _store(self) -> None:
        """Store the offsets of the settled batch; raise the exception that it failed with."""
        if self._settling is None:
            return
        settling, self._settling = self._settling, None
        settling.done.result()
        for offset in settling.offsets:
            try:
                self._consumer.store_offsets(offsets=[offset])
            except KafkaException as exc:  # the partition has left: its next owner reads the same again
                logger.info("cannot store the offset of %s/%d: %s", offset.topic, offset.partition, exc)

    def _assigned(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self._metrics.rebalanced("assigned", len(partitions))

    def _revoked(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self._metrics.rebalanced("revoked", len(partitions))
        settling = self._settling
        if settling is not None and _ends(settling.done, REVOKE_WAIT_S) and settling.done.exception() is None:
            self._store()
        self._forget(partitions)

    def _lost(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self._metrics.rebalanced("lost", len(partitions))
        self._forget(partitions)

    def _forget(self, partitions: list[TopicPartition]) -> None:
        """Drop records of partitions that leave, and resume these: else one would still be paused when it returns."""
        self._consumer.resume(partitions)
        gone = {(one.topic, one.partition) for one in partitions}
        self._early = [record for record in self._early if (record.topic(), record.partition()) not in gone]


def _ends(done: Future[None], timeout_s: float) -> bool:
    """Return whether the future has a result, or has failed, within that time."""
    try:
        done.exception(timeout_s)
    except TimeoutError:
        return False
    return True


def settle_with(service: EventService, dead_letters: DeadLetters, metrics: ConsumerMetrics) -> Callable[[Batch], None]:
    """Return a function that settles a batch: it posts the events, and writes refused ones as dead letters."""

    def settle(batch: Batch) -> None:
        with metrics.batch_seconds.time():
            refused = service.send(batch.events)
            letters = [*batch.letters, *(DeadLetter(batch.records[n], refused[n]) for n in sorted(refused))]
            dead_letters.write(letters)
        metrics.count("dead_letter", len(letters))

    return settle


def run_consumer(
    config: Mapping[str, Any],
    plan: ConsumerPlan,
    decode: Decode,
    address: ServiceAddress,
    dead_letter_topic: str,
    metrics: ConsumerMetrics,
) -> None:
    """Consume until SIGTERM or SIGINT; then commit the processed batches.

    raises  KafkaFailure  when the brokers or the service reject its requests
            ReplayError   when a server other than lisarec answers
    """
    with until_signalled() as stopping, closing(EventService(address, stopping, metrics)) as service:
        letters = DeadLetters(config, dead_letter_topic, stopping)
        EventConsumer(config, plan, decode, settle_with(service, letters, metrics), metrics).run(stopping)
