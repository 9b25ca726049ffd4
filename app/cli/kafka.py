"""Commands that read topics of Kafka and write them: consume, publish."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.console import say
from app.cli.options import DataDirOption, MetricsOption, RedisUrlOption, store_settings

if TYPE_CHECKING:
    from app.jobs.kafka.records import Decode

BrokersOption = Annotated[str, typer.Option(help="Some brokers, as HOST:PORT,HOST:PORT.", metavar="ADDRESSES")]
PropertiesOption = Annotated[
    Path | None,
    typer.Option(help="File with more properties of librdkafka, NAME=VALUE a line: TLS, passwords.", metavar="FILE"),
]


def consume(
    brokers: BrokersOption,
    topic: Annotated[list[str], typer.Option(help="Topic with events, keyed by user; repeatable.")],
    url: Annotated[str, typer.Option(help="Where the service listens.")] = "http://127.0.0.1:8000",
    key_file: Annotated[
        Path | None, typer.Option(help="File with a key that may write events, where keys are on.", metavar="FILE")
    ] = None,
    group: Annotated[str, typer.Option(help="Consumers of one group share the partitions.")] = "lisarec",
    dead_letters: Annotated[
        str, typer.Option(help="Topic for records that are no events, with the reason.", metavar="TOPIC")
    ] = "lisarec-dead-letters",
    avro: Annotated[
        Path | None, typer.Option(help="Records are Avro of this schema; default: JSON.", metavar="FILE")
    ] = None,
    protobuf: Annotated[
        Path | None, typer.Option(help="Records are Protobuf; what protoc --descriptor_set_out wrote.", metavar="FILE")
    ] = None,
    message: Annotated[
        str | None, typer.Option(help="Full name of their type, for --protobuf.", metavar="NAME")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=1_000, help="Events of one request at most.")] = 1_000,
    linger: Annotated[float, typer.Option(min=0.001, max=10, help="Seconds that a batch is filled for at most.")] = 0.1,
    properties: PropertiesOption = None,
    metrics: MetricsOption = None,
) -> None:
    """Post the records of topics to a service as events, each once, however often this is killed.

    Offsets are committed when the service has acknowledged. A service that is away is waited for.
    """
    _require_client()
    from app.jobs.kafka.clients import client_config
    from app.jobs.kafka.consumer import ConsumerPlan
    from app.jobs.kafka.metrics import ConsumerMetrics
    from app.jobs.kafka.running import ServiceAccess, run_consumer

    numbers = ConsumerMetrics()
    if metrics is not None:
        numbers.listen(metrics.host, metrics.port)
    plan = ConsumerPlan(topic, group, batch_size, linger)
    access = ServiceAccess(url, None if key_file is None else key_file.read_text(encoding="utf-8").strip())
    _log()
    say(f"{', '.join(topic)} of {brokers} goes to {url}")
    config = client_config(brokers, properties)
    run_consumer(config, plan, _decoder(avro, protobuf, message), access, dead_letters, numbers)


def _decoder(avro: Path | None, protobuf: Path | None, message: str | None) -> Decode:
    from app.jobs.kafka.records import avro_decoder, decode_json, protobuf_decoder

    if avro is not None and protobuf is not None:
        raise typer.BadParameter("records are in Avro or in Protobuf; give one of --avro and --protobuf")
    if (protobuf is None) != (message is None):
        raise typer.BadParameter("--protobuf FILE and --message NAME go together")
    if protobuf is not None and message is not None:
        return protobuf_decoder(protobuf, message)
    return decode_json if avro is None else avro_decoder(avro)


def publish(
    brokers: BrokersOption,
    topic: Annotated[str, typer.Option(help="Topic to write, keyed by user.")],
    positions: Annotated[Path, typer.Option(help="File that remembers how far the log is published.", metavar="FILE")],
    redis_url: RedisUrlOption = None,
    data_dir: DataDirOption = None,
    once: Annotated[bool, typer.Option("--once", help="What is logged now, instead of for ever.")] = False,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks at the log.")] = 1.0,
    properties: PropertiesOption = None,
) -> None:
    """Write the event log to a topic, with the recommendation that each event came of, for other systems.

    Each entry at least once: whoever reads the topic goes by tenant, user_id and event_id.
    """
    _require_client()
    from app.jobs.kafka.clients import client_config
    from app.jobs.kafka.publisher import run_publisher

    settings = store_settings(redis_url=redis_url, data_dir=data_dir)
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
