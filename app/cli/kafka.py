"""Commands that read topics of Kafka and write them: consume, publish."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.console import say
from app.cli.options import EventsKeyOption, MetricsOption, StoreOptions, UrlOption, store_settings

if TYPE_CHECKING:
    from app.jobs.kafka.records import Decode

BrokersOption = Annotated[str, typer.Option(help="Brokers, as HOST:PORT,HOST:PORT.", metavar="ADDRESSES")]
PropertiesOption = Annotated[
    Path | None,
    typer.Option(
        help="File with properties of librdkafka, NAME=VALUE a line, such as TLS and passwords.", metavar="FILE"
    ),
]


@dataclass(frozen=True)
class ServiceOptions:
    """Which service takes the events."""

    url: UrlOption = "http://127.0.0.1:8000"
    key_file: EventsKeyOption = None


@dataclass(frozen=True)
class RecordOptions:
    """What a record is, and where one goes that is no event."""

    dead_letters: Annotated[
        str, typer.Option(help="Topic for records that are not events, with the reason.", metavar="TOPIC")
    ] = "lisarec-dead-letters"
    avro: Annotated[
        Path | None, typer.Option(help="Schema of records in Avro. Default: records are JSON.", metavar="FILE")
    ] = None
    protobuf: Annotated[
        Path | None,
        typer.Option(help="Descriptor set of records in Protobuf, from protoc --descriptor_set_out.", metavar="FILE"),
    ] = None
    message: Annotated[
        str | None, typer.Option(help="Full name of the message type, for --protobuf.", metavar="NAME")
    ] = None

    def decoder(self) -> Decode:
        """Return what reads a record; raise BadParameter where the options contradict each other."""
        from app.jobs.kafka.records import avro_decoder, decode_json, protobuf_decoder

        if self.avro is not None and self.protobuf is not None:
            raise typer.BadParameter("records are in Avro or in Protobuf; give one of --avro and --protobuf")
        if (self.protobuf is None) != (self.message is None):
            raise typer.BadParameter("--protobuf FILE and --message NAME go together")
        if self.protobuf is not None and self.message is not None:
            return protobuf_decoder(self.protobuf, self.message)
        return decode_json if self.avro is None else avro_decoder(self.avro)


@dataclass(frozen=True)
class BatchOptions:
    """How many records go into one request."""

    batch_size: Annotated[int, typer.Option(min=1, max=1_000, help="Most events in one request.")] = 1_000
    linger: Annotated[float, typer.Option(min=0.001, max=10, help="Most seconds for which a batch is filled.")] = 0.1


@dataclass(frozen=True)
class SourceOptions:
    """Which topics are read."""

    brokers: BrokersOption
    topic: Annotated[list[str], typer.Option(help="Topic with events, keyed by user. Repeatable.")]


def consume(
    source: SourceOptions,
    service: ServiceOptions,
    *,
    group: Annotated[str, typer.Option(help="Consumer group. Its members share the partitions.")] = "lisarec",
    records: RecordOptions,
    batches: BatchOptions,
    properties: PropertiesOption = None,
    metrics: MetricsOption = None,
) -> None:
    """Post the records of Kafka topics to a service as events, each exactly once.

    Offsets are committed after the service has acknowledged. The command waits for a service that is away.
    """
    _require_client()
    from app.jobs.kafka.clients import client_config
    from app.jobs.kafka.consumer import ConsumerPlan
    from app.jobs.kafka.metrics import ConsumerMetrics
    from app.jobs.kafka.running import ServiceAccess, run_consumer

    numbers = ConsumerMetrics()
    if metrics is not None:
        numbers.listen(metrics.host, metrics.port)
    plan = ConsumerPlan(source.topic, group, batches.batch_size, batches.linger)
    key_file = service.key_file
    access = ServiceAccess(service.url, None if key_file is None else key_file.read_text(encoding="utf-8").strip())
    _log()
    say(f"{', '.join(source.topic)} of {source.brokers} goes to {service.url}")
    config = client_config(source.brokers, properties)
    run_consumer(config, plan, records.decoder(), access, records.dead_letters, numbers)


def publish(
    brokers: BrokersOption,
    topic: Annotated[str, typer.Option(help="Topic to write, keyed by user.")],
    positions: Annotated[Path, typer.Option(help="File that remembers how far the log is published.", metavar="FILE")],
    store: StoreOptions,
    *,
    once: Annotated[bool, typer.Option("--once", help="Publish what is logged now, and end.")] = False,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two reads of the log.")] = 1.0,
    properties: PropertiesOption = None,
) -> None:
    """Write the event log to a Kafka topic for other systems, with the recommendation that each event came of.

    Each entry is written at least once. Readers tell duplicates by tenant, user_id and event_id.
    """
    _require_client()
    from app.jobs.kafka.clients import client_config
    from app.jobs.kafka.publisher import run_publisher

    settings = store.settings()
    _log()
    entries = run_publisher(settings, client_config(brokers, properties), topic, positions, None if once else every)
    say(f"{entries:,} entries of the log published in {topic}")


def _require_client() -> None:
    """Say what to install where the client of Kafka is missing."""
    try:
        import confluent_kafka  # noqa: F401
    except ImportError:
        raise ValueError("the client of Kafka is not installed; run: pip install 'lisarec[kafka]'") from None


def _log() -> None:
    from app.observability import log_format

    settings = store_settings()
    log_format.configure(settings.log_level, settings.log_format)
