"""Dead letters: records that are not valid events, written to a separate topic with the reason."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from app.jobs.kafka.failures import KafkaFailure, Stopped

FLUSH_S = 0.2
MAX_BYTES = 10_000_000
REASON_CHARS = 1_000

logger = logging.getLogger(__name__)


class DeadLetter(NamedTuple):
    """A record that is not a valid event, and the reason."""

    record: Message
    reason: str


class DeadLetters:
    """Writes dead letters: each with its key, value and headers, and with headers for its origin and the reason."""

    def __init__(self, config: Mapping[str, Any], topic: str, stopping: threading.Event) -> None:
        self._producer = Producer(
            {"message.max.bytes": MAX_BYTES, **config, "enable.idempotence": True, "logger": logger}
        )
        self._topic = topic
        self._stopping = stopping

    def write(self, letters: Sequence[DeadLetter]) -> None:
        """Write the dead letters, and return once the brokers have all of them. Wait for unreachable brokers.

        raises  Stopped       when the command ends first
                KafkaFailure  when the brokers reject them
        """
        waiting = [(letter, letter.record.value()) for letter in letters]
        while waiting:
            failed: list[tuple[DeadLetter, KafkaError]] = []
            for letter, value in waiting:
                self._produce(letter, value, failed)
            while self._producer.flush(FLUSH_S):
                if self._stopping.is_set():
                    raise Stopped
            waiting = [self._again(letter, error) for letter, error in failed]

    def _produce(self, letter: DeadLetter, value: bytes | None, failed: list[tuple[DeadLetter, KafkaError]]) -> None:
        def delivered(error: KafkaError | None, _: Message) -> None:
            if error is not None:
                failed.append((letter, error))

        headers = [*(letter.record.headers() or []), *_headers(letter)]
        try:
            self._producer.produce(self._topic, value, letter.record.key(), headers=headers, on_delivery=delivered)
        except KafkaException as exc:
            failed.append((letter, exc.args[0]))

    def _again(self, letter: DeadLetter, error: KafkaError) -> tuple[DeadLetter, bytes | None]:
        """Return what to write after a failure: a record that is too large goes without its value."""
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            return letter, None
        if error.name() != "_MSG_TIMED_OUT":
            raise KafkaFailure(f"cannot write to the dead-letter topic '{self._topic}': {error.str()}")
        logger.warning("retrying to write dead letters: %s", error.str())
        return letter, letter.record.value()


def _headers(letter: DeadLetter) -> list[tuple[str, bytes]]:
    record = letter.record
    said = {
        "lisarec-reason": letter.reason[:REASON_CHARS],
        "lisarec-topic": record.topic(),
        "lisarec-partition": record.partition(),
        "lisarec-offset": record.offset(),
    }
    return [(name, str(content).encode()) for name, content in said.items()]
