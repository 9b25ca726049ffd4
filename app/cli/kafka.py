"""Commands that read and write Kafka topics: consume, publish."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.console import say
from app.cli.options import EventsKeyOption, MetricsOption, StoreOptions, UrlOption, read_key, store_settings

if TYPE_CHECKING:
    from app.jobs.kafka.records import Decode
    from app.observability.job_metrics import JobMetrics


def _without_credentials(brokers: str) -> str:
    """Return the addresses. Raise BadParameter if they contain a user or password, which logs would show."""
    if "@" in brokers:
        raise typer.BadParameter("pass only HOST:PORT,HOST:PORT; user and password are in the file of --properties")
    return brokers


BrokersOption = Annotated[
    str,
    typer.Option(help="Brokers, as HOST:PORT,HOST:PORT.", metavar="ADDRESSES", callback=_without_credentials),
]


@dataclass(frozen=True)
class ClientOptions:
    """Options of every client, and of the metrics of its command."""

    properties: Annotated[
        Path | None,
        typer.Option(
            help="File of librdkafka properties, such as TLS and passwords, one NAME=VALUE per line.", metavar="FILE"
        ),
    ] = None
    metrics: MetricsOption = None

    def begin(self, brokers: str, metrics: JobMetrics) -> dict[str, Any]:
        """Configure the log, serve the metrics, and return the configuration of the clients."""
        from app.jobs.kafka.clients import client_config
        from app.observability import log_format

        if self.metrics is not None:
            metrics.listen(self.metrics.host, self.metrics.port)
        settings = store_settings()
        log_format.configure(settings.log_level, settings.log_format)
        return client_config(brokers, self.properties)


@dataclass(frozen=True)
class ServiceOptions:
    """Options that name the service."""

    url: UrlOption = "http://127.0.0.1:8000"
    key_file: EventsKeyOption = None


@dataclass(frozen=True)
class RecordOptions:
    """Options for the format of records, and for invalid records."""

    dead_letters: Annotated[
        str,
        typer.Option(
            help="Dead-letter topic: receives records that aren't valid events, with the reason.", metavar="TOPIC"
        ),
    ] = "lisarec-dead-letters"
    avro: Annotated[
        Path | None, typer.Option(help="Avro schema of the records. Default: records are JSON.", metavar="FILE")
    ] = None
    protobuf: Annotated[
        Path | None,
        typer.Option(help="Protobuf descriptor set of the records, from protoc --descriptor_set_out.", metavar="FILE"),
    ] = None
    message: Annotated[
        str | None, typer.Option(help="Full name of the message type, for --protobuf.", metavar="NAME")
    ] = None

    def decoder(self) -> Decode:
        """Return the decoder of records. Raise BadParameter if the options contradict each other."""
        from app.jobs.kafka.records import avro_decoder, decode_json, protobuf_decoder

        if self.avro is not None and self.protobuf is not None:
            raise typer.BadParameter("records are either Avro or Protobuf; pass one of --avro and --protobuf")
        if (self.protobuf is None) != (self.message is None):
            raise typer.BadParameter("--protobuf FILE and --message NAME must be used together")
        if self.protobuf is not None and self.message is not None:
            return protobuf_decoder(self.protobuf, self.message)
        return decode_json if self.avro is None else avro_decoder(self.avro)


@dataclass(frozen=True)
class BatchOptions:
    """Options for the size of a request."""

    batch_size: Annotated[int, typer.Option(min=1, max=1_000, help="Maximum number of events per request.")] = 1_000
    linger: Annotated[float, typer.Option(min=0.001, max=10, help="Maximum number of seconds to fill a batch.")] = 0.1


@dataclass(frozen=True)
class SourceOptions:
    """Options that name the topics."""

    brokers: BrokersOption
    topic: Annotated[list[str], typer.Option(help="Topic of events, keyed by user. Repeatable.")]


def consume(
    source: SourceOptions,
    service: ServiceOptions,
    *,
    group: Annotated[str, typer.Option(help="Consumer group. Its members share the partitions.")] = "lisarec",
    records: RecordOptions,
    batches: BatchOptions,
    client: ClientOptions,
) -> None:
    """Send the records of Kafka topics to a service as events, each exactly once.

    Offsets are committed after the service has acknowledged the events. If the service is down, the command waits.
    """
    _require_client()
    from app.jobs.kafka.consumer import ConsumerPlan, run_consumer
    from app.jobs.kafka.metrics import ConsumerMetrics
    from app.jobs.replay import ServiceAddress

    metrics = ConsumerMetrics()
    config = client.begin(source.brokers, metrics)
    plan = ConsumerPlan(source.topic, group, batches.batch_size, batches.linger)
    address = ServiceAddress.of(service.url, read_key(service.key_file))
    say(f"sending {', '.join(source.topic)} from {source.brokers} to {address.url}")
    run_consumer(config, plan, records.decoder(), address, records.dead_letters, metrics)


def publish(
    brokers: BrokersOption,
    topic: Annotated[str, typer.Option(help="Topic to write, keyed by user.")],
    positions: Annotated[Path, typer.Option(help="File that stores the position in the event log.", metavar="FILE")],
    store: StoreOptions,
    *,
    once: Annotated[bool, typer.Option("--once", help="Publish the events that are logged now, then exit.")] = False,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two reads of the log.")] = 1.0,
    client: ClientOptions,
) -> None:
    """Publish the event log to a Kafka topic, with the recommendation that led to each event.

    Each entry is written at least once. Consumers can detect duplicates by tenant, user_id and event_id.
    """
    _require_client()
    from app.jobs.kafka.metrics import PublisherMetrics
    from app.jobs.kafka.publisher import run_publisher

    settings = store.settings()
    metrics = PublisherMetrics()
    config = client.begin(brokers, metrics)
    entries = run_publisher(settings, config, topic, positions, None if once else every, metrics)
    say(f"{entries:,} log entries published to {topic}")


def _require_client() -> None:
    """Raise an error that says what to install if the Kafka client is missing."""
    try:
        import confluent_kafka  # noqa: F401
    except ImportError:
        raise ValueError("the Kafka client is not installed; run: pip install 'lisarec[kafka]'") from None
