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
OMISSIONS = ((), ("value",), ("value", "headers"), ("value", "headers", "key"))  # from letters that are too large

logger = logging.getLogger(__name__)


class DeadLetter(NamedTuple):
    """A record that is not a valid event, and the reason."""

    record: Message
    reason: str


class DeadLetters:
    """Writes dead letters: each with its key, value and headers, and with headers for its origin and the reason.

    Where that is too large for the topic, parts are omitted, and a header names them.
    """

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
        for letter in self._deliver(letters):
            self._write_alone(letter)

    def _write_alone(self, letter: DeadLetter) -> None:
        """Write as much of a record as the topic takes: all of it, if only a batch of records was too large."""
        if all(self._deliver([letter], omitted) for omitted in OMISSIONS):
            raise KafkaFailure(
                f"cannot write to the dead-letter topic '{self._topic}': even the reason alone is too large; raise "
                "'message.max.bytes' in --properties, and 'max.message.bytes' of the topic"
            )

    def _deliver(self, letters: Sequence[DeadLetter], omitted: Sequence[str] = ()) -> list[DeadLetter]:
        """Write the letters without the omitted parts; return those that are too large."""
        too_large: list[DeadLetter] = []
        waiting = letters
        while waiting:
            failed: list[tuple[DeadLetter, KafkaError]] = []
            for letter in waiting:
                self._produce(letter, omitted, failed)
            while self._producer.flush(FLUSH_S):
                if self._stopping.is_set():
                    raise Stopped
            too_large += [letter for letter, error in failed if error.code() == KafkaError.MSG_SIZE_TOO_LARGE]
            waiting = [letter for letter, error in failed if self._may_retry(error)]
        return too_large

    def _produce(self, letter: DeadLetter, omitted: Sequence[str], failed: list[tuple[DeadLetter, KafkaError]]) -> None:
        def delivered(error: KafkaError | None, _: Message) -> None:
            if error is not None:
                failed.append((letter, error))

        record = letter.record
        value = None if "value" in omitted else record.value()
        key = None if "key" in omitted else record.key()
        own_headers = [] if "headers" in omitted else record.headers() or []
        headers = [*own_headers, *_headers(letter, omitted)]
        try:
            self._producer.produce(self._topic, value, key, headers=headers, on_delivery=delivered)
        except KafkaException as exc:
            failed.append((letter, exc.args[0]))

    def _may_retry(self, error: KafkaError) -> bool:
        """Return whether the same may be written once more: after a timeout, but not if it is too large.

        raises  Stopped       when the command ends
                KafkaFailure  after any other error
        """
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            return False
        if error.name() != "_MSG_TIMED_OUT":
            raise KafkaFailure(f"cannot write to the dead-letter topic '{self._topic}': {error.str()}")
        if self._stopping.is_set():
            raise Stopped
        logger.warning("retrying to write dead letters: %s", error.str())
        return True


def _headers(letter: DeadLetter, omitted: Sequence[str]) -> list[tuple[str, bytes]]:
    record = letter.record
    headers = {
        "lisarec-reason": letter.reason[:REASON_CHARS],
        "lisarec-topic": record.topic(),
        "lisarec-partition": record.partition(),
        "lisarec-offset": record.offset(),
        **({"lisarec-omitted": ",".join(omitted)} if omitted else {}),
    }
    return [(name, str(content).encode()) for name, content in headers.items()]
