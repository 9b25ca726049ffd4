"""A topic that is filled at the rate of its consumption, and a reader that knows its content."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import orjson
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

WINDOW = 60_000  # records that wait for the consumers at most: mock brokers keep 5 MB a partition
POISON_EVERY = 1_000
USERS = 10_000
RECONNECT = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200}


class ConsumedTopic:
    """Records with numbers as values: event n is of user n % USERS, and every second one has an id of its own.

    records  how many there will be, without the poisoned ones
    """

    def __init__(self, addresses: str, topic: str, partitions: int, group: str, records: int) -> None:
        self.records = records
        self.poisoned = 0  # records that are no events
        self.copies: dict[int, int] = {}  # of numbers that the topic has more than once, without an id of their own
        self.committed = 0
        self._addresses = addresses
        self._topic = topic
        self._places = [TopicPartition(topic, number) for number in range(partitions)]
        self._group = group
        self._ended = threading.Event()
        self._produced = self._read = 0

    def fill(self, item_ids: Sequence[str]) -> None:
        """Write the records, waiting for the consumers in between, and read them all back."""
        producer = Producer(
            {"bootstrap.servers": self._addresses, "enable.idempotence": True, "linger.ms": 20, **RECONNECT}
        )
        reader = threading.Thread(target=self._read_back)
        reader.start()
        rng = random.Random(0)
        for number in range(self.records):
            self._produce(producer, f"user-{number % USERS}", self._event(number, rng.choice(item_ids)))
            if number % POISON_EVERY == 0:
                self._produce(producer, f"user-{number % USERS}", b"poison")
            while self._produced - self.committed > WINDOW:
                producer.poll(0.05)
        while producer.flush(1):
            pass
        self._ended.set()
        reader.join()

    def _event(self, number: int, item_id: str) -> bytes:
        event: dict[str, Any] = {"item_id": item_id, "value": float(number)}
        return orjson.dumps(event if number % 2 else event | {"event_id": f"own-{number}", "timestamp": time.time()})

    def _produce(self, producer: Producer, user: str, value: bytes) -> None:
        while True:
            try:
                producer.produce(self._topic, value, user.encode())
                break
            except BufferError:
                producer.poll(0.05)
        self._produced += 1
        producer.poll(0)

    def _read_back(self) -> None:
        """Read the whole topic, each offset once, and record duplicates written by the producer."""
        reader = Consumer({"bootstrap.servers": self._addresses, "group.id": "oracle", **RECONNECT})
        reader.assign([TopicPartition(place.topic, place.partition, 0) for place in self._places])
        seen = bytearray(self.records)
        while not self._ended.is_set() or seen.count(1) < self.records:
            for record in reader.consume(5_000, 0.2):
                if record.error() is not None:
                    continue
                value = record.value() or b""
                if value == b"poison":
                    self.poisoned += 1
                    continue
                number = int(orjson.loads(value)["value"])
                if seen[number] and number % 2:
                    self.copies[number] = self.copies.get(number, 1) + 1
                seen[number] = 1
        reader.close()

    def follow(self) -> None:
        """Follow the committed offsets of the group until everything is committed."""
        client = Consumer({"bootstrap.servers": self._addresses, "group.id": self._group, **RECONNECT})
        while True:
            try:
                places = client.committed(self._places, timeout=5)
                self.committed = sum(max(0, place.offset) for place in places)
                if self._ended.is_set() and self.committed == self._end(client):
                    break
            except KafkaException:
                pass  # a broker is away
            time.sleep(0.2)
        client.close()

    def _end(self, client: Consumer) -> int:
        return sum(client.get_watermark_offsets(place, timeout=5)[1] for place in self._places)
