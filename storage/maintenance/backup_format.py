"""The file format of a backup.

A gzip file of JSON lines: a header, then for each tenant with items {"property_types": [tenant, PropertyTypes]},
{"scenario": [tenant, name, versions]} for each scenario, {"audit": [tenant, fields of an AuditEntry]} for each entry,
{"item": [tenant, fields of an ItemEntry, properties as `property_to_json` encodes them]} for each item that it has
changed, {"item_vector": [tenant, item id, vector in base64]} for each that has one, and
{"item_codes": [tenant, fields of an ItemCodes]} for each item and generation with codes, where bytes are in hex. Then
come {"user": [tenant, user id, properties]} for each user who has some, each entry of the log as in
storage/state/record_encoding.py, each user's in log order, and last the number of entries.
docs/reference/data-formats.md describes it for other programs.
"""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TextIO, TypeAlias

from storage.errors import StorageError
from storage.items.audit import AuditEntry
from storage.records import ItemCodes, ItemEntry, PropertyTypes, PropertyValue, property_from_json, property_to_json
from storage.state.event import IMPRESSION, Event, LogRecord, Merge, Undo
from storage.state.record_encoding import from_json

VERSION = 8
HEADER = {"lisarec": "log", "version": VERSION}
# version 7 has no audit log, 6 no vectors, 4 no scenarios, 3 no properties and 1 no items
EARLIER_VERSIONS = (1, 2, 3, 4, 5, 6, 7)
FIRST_WITH_LISTS = 6  # see `_with_items`
VERSIONS_WITH_CODES_IN_ITEMS = (1, 2)  # see `_from_earlier_json` and `_with_codes_apart`
EARLIER_CODES_MARK = "!"
MAX_LINE = 1 << 24  # characters, far more than any record has; a small file may hold a line that fills the memory
FIELD_TYPES: Mapping[str, type | tuple[type, ...]] = {  # of a log entry
    "event_id": str,
    "user_id": str,
    "item_id": str,
    "type": str,
    "timestamp_us": int,
    "id_time_us": (int, NoneType),
    "value": (int, float, NoneType),
    "recommendation_id": (str, NoneType),
    "codes": tuple,
    "items": tuple,
    "order_id": (str, NoneType),
    "target": str,
}


class UserProperties(NamedTuple):
    """The properties of one user."""

    user_id: str
    properties: Mapping[str, PropertyValue]


class Scenario(NamedTuple):
    """The versions of one scenario, oldest first."""

    name: str
    versions: Sequence[str]


ItemRecord: TypeAlias = ItemEntry | ItemCodes | PropertyTypes | UserProperties | Scenario | AuditEntry
TenantRecord: TypeAlias = tuple[str, LogRecord | ItemRecord]

logger = logging.getLogger(__name__)


def read_records(path: Path) -> Iterator[TenantRecord]:
    """Iterate over the records; raise StorageError when the file is not a complete backup."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines = _bounded_lines(file)
            header: Any = json.loads(next(lines, "null"))
            if header not in [{**HEADER, "version": version} for version in (VERSION, *EARLIER_VERSIONS)]:
                raise StorageError(f"'{path}' is not a backup that this version of lisarec can read")
            records = _parse(path, lines, header["version"])
            has_codes_in_items = header["version"] in VERSIONS_WITH_CODES_IN_ITEMS
            yield from _with_codes_apart(records) if has_codes_in_items else records
    except (EOFError, OSError, ValueError, TypeError, RecursionError, zlib.error) as exc:
        raise StorageError(f"'{path}' is not a readable backup: {exc}") from exc


def _bounded_lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a file; raises ValueError for one that is too long."""
    while line := file.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            raise ValueError(f"a line has more than {MAX_LINE:,} characters")
        yield line


def _parse(path: Path, lines: Iterable[str], version: int) -> Iterator[TenantRecord]:
    count = 0
    for number, text in enumerate(lines, 2):  # after the header
        try:
            line = json.loads(text)
            if isinstance(line, dict) and "entries" in line:
                break
            record = _record(line, version)
        except (ValueError, TypeError, AttributeError, RecursionError) as exc:
            raise StorageError(f"'{path}' is not a readable backup: line {number}: {exc}") from exc
        count += isinstance(record[1], LogRecord)
        yield record
    else:
        raise StorageError(f"'{path}' is truncated after {count:,} entries")
    if line != {"entries": count}:
        raise StorageError(f"'{path}' lacks entries: it has only {count:,}")


def _record(line: Any, version: int) -> TenantRecord:
    """Return the tenant and the record in a line; raise an error of Python if it is not valid."""
    if isinstance(line, dict) and (read_item := ITEM_LINES.get(next(iter(line), ""))):
        tenant, *values = next(iter(line.values()))
        return tenant, read_item(*values)
    tenant, entry = _from_earlier_json(line) if version in VERSIONS_WITH_CODES_IN_ITEMS else from_json(line)
    entry = entry if version >= FIRST_WITH_LISTS else _with_items(entry)
    _require_types(tenant, entry)
    return tenant, entry


