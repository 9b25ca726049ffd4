"""Converts records of a topic to events: JSON, Avro or Protobuf, each with an id that follows from the record."""

from __future__ import annotations

import json
from collections.abc import Callable, MutableSequence
from datetime import datetime
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias
from uuid import NAMESPACE_URL, UUID, uuid5

import orjson
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

UUID7_TIMES_MS = range(1, 2**48)
TIMESTAMP = "google.protobuf.Timestamp"

Decode: TypeAlias = Callable[[bytes], Any]


class PoisonRecord(ValueError):
    """The record is not an event. The message says why, in one sentence without the record's content."""


def decode_json(value: bytes) -> Any:
    """Parse a record in JSON; PoisonRecord when it is not JSON."""
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as exc:
        raise PoisonRecord(f"is not JSON: {exc.msg} at byte {exc.pos}") from None


def avro_decoder(schema: Path) -> Decode:
    """Return a parser of Avro records without a header, all written with this schema.

    raises  ValueError  when the file is not a valid schema
    """
    from fastavro import parse_schema, schemaless_reader
    from fastavro.schema import SchemaParseException, UnknownType

    try:
        parsed = parse_schema(json.loads(schema.read_text(encoding="utf-8")))
    except (ValueError, SchemaParseException, UnknownType) as exc:
        raise ValueError(f"'{schema}' is not a valid Avro schema: {exc}") from exc

    def decode(value: bytes) -> Any:
        stream = BytesIO(value)
        try:
            fields = schemaless_reader(stream, parsed, None)
        except Exception as exc:  # for invalid bytes the library raises whatever its parts raise
            raise PoisonRecord(f"is not valid Avro for the schema: {type(exc).__name__}") from None
        if stream.read(1):
            raise PoisonRecord("is not valid Avro for the schema: it is longer")
        if not isinstance(fields, dict):
            raise PoisonRecord("is not an Avro record with fields")
        return {name: _json_value(content) for name, content in fields.items() if content is not None}

    return decode


def protobuf_decoder(descriptors: Path, message_type: str) -> Decode:
    """Return a parser of Protobuf records of one type without a header.

    descriptors   the output of ``protoc --include_imports --descriptor_set_out``
    message_type  full name, with the package
    raises        ValueError  when the file does not describe that type
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import DecodeError
    from google.protobuf.message_factory import GetMessageClass

    pool = DescriptorPool()
    try:
        for file in FileDescriptorSet.FromString(descriptors.read_bytes()).file:
            pool.Add(file)
        kind = GetMessageClass(pool.FindMessageTypeByName(message_type))
    except (DecodeError, KeyError, TypeError) as exc:
        raise ValueError(f"'{descriptors}' does not describe a message '{message_type}': {exc}") from exc

    def decode(value: bytes) -> Any:
        try:
            message = kind.FromString(value)
        except DecodeError:
            raise PoisonRecord(f"is not a message of the type {message_type}") from None
        return {field.name: _json_value(content) for field, content in message.ListFields()}

    return decode


def _json_value(content: Any) -> Any:
    """Return a time as seconds since the epoch, a repeated field as a list, and everything else unchanged.

    raises  PoisonRecord  when a time has no time zone
    """
    if isinstance(content, datetime):
        if content.tzinfo is None:
            raise PoisonRecord("has a local time; write timestamp-millis or timestamp-micros, which are in UTC")
        return content.timestamp()
    if isinstance(content, MutableSequence):
        return list(content)
    descriptor = getattr(content, "DESCRIPTOR", None)
    if descriptor is not None and descriptor.full_name == TIMESTAMP:
        return (content.seconds * 1_000_000 + content.nanos // 1_000) / 1e6
    return content


def event_of(record: Message, decode: Decode) -> bytes:
    """Return the record as an event of ``POST /v1/events``, in JSON.

    Missing fields come from the record, so they are the same whenever it is read again: the user from the key, the
    time from the record's time, the id from `derived_id`.

    raises  PoisonRecord  when the record has no value, or its value is not an object
    """
    value = record.value()
    if value is None:
        raise PoisonRecord("has no value")
    event = decode(value)
    if not isinstance(event, dict):
        raise PoisonRecord("is not an object with fields")
    kind, time_ms = record.timestamp()
    has_time = kind != TIMESTAMP_NOT_AVAILABLE
    if event.get("user_id") is None and (key := record.key()) is not None:
        event["user_id"] = _text(key)
    if event.get("event_id") is None:
        event["event_id"] = derived_id(record, time_ms if has_time else 0)
    if event.get("timestamp") is None and has_time:
        event["timestamp"] = time_ms / 1000
    try:
        return orjson.dumps(event)
    except orjson.JSONEncodeError:
        raise PoisonRecord("has a field that JSON cannot represent") from None


def _text(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise PoisonRecord("has no user_id, and a key that is not text") from None


def derived_id(record: Message, time_ms: int) -> str:
    """Return the id of an event without one: the record's time, followed by a hash of topic, partition and offset.

    As it is a UUIDv7, a store knows that it is new without reading the archive. If a topic is created again, and its
    offsets start again, the ids differ.
    """
    place = f"{record.topic()}/{record.partition()}/{record.offset()}"
    if time_ms in UUID7_TIMES_MS:
        chance = int.from_bytes(blake2b(place.encode(), digest_size=10).digest(), "big")
        version_and_chance = 0x7000 | (chance >> 64) & 0x0FFF
        variant_and_chance = 1 << 63 | chance & (1 << 62) - 1
        return str(UUID(int=time_ms << 80 | version_and_chance << 64 | variant_and_chance))  # RFC 9562, section 5.7
    return str(uuid5(NAMESPACE_URL, f"kafka:{place}"))
