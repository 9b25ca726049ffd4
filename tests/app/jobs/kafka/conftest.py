"""Mock brokers over sockets, and consumers that are stopped after their test."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kafka.brokers import MockBrokers, mock_brokers
from tests.app.jobs.kafka.topics import PARTITIONS, ConsumerProcess
from tests.app.service_process import Process
from tests.app.service_process import launch as launch

__all__ = ["launch"]


@pytest.fixture(scope="module")
def brokers() -> Iterator[MockBrokers]:
    with mock_brokers() as running:
        yield running


@pytest.fixture
def topic(brokers: MockBrokers, request: pytest.FixtureRequest) -> str:
    """A topic for this test only."""
    name = f"events-{abs(hash(request.node.nodeid))}"
    brokers.create_topic(name, PARTITIONS)
    brokers.create_topic(f"{name}-dead", 1)
    return name


@pytest.fixture
def consume(brokers: MockBrokers, topic: str, tmp_path: Path) -> Iterator[Callable[..., ConsumerProcess]]:
    """Start a consumer of the topic that posts to a service."""
    started: list[ConsumerProcess] = []

    def start(service: Process | str, *options: object, **settings: Any) -> ConsumerProcess:
        url = service if isinstance(service, str) else service.url
        started.append(ConsumerProcess(tmp_path, brokers.addresses, topic, url, *options, **settings))
        return started[-1]

    yield start
    for process in started:
        if process.process.poll() is None:
            process.end(signal.SIGKILL)
