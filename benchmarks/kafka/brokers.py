"""Brokers in a process of their own: librdkafka's mock cluster, reached over sockets as any brokers are.

They keep 5 MB of records a partition, in memory, and share offsets and groups. They do not move leaders or coordinators
away from a broker that is down: it comes back, or `MockBrokers.move` and `MockBrokers.coordinate` move them.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka

from benchmarks.harness.compose import ROOT

FETCH, OFFSET_COMMIT, HEARTBEAT = 1, 8, 12  # keys of Kafka's protocol
TRANSPORT_ERROR = -195  # the broker closes the connection instead of answering
PRODUCER = 0
REBALANCE_DELAY_MS = 200


class MockBrokers:
    """The brokers, as the process that started them controls them. It may be used from any thread."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lock = threading.Lock()
        self.addresses = str(self._answer())

    def create_topic(self, topic: str, partitions: int) -> None:
        """Create a topic."""
        self._ask("create", topic, partitions)

    def stop(self, broker: int) -> None:
        """Take a broker down, from 1: its connections are closed, and it takes no new ones."""
        self._ask("stop", broker)

    def start(self, broker: int) -> None:
        """Start the broker again with its data."""
        self._ask("start", broker)

    def move(self, topic: str, partition: int, broker: int) -> None:
        """Make another broker the leader of a partition."""
        self._ask("move", topic, partition, broker)

    def coordinate(self, group: str, broker: int) -> None:
        """Make a broker the coordinator of a group."""
        self._ask("coordinate", group, broker)

    def cut(self, broker: int, request: int, times: int) -> None:
        """Close the connection instead of answering, for the next requests of this kind to a broker."""
        self._ask("cut", broker, request, times)

    def uncut(self, broker: int, request: int) -> int:
        """Return the number of connections that are still to be cut."""
        return int(self._ask("uncut", broker, request))

    def _ask(self, *command: object) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the brokers have ended")
        return json.loads(line)


@contextmanager
def mock_brokers(brokers: int = 3) -> Iterator[MockBrokers]:
    """Start that many brokers, numbered from 1, on free ports of this machine."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.kafka.brokers", str(brokers)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield MockBrokers(process)
    finally:
        process.kill()
        process.communicate()


class MockCluster:
    """The mock cluster in its own process; the Python client lacks bindings for these calls."""

    def __init__(self, brokers: int) -> None:
        (path,) = Path(confluent_kafka.__file__).parents[1].glob("confluent_kafka.libs/librdkafka-*.so*")
        self._library = library = ctypes.CDLL(str(path))
        for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
            getattr(library, name).restype = ctypes.c_void_p
        library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        error = ctypes.create_string_buffer(512)
        configuration = ctypes.c_void_p(library.rd_kafka_conf_new())
        client = library.rd_kafka_new(PRODUCER, configuration, error, len(error))
        if client is None:
            raise RuntimeError(error.value.decode())
        self._cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(ctypes.c_void_p(client), brokers))
        # otherwise a first member waits 3 s for others, and whoever has a shorter session never becomes one
        library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, REBALANCE_DELAY_MS)

    @property
    def addresses(self) -> str:
        """Return the addresses of the brokers."""
        return bytes(self._library.rd_kafka_mock_cluster_bootstraps(self._cluster)).decode()

    def create(self, topic: str, partitions: int) -> None:
        """Create a topic whose partitions have one copy each."""
        self._done(self._library.rd_kafka_mock_topic_create(self._cluster, topic.encode(), partitions, 1))

    def stop(self, broker: int) -> None:
        """Take a broker down."""
        self._done(self._library.rd_kafka_mock_broker_set_down(self._cluster, broker))

    def start(self, broker: int) -> None:
        """Start a broker again."""
        self._done(self._library.rd_kafka_mock_broker_set_up(self._cluster, broker))

    def move(self, topic: str, partition: int, broker: int) -> None:
        """Make a broker the leader of a partition."""
        lead = self._library.rd_kafka_mock_partition_set_leader
        self._done(lead(self._cluster, topic.encode(), partition, broker))

    def coordinate(self, group: str, broker: int) -> None:
        """Make a broker the coordinator of a group."""
        self._done(self._library.rd_kafka_mock_coordinator_set(self._cluster, b"group", group.encode(), broker))

    def cut(self, broker: int, request: int, times: int) -> None:
        """Close the connections of the next requests of a kind."""
        push = self._library.rd_kafka_mock_broker_push_request_error_rtts
        error_and_delay = (ctypes.c_int(TRANSPORT_ERROR), ctypes.c_int(0))
        for _ in range(times):
            self._done(push(self._cluster, broker, ctypes.c_int16(request), ctypes.c_size_t(1), *error_and_delay))

    def uncut(self, broker: int, request: int) -> int:
        """Return how many connections are still to be cut."""
        count = ctypes.c_size_t()
        ask = self._library.rd_kafka_mock_broker_error_stack_cnt
        self._done(ask(self._cluster, broker, ctypes.c_int16(request), ctypes.byref(count)))
        return count.value

    def _done(self, error: int) -> None:
        if error:
            raise RuntimeError(f"the mock cluster answers {error}")


def main() -> None:
    """Run the brokers until standard input ends."""
    cluster = MockCluster(int(sys.argv[1]))
    print(json.dumps(cluster.addresses), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(cluster, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
