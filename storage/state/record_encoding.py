"""The two forms in which a store keeps the records of its log: a row of columns, and a JSON value.

A row, in a table of SQLite or in a Parquet file, has a value for each of COLUMNS. `kind` determines which other columns
an undo or merge uses: `user_id`, `timestamp_us`, and `event_id` or `target`. Codes are a blob: for each generation the
tag (8 bytes), the number of codes (2 bytes, little-endian), and the codes (1 byte each). Items are a JSON array of ids.

JSON, in Redis and in back-ups, is one of

  [TENANT, EVENT_ID, USER_ID, ITEM_ID, TYPE, TIMESTAMP_US, ID_TIME_US, VALUE, RECOMMENDATION_ID]
  [TENANT, EVENT_ID, ..., RECOMMENDATION_ID, [[TAG, CODES], ...]]    an event with codes, in hex
  [TENANT, EVENT_ID, ..., RECOMMENDATION_ID, [], [ITEM_ID, ...]]     an impression
  [TENANT, EVENT_ID, ..., RECOMMENDATION_ID, [[TAG, CODES], ...], [ITEM_ID, ...], ORDER_ID]    an event of an order
  {"undo": [TENANT, USER_ID, EVENT_ID, TIMESTAMP_US]}
  {"merge": [TENANT, USER_ID, TARGET, TIMESTAMP_US]}

docs/reference/byte-formats.md says what others may rely on.
"""

import json
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from storage.state.corrections import SeenEntry, seen_entry
from storage.state.event import CodesByTag, Event, LogRecord, Merge, Undo

EVENT, UNDO, MERGE = "event", "undo", "merge"
PLAIN_FIELDS = (
    "event_id",
    "user_id",
    "item_id",
    "type",
    "timestamp_us",
    "id_time_us",
    "value",
    "recommendation_id",
)
COLUMNS = ("kind", *PLAIN_FIELDS, "codes", "items", "order_id", "target")
TAG_BYTES = 8
COUNT_BYTES = 2

_plain_fields = attrgetter(*PLAIN_FIELDS)


def to_row(record: LogRecord) -> tuple[Any, ...]:
    """Return the record's values for COLUMNS."""
    match record:
        case Event():
            codes = codes_to_blob(record.codes) if record.codes else None
            items = json.dumps(record.items) if record.items else None
            return EVENT, *_plain_fields(record), codes, items, record.order_id, None
        case Undo(user_id, event_id, timestamp_us):
            return UNDO, event_id, user_id, None, None, timestamp_us, None, None, None, None, None, None, None
        case Merge(user_id, target, timestamp_us):
            return MERGE, None, user_id, None, None, timestamp_us, None, None, None, None, None, None, target


def from_row(row: Iterable[Any]) -> LogRecord:
    """Return the record in a row of COLUMNS; raise ValueError if it is not valid."""
    kind, *plain, codes, items, order_id, target = row
    event_id, user_id, _, _, timestamp_us, *_ = plain
    if kind == EVENT:
        own, shown = codes_from_blob(codes) if codes else (), tuple(json.loads(items)) if items else ()
        fields = [*plain, own, shown, order_id]
        return Event(*fields)
    if kind == UNDO:
        return Undo(user_id, event_id, timestamp_us)
    if kind == MERGE:
        return Merge(user_id, target, timestamp_us)
    raise ValueError(f"an entry of a log cannot be of the kind {kind!r}")


def to_json(tenant: str, record: LogRecord) -> list[Any] | dict[str, Any]:
    """Return the record with its tenant as a JSON value."""
    match record:
        case Event():
            plain = [tenant, *_plain_fields(record)]
            if not (record.codes or record.items) and record.order_id is None:
                return plain
            codes = [[tag.hex(), own.hex()] for tag, own in record.codes]
            if record.order_id is not None:
                return [*plain, codes, record.items, record.order_id]
            return [*plain, codes, record.items] if record.items else [*plain, codes]
        case Undo(user_id, event_id, timestamp_us):
            return {UNDO: [tenant, user_id, event_id, timestamp_us]}
        case Merge(user_id, target, timestamp_us):
            return {MERGE: [tenant, user_id, target, timestamp_us]}


def from_json(value: Any) -> tuple[str, LogRecord]:
    """Return the tenant and the record in a JSON value; raise TypeError or ValueError if it is not valid."""
    if isinstance(value, list):
        tenant, *fields = value
        plain, more = fields[: len(PLAIN_FIELDS)], fields[len(PLAIN_FIELDS) :]
        if not more:
            return tenant, Event(*plain)
        codes, items, order_id = more + [[], None][len(more) - 1 :]
        own = tuple((bytes.fromhex(tag), bytes.fromhex(of_tag)) for tag, of_tag in codes)
        fields = [*plain, own, tuple(items), order_id]
        return tenant, Event(*fields)
    match value:
        case {"undo": [tenant, user_id, event_id, timestamp_us]}:
            return tenant, Undo(user_id, event_id, timestamp_us)
        case {"merge": [tenant, user_id, target, timestamp_us]}:
            return tenant, Merge(user_id, target, timestamp_us)
    raise ValueError("a value is not a log entry")


def seen_from_json(value: Any) -> SeenEntry:
    """Return what `SeenItems` reads of the record in a JSON value, as `from_json` and `seen_entry` do."""
    if isinstance(value, list):  # nearly all records; making them takes several times as long
        return value[1], value[3], value[4], value[5], value[10] if len(value) > 10 else None
    return seen_entry(from_json(value)[1])


def codes_to_blob(codes: CodesByTag) -> bytes:
    """Return the codes as one blob."""
    return b"".join(tag + len(own).to_bytes(COUNT_BYTES, "little") + own for tag, own in codes)


def codes_from_blob(blob: bytes) -> CodesByTag:
    """Return the codes in a blob."""
    codes = []
    place = 0
    while place < len(blob):
        begin = place + TAG_BYTES + COUNT_BYTES
        end = begin + int.from_bytes(blob[place + TAG_BYTES : begin], "little")
        codes.append((blob[place : place + TAG_BYTES], blob[begin:end]))
        place = end
    return tuple(codes)