def _require_types(tenant: object, entry: LogRecord) -> None:
    """Raise TypeError if a field of the entry has a wrong type, which a store might keep, and fail to read later."""
    wrong = [one.name for one in fields(entry) if not isinstance(getattr(entry, one.name), FIELD_TYPES[one.name])]
    if not isinstance(tenant, str):
        wrong.append("tenant")
    if isinstance(entry, Event) and not all(isinstance(item_id, str) for item_id in entry.items):
        wrong.append("items")
    if wrong:
        raise TypeError(f"the entry has the wrong type of value in {', '.join(wrong)}")


def _item_entry(item_id: str, *parts: Any) -> ItemEntry:
    title, categories, available, *rest = parts
    properties = {name: property_from_json(value) for part in rest for name, value in part.items()}
    return ItemEntry(item_id, title, None if categories is None else tuple(categories), available, properties)


def item_to_json(item: ItemEntry) -> list[Any]:
    """Return an item as in a line, without the tenant."""
    return [item.item_id, item.title, item.categories, item.available, properties_to_json(item.properties)]


def properties_to_json(properties: Mapping[str, PropertyValue | None]) -> dict[str, Any]:
    """Return properties as in a line."""
    return {name: property_to_json(value) for name, value in properties.items()}


def _user(user_id: str, properties: Mapping[str, Any]) -> UserProperties:
    return UserProperties(user_id, {name: property_from_json(value) for name, value in properties.items()})


def _property_types(types: PropertyTypes) -> PropertyTypes:
    return types


def _item_vector(item_id: str, vector: str) -> ItemEntry:
    return ItemEntry(item_id, vector=b64decode(vector, validate=True))


def _item_codes(item_id: str, tag: str, evidence: int, bias: float, history: str, target: str) -> ItemCodes:
    return ItemCodes(item_id, bytes.fromhex(tag), evidence, bias, bytes.fromhex(history), bytes.fromhex(target))


def codes_to_json(codes: ItemCodes) -> list[str | int | float]:
    """Return an item's codes as in a line, without the tenant."""
    item_id, tag, evidence, bias, history, target = astuple(codes)
    return [item_id, tag.hex(), evidence, bias, history.hex(), target.hex()]


ITEM_LINES: Mapping[str, Callable[..., ItemRecord]] = {
    "audit": AuditEntry,
    "item": _item_entry,
    "item_codes": _item_codes,
    "item_vector": _item_vector,
    "property_types": _property_types,
    "scenario": Scenario,
    "user": _user,
}


def _from_earlier_json(value: Any) -> tuple[str, LogRecord]:
    """Return tenant and record of an entry in an earlier version's backup, where each has the fields of an event.

    An undo has the type "!undo" and the undone id as its item; a merge has the type "!into" and the other user as its
    item. Codes follow the type of an event: "TYPE!TAGCODES!TAGCODES", in hex, the tag of 16 digits.
    """
    tenant, *fields = value
    event = Event(*fields)
    if event.type == "!undo":
        return tenant, Undo(event.user_id, event.item_id, event.timestamp_us)
    if event.type == "!into":
        return tenant, Merge(event.user_id, event.item_id, event.timestamp_us)
    event_type, *codes = event.type.split(EARLIER_CODES_MARK)
    by_tag = tuple((bytes.fromhex(part[:16]), bytes.fromhex(part[16:])) for part in codes)
    return tenant, replace(event, type=event_type, codes=by_tag)


def _with_items(record: LogRecord) -> LogRecord:
    """Return an entry of an earlier version's backup, where an impression's item is its ids with spaces between."""
    if not isinstance(record, Event) or record.type != IMPRESSION:
        return record
    return replace(record, item_id="", items=tuple(record.item_id.split(" ")))


def _with_codes_apart(records: Iterable[TenantRecord]) -> Iterator[TenantRecord]:
    """Yield the records of an earlier version's backup, where items have codes, see `_from_earlier_item`."""
    for tenant, record in records:
        if not isinstance(record, ItemEntry) or EARLIER_CODES_MARK not in record.item_id:
            yield tenant, record
        elif (codes := _from_earlier_item(record)) is not None:
            yield tenant, codes


def _from_earlier_item(entry: ItemEntry) -> ItemCodes | None:
    """Return the codes in an item of an earlier version's backup; None when they cannot be read.

    The item's id is "ITEM!TAG", and its title "EVIDENCE BIAS HISTORY TARGET": tag and codes in hex.
    """
    item_id, _, tag = entry.item_id.partition(EARLIER_CODES_MARK)
    try:
        evidence, bias, history, target = (entry.title or "").split(" ")
        return _item_codes(item_id, tag, int(evidence), float(bias), history, target)
    except ValueError as exc:
        logger.warning("codes of an item cannot be read: %s", exc)
        return None


def encoded_line(content: object) -> bytes:
    """Return a line of the file."""
    return (json.dumps(content, separators=(",", ":")) + "\n").encode()
