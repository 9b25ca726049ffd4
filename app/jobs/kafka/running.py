"""Runs a consumer until the process is asked to stop."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any, NamedTuple

from app.jobs.kafka.clients import until_signalled
from app.jobs.kafka.consumer import ConsumerPlan, EventConsumer, settle_with
from app.jobs.kafka.dead_letters import DeadLetters
from app.jobs.kafka.metrics import ConsumerMetrics
from app.jobs.kafka.records import Decode
from app.jobs.kafka.service import EventService
from app.jobs.replay import ServiceAddress


class ServiceAccess(NamedTuple):
    """The address of the service, and an API key that may write events."""

    address: ServiceAddress
    key: str | None


def run_consumer(
    config: Mapping[str, Any],
    plan: ConsumerPlan,
    decode: Decode,
    access: ServiceAccess,
    dead_letter_topic: str,
    metrics: ConsumerMetrics,
) -> None:
    """Consume until SIGTERM or SIGINT; then commit the processed batches.

    raises  KafkaFailure  when the brokers or the service reject its requests
    """
    with until_signalled() as stopping, closing(EventService(*access, stopping, metrics)) as service:
        letters = DeadLetters(config, dead_letter_topic, stopping)
        EventConsumer(config, plan, decode, settle_with(service, letters, metrics), metrics).run(stopping)
