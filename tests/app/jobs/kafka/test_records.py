"""Conversion of Kafka records to events in each format: deterministic, with a reason for invalid ones."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import fastavro
import orjson
import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_NOT_AVAILABLE, Message
from google.protobuf import timestamp_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from app.events.ingest import parse_plain_events
from app.jobs.kafka.records import Decode, PoisonRecord, avro_decoder, decode_json, event_of, protobuf_decoder
from storage.state.event import uuid7_time_us

TIME_MS = 1_750_000_000_123
NOW_US = 2_000_000_000_000_000
SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "user_id", "type": "string"},
        {"name": "item_id", "type": "string"},
        {"name": "value", "type": ["null", "double"]},
        {"name": "timestamp", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    ],
}


def record(value: Any, key: bytes | None = b"ada", place: int = 7, time_ms: int | None = TIME_MS) -> Message:
    content = value if value is None or isinstance(value, bytes) else orjson.dumps(value)
    timestamp = (TIMESTAMP_NOT_AVAILABLE, 0) if time_ms is None else (TIMESTAMP_CREATE_TIME, time_ms)
    return Message(topic="clicks", partition=3, offset=place, key=key, value=content, timestamp=timestamp)


def event(message: Message) -> dict[str, Any]:
    """The event of a JSON record, which the service accepts."""
    found: dict[str, Any] = orjson.loads(event_of(message, decode_json))
    assert parse_plain_events([found], NOW_US, NOW_US) is not None
    return found


def test_fields_of_the_record_are_kept() -> None:
    said = {"event_id": "e1", "user_id": "bob", "item_id": "tea", "type": "purchase", "timestamp": 17, "value": 2.5}
    assert event(record(said)) == said


def test_user_and_time_default_to_key_and_record_time() -> None:
    found = event(record({"item_id": "tea"}))
    assert found.pop("event_id")
    assert found == {"item_id": "tea", "user_id": "ada", "timestamp": TIME_MS / 1000}


@given(st.integers(0, 2**62), st.integers(0, 2**62), st.integers(1, 2**48 - 1))
def test_the_id_derives_from_the_offset_and_the_record_time(one: int, other: int, time_ms: int) -> None:
    ids = [
        orjson.loads(event_of(record({"item_id": "tea"}, place=place, time_ms=time_ms), decode_json))["event_id"]
        for place in (one, one, other)
    ]
    assert ids[0] == ids[1]
    assert (ids[0] == ids[2]) == (one == other)
    assert uuid7_time_us(ids[0]) == time_ms * 1000


def test_a_record_without_a_time_gets_an_id_without_the_consumers_clock() -> None:
    first, again = (event(record({"item_id": "tea"}, time_ms=None)) for _ in range(2))
    assert first == again
    assert "timestamp" not in first


def test_a_record_with_a_time_beyond_uuid7_gets_an_id() -> None:
    """For example a time in microseconds."""
    first, again = (event(record({"item_id": "tea", "timestamp": 17}, time_ms=TIME_MS * 1000)) for _ in range(2))
    assert UUID(first["event_id"]).version == 5
    assert first == again


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (record(None), "has no value"),
        (record(b"{"), "is not JSON"),
        (record(b'{"value": NaN}'), "is not JSON"),
        (record(["tea"]), "is not an object"),
        (record({"item_id": "tea"}, key=b"\xff"), "a key that is not text"),
    ],
)
def test_invalid_records_have_a_reason(message: Message, reason: str) -> None:
    with pytest.raises(PoisonRecord, match=reason):
        event_of(message, decode_json)


def reason_of(message: Message, decode: Decode) -> str | None:
    """Why the record is invalid; None if it is an event."""
    try:
        event_of(message, decode)
    except PoisonRecord as exc:
        return str(exc)
    return None


def avro(tmp_path: Path, schema: Any = SCHEMA) -> Any:
    path = tmp_path / "schema.avsc"
    path.write_bytes(orjson.dumps(schema))
    return avro_decoder(path)


def in_avro(fields: dict[str, Any], schema: Any = SCHEMA) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), fields)
    return stream.getvalue()


class TestAvro:
    def test_decodes_what_was_written(self, tmp_path: Path) -> None:
        time = datetime(2026, 11, 22, 18, 0, 0, 123_456, tzinfo=UTC)
        written = {"user_id": "bob", "item_id": "tea", "value": 2.5, "timestamp": time}
        found = orjson.loads(event_of(record(in_avro(written)), avro(tmp_path)))
        assert found.pop("event_id")
        assert found == written | {"timestamp": time.timestamp()}

    def test_omits_null_fields(self, tmp_path: Path) -> None:
        written = {"user_id": "bob", "item_id": "tea", "value": None, "timestamp": datetime(2026, 1, 1, tzinfo=UTC)}
        assert "value" not in orjson.loads(event_of(record(in_avro(written)), avro(tmp_path)))

    @pytest.mark.parametrize("unit", ["millis", "micros"])
    def test_refuses_a_time_without_a_zone(self, tmp_path: Path, unit: str) -> None:
        time = {"name": "timestamp", "type": {"type": "long", "logicalType": f"local-timestamp-{unit}"}}
        schema = SCHEMA | {"fields": [*SCHEMA["fields"][:-1], time]}
        written = {"user_id": "bob", "item_id": "tea", "value": None, "timestamp": 1_700_000_000_000}
        assert str(reason_of(record(in_avro(written, schema)), avro(tmp_path, schema))).startswith("has a local time; ")

    @given(content=st.binary(max_size=40))
    def test_refuses_other_bytes(self, tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
        decode = avro(tmp_path_factory.getbasetemp())
        assert str(reason_of(record(content), decode)).startswith(("None", "is not valid Avro for the schema: "))

    def test_refuses_an_invalid_schema_file(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"schema.avsc' is not a valid Avro schema"):
            avro(tmp_path, {"type": "strange"})


def protobuf_file() -> FileDescriptorProto:
    file = FileDescriptorProto(name="click.proto", package="shop", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    message = file.message_type.add(name="Click")
    of_text, of_message = FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_MESSAGE
    for number, name in enumerate(("user_id", "item_id"), start=1):
        message.field.add(name=name, number=number, type=of_text, label=FieldDescriptorProto.LABEL_OPTIONAL)
    message.field.add(
        name="timestamp",
        number=3,
        type=of_message,
        type_name=".google.protobuf.Timestamp",
        label=FieldDescriptorProto.LABEL_OPTIONAL,
    )
    message.field.add(name="items", number=4, type=of_text, label=FieldDescriptorProto.LABEL_REPEATED)
    return file


def described(tmp_path: Path) -> Path:
    files = FileDescriptorSet()
    timestamp_pb2.DESCRIPTOR.CopyToProto(files.file.add())
    files.file.append(protobuf_file())
    path = tmp_path / "click.desc"
    path.write_bytes(files.SerializeToString())
    return path


class TestProtobuf:
    def test_decodes_what_was_written(self, tmp_path: Path) -> None:
        pool = DescriptorPool()
        pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
        pool.Add(protobuf_file())
        written: Any = GetMessageClass(pool.FindMessageTypeByName("shop.Click"))(user_id="bob", item_id="tea")
        written.timestamp.FromMicroseconds(1_750_000_000_123_456)
        decode = protobuf_decoder(described(tmp_path), "shop.Click")
        found = orjson.loads(event_of(record(written.SerializeToString()), decode))
        assert found.pop("event_id")
        assert found == {"user_id": "bob", "item_id": "tea", "timestamp": 1_750_000_000.123456}
        written.items.extend(["tea", "cup"])
        assert orjson.loads(event_of(record(written.SerializeToString()), decode))["items"] == ["tea", "cup"]

    @given(content=st.binary(max_size=40))
    def test_refuses_other_bytes(self, tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
        decode = protobuf_decoder(described(tmp_path_factory.getbasetemp()), "shop.Click")
        assert reason_of(record(content), decode) in (None, "is not a message of the type shop.Click")

    def test_refuses_a_message_type_that_is_not_in_the_descriptor(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"does not describe a message 'shop.View'"):
            protobuf_decoder(described(tmp_path), "shop.View")
