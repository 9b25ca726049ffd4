"""Shared by all Kafka clients: the configuration, and the handling of failures and signals."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from app.jobs.kafka.failures import KafkaFailure

logger = logging.getLogger(__name__)


def client_config(brokers: str, properties: Path | None) -> dict[str, Any]:
    """Return the configuration of every client.

    properties  a file with lines of NAME=VALUE, librdkafka's settings: TLS, passwords, time-outs
    raises      ValueError  when a line has another form
    """
    return {**(_read(properties) if properties else {}), "bootstrap.servers": brokers, "error_cb": _log_error}


def _read(path: Path) -> Mapping[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    found = {}
    for number, line in enumerate(lines, start=1):
        name, equals, value = line.strip().partition("=")
        if not name or name.startswith("#"):
            continue
        if not equals:
            raise ValueError(f"'{path}', line {number}: write NAME=VALUE, such as security.protocol=SASL_SSL")
        found[name.strip()] = value.strip()
    return found


def _log_error(error: KafkaError) -> None:
    logger.warning("%s", error.str())


@contextmanager
def until_signalled() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set.

    raises  KafkaFailure  when the client reports a failure
    """
    stopping = threading.Event()
    before = {number: signal.signal(number, lambda *_: stopping.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopping
    except KafkaException as exc:
        raise KafkaFailure(f"the Kafka client reports: {exc.args[0].str()}") from exc
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
