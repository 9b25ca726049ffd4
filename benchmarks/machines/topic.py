"""A Kafka topic outside of the hosts, served by the mock brokers of `benchmarks.kafka`.

Mock brokers listen on the loopback address of their machine, and that is the address they tell their clients. So every
host has their port on its own loopback address: its HAProxy forwards it to them, through the network.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress

import orjson
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from benchmarks.harness.faults.tcp_proxy import TcpProxy
from benchmarks.harness.ledger import EventJson
from benchmarks.kafka.brokers import mock_brokers
from benchmarks.machines.network import DISK

TOPIC, GROUP, DEAD_LETTERS = "clicks", "lisarec", "dead-letters"
PROPERTIES = DISK / "consumer.properties"
FORWARDER = DISK / "brokers.cfg"
FORWARD = """
defaults
    mode tcp
    timeout connect 2s
    timeout client 1h
    timeout server 1h
listen brokers
    bind 127.0.0.1:{port}
    server outside {host}:{port}
"""


class Topic:
    """Records with events, and which of them the consumer group has committed.

    An idempotent producer writes each record once, and those of a partition in order, so the nth has the offset n.

    brokers  their address, here and on the hosts
    """

    def __init__(self, brokers: str, partitions: int) -> None:
        self.brokers = brokers
        self._producer = Producer({"bootstrap.servers": brokers, "enable.idempotence": True})
        self._group = Consumer({"bootstrap.servers": brokers, "group.id": GROUP})
        self._numbers: list[list[int]] = [[] for _ in range(partitions)]
        self._committed = [0] * partitions

    def close(self) -> None:
        """Close the connections to the brokers."""
        self._producer.close()
        self._group.close()

    @property
    def is_behind(self) -> bool:
        """Return whether some records are not committed yet."""
        return self._committed != [len(numbers) for numbers in self._numbers]

    def produce(self, partition: int, number: int, event: EventJson) -> None:
        """Write a record with the event, which has this number in its ledger."""
        self._producer.produce(TOPIC, orjson.dumps(event), str(event["user_id"]).encode(), partition)
        self._numbers[partition].append(number)

    def newly_committed(self) -> list[list[int]]:
        """Return the numbers, by partition, committed since the last call."""
        self._producer.poll(0)
        before = list(self._committed)
        places = [TopicPartition(TOPIC, partition) for partition in range(len(before))]
        with suppress(KafkaException):  # the group has no coordinator yet
            for place in self._group.committed(places, timeout=10):
                self._committed[place.partition] = max(0, place.offset)
        spans = zip(self._numbers, before, self._committed, strict=True)
        return [numbers[begin:end] for numbers, begin, end in spans]


@asynccontextmanager
async def running_topic(address: str, partitions: int) -> AsyncIterator[Topic]:
    """Run an empty topic outside of the hosts, at this address."""
    with mock_brokers(1) as brokers:
        brokers.create_topic(TOPIC, partitions)
        brokers.create_topic(DEAD_LETTERS, 1)
        host, port = brokers.addresses.split(":")
        entrance = TcpProxy("brokers", (host, int(port)), lambda: False, print)
        await entrance.listen((address, int(port)))
        FORWARDER.write_text(FORWARD.format(host=address, port=port))
        # so that a consumer that is killed is missed soon
        PROPERTIES.write_text("session.timeout.ms=3000\nheartbeat.interval.ms=500\n")
        with closing(Topic(brokers.addresses, partitions)) as topic:
            yield topic
        entrance.close()


def consume_command(brokers: str, url: str) -> list[str]:
    """Return the command of a consumer that posts to a service."""
    source = ["--brokers", brokers, "--topic", TOPIC, "--group", GROUP, "--dead-letters", DEAD_LETTERS]
    return ["consume", *source, "--url", url, "--properties", str(PROPERTIES)]
