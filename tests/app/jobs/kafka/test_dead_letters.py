"""Dead letters that exceed the size limit of their topic are truncated, and block nothing."""

from __future__ import annotations

import threading

import pytest
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

from app.jobs.kafka.dead_letters import DeadLetter, DeadLetters
from app.jobs.kafka.failures import KafkaFailure
from benchmarks.kafka.brokers import MockBrokers
from tests.app.jobs.kafka.topics import headers_of, read_all

LIMIT = 2_000  # bytes of a message
LARGE = b"x" * LIMIT


def record(place: int, value: bytes = b"{", key: bytes = b"ada", header: bytes = b"web") -> Message:
    return Message(
        topic="clicks",
        partition=3,
        offset=place,
        key=key,
        value=value,
        headers=[("source", header)],
        timestamp=(TIMESTAMP_NOT_AVAILABLE, 0),
    )


def dead_letters(brokers: MockBrokers, topic: str) -> DeadLetters:
    config = {"bootstrap.servers": brokers.addresses, "message.max.bytes": LIMIT}
    return DeadLetters(config, f"{topic}-dead", threading.Event())


def test_too_large_parts_are_omitted_and_named(brokers: MockBrokers, topic: str) -> None:
    records = [record(0), record(1, value=LARGE), record(2, header=LARGE), record(3, key=LARGE), record(4)]
    dead_letters(brokers, topic).write([DeadLetter(one, "is not JSON") for one in records])
    found = {
        headers["lisarec-offset"]: (one.value(), one.key(), headers.get("source"), headers.get("lisarec-omitted"))
        for one in read_all(brokers.addresses, f"{topic}-dead", len(records))
        for headers in [headers_of(one)]
    }
    assert found == {
        "0": (b"{", b"ada", "web", None),
        "1": (None, b"ada", "web", "value"),
        "2": (None, b"ada", None, "value,headers"),
        "3": (None, None, None, "value,headers,key"),
        "4": (b"{", b"ada", "web", None),
    }


def test_a_topic_too_small_for_the_reason_ends_the_command(brokers: MockBrokers, topic: str) -> None:
    with pytest.raises(KafkaFailure, match=r"the reason alone is too large; raise 'message.max.bytes'"):
        dead_letters(brokers, topic).write([DeadLetter(record(0), "ä" * 1_000)])
