"""A backup of the log and the items in one file, from which any kind of store can be restored.

A gzip file of JSON lines: a header, then for each tenant with items {"property_types": [tenant, PropertyTypes]},
{"scenario": [tenant, name, versions]} for each scenario, {"audit": [tenant, fields of an AuditEntry]} for each entry,
{"item": [tenant, fields of an ItemEntry, properties as `property_to_json` encodes them]} for each item that it has
changed, {"item_vector": [tenant, item id, vector in base64]} for each that has one, and
{"item_codes": [tenant, fields of an ItemCodes]} for each item and generation with codes, where bytes are in hex. Then
come {"user": [tenant, user id, properties]} for each user who has some, each entry of the log as in
storage/state/record_encoding.py, each user's in log order, and last the number of entries. It has no states, because
they are folded from the log, and no erased data. docs/reference/data-formats.md describes it for other programs.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import zlib
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import mkstemp
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from storage.errors import StorageError
from storage.items.audit import AuditEntry, AuditLog
from storage.protocol import EventStore, ScenarioStore, UserStore
from storage.records import (
    ItemChanges,
    ItemCodes,
    ItemEntry,
    LogEntry,
    PropertyTypes,
    PropertyValue,
    property_from_json,
    property_to_json,
)
from storage.state.corrections import posted_as
from storage.state.event import IMPRESSION, Event, LogRecord, Merge, Undo, digest
from storage.state.record_encoding import from_json, to_json

VERSION = 8
# version 7 has no audit log, 6 no vectors, 4 no scenarios, 3 no properties and 1 no items
EARLIER_VERSIONS = (1, 2, 3, 4, 5, 6, 7)
FIRST_WITH_LISTS = 6  # see `_with_items`
VERSIONS_WITH_CODES_IN_ITEMS = (1, 2)  # see `_from_earlier_json` and `_from_earlier_item`
EARLIER_CODES_MARK = "!"
BATCH = 500  # events or items in one call of the store

TenantEvent = tuple[str, Event | Undo]


class UserProperties(NamedTuple):
    """The properties of one user."""

    user_id: str
    properties: Mapping[str, PropertyValue]


class Scenario(NamedTuple):
    """The versions of one scenario, oldest first."""

    name: str
    versions: Sequence[str]


ItemRecord: TypeAlias = ItemEntry | ItemCodes | PropertyTypes | UserProperties | Scenario | AuditEntry

logger = logging.getLogger(__name__)


async def backup(store: UserStore, path: Path, on_progress: Callable[[int], None] = lambda _: None) -> int:
    """Write the log and the items as of some time after the call. Return the number of entries.

    Other processes may continue meanwhile. Each user's log is complete. Only the owner can read the file, which appears
    when all of it is on disk.

    raises  FileExistsError        if the file exists by then; it stays as it is
            StorageError, OSError  no part of the file stays
    """
    count = 0
    with (
        _new_file(path) as file,
        gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as packed,
    ):
        packed.write(_encoded_line(_header(VERSION)))
        async for line in _item_lines(store):
            packed.write(_encoded_line(line))
        async for tenant, user_id, properties in store.properties.of_users():
            packed.write(_encoded_line({"user": [tenant, user_id, _properties_to_json(properties)]}))
        async for entries in _complete_logs(store):
            for tenant, entry in entries:
                packed.write(_encoded_line(to_json(tenant, entry.record)))
            count += len(entries)
            on_progress(count)
        packed.write(_encoded_line({"entries": count}))
    return count


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file beside its place, and move it there when it is complete and synced, unless another one is there."""
    descriptor, name = mkstemp(prefix=f"{path.name}.", suffix=".unfinished", dir=path.parent)
    unfinished = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        path.open("xb").close()  # only one process takes the name; unlike a hard link, on any disk
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


async def restore(
    store: UserStore, path: Path, *, resume: bool = False, on_progress: Callable[[int], None] = lambda _: None
) -> int:
    """Fill an empty store with a backup; return the number of its entries.

    An interrupted call can be repeated with `resume`, because event ids count once; the store may then have entries.

    raises  StorageError  when the store has entries, the file is not a complete backup, or the store fails
    """
    is_empty = await _is_empty(store)
    if not (is_empty or resume):
        raise StorageError("the store already has users; restore into an empty store, or continue with --resume")
    items = list(_read_items(path))  # reads the whole file, so a truncated one is refused before anything changes
    if is_empty:
        await store.accept_loss()  # services remember what the store held before
    for tenant, of_tenant in groupby(items, itemgetter(0)):
        await _restore_items(store, tenant, [item for _, item in of_tenant])
    merges: dict[tuple[str, str], str] = {}
    waiting: list[TenantEvent] = []
    count = 0
    for count, (tenant, event) in enumerate(_read_events(path), 1):
        merges |= _recorded_merge(tenant, event)
        if not isinstance(event, Merge):
            if waiting and (len(waiting) == BATCH or waiting[0][0] != tenant):
                await _append(store, waiting)
                waiting = []
                on_progress(count)
            waiting.append((tenant, event))
    await _append(store, waiting)
    for (tenant, visitor), user_id in merges.items():  # the copied entries are restored already
        await store.merge(tenant, user_id, visitor)
    return count


def _recorded_merge(tenant: str, event: LogRecord) -> dict[tuple[str, str], str]:
    """Return the merge that an entry shows, as {(tenant, visitor): user}; empty for most entries.

    A visitor's log ends in an entry that names the user. A copy in the user's log names the visitor, which matters
    when the visitor's log was read before the merge.
    """
    if isinstance(event, Merge):
        return {(tenant, event.user_id): event.target}
    posted_for, _ = posted_as(event)
    return {} if posted_for == event.user_id else {(tenant, posted_for): event.user_id}


async def _restore_items(store: UserStore, tenant: str, items: Sequence[ItemRecord]) -> None:
    for types in (item for item in items if isinstance(item, dict)):
        await store.properties.declare(tenant, types)
    for user in (item for item in items if isinstance(item, UserProperties)):
        await store.properties.put_of_user(tenant, *user)
    for scenario in (item for item in items if isinstance(item, Scenario)):
        await _restore_scenario(store.scenarios, tenant, scenario)
    await _restore_audit(store.audit, tenant, [item for item in items if isinstance(item, AuditEntry)])
    entries = [item for item in items if isinstance(item, ItemEntry)]
    codes = [item for item in items if isinstance(item, ItemCodes)]
    for begin in range(0, len(entries), BATCH):
        await store.put_items(tenant, entries[begin : begin + BATCH])
    for begin in range(0, len(codes), BATCH):
        await store.put_item_codes(tenant, codes[begin : begin + BATCH])


async def _restore_scenario(store: ScenarioStore, tenant: str, scenario: Scenario) -> None:
    """Add the versions that an interrupted call has not added."""
    known = len(await store.versions(tenant, scenario.name))
    for version in scenario.versions[known:]:
        while not await store.add(tenant, scenario.name, version, believed=await store.revision(tenant)):
            pass  # somebody else has changed another one


async def _restore_audit(audit: AuditLog, tenant: str, entries: Sequence[AuditEntry]) -> None:
    """Append the entries that an interrupted call has not appended."""
    known = {entry.to_json() async for entry in _audit_entries(audit, tenant)}
    missing = [entry for entry in entries if entry.to_json() not in known]
    for begin in range(0, len(missing), BATCH):
        await audit.append(tenant, missing[begin : begin + BATCH])


async def _audit_entries(audit: AuditLog, tenant: str) -> AsyncIterator[AuditEntry]:
    after = 0
    while page := await audit.entries(tenant, after=after, limit=BATCH):
        for one in page:
            yield one.entry
        after = page[-1].number


async def _append(store: EventStore, events: list[TenantEvent]) -> None:
    if events:
        await store.append(events[0][0], [event for _, event in events])


async def _is_empty(store: EventStore) -> bool:
    async for page in store.log():
        if page.entries:
            return False
    return True


async def _complete_logs(store: EventStore) -> AsyncIterator[list[tuple[str, LogEntry]]]:
    entries: list[tuple[str, LogEntry]] = []
    async for page in store.log():
        if page.starts_over:
            entries = []
        if page.erased:
            erased = set(page.erased)
            entries = [(tenant, one) for tenant, one in entries if (tenant, digest(one.record.user_id)) not in erased]
        entries += page.entries
        if page.is_complete:
            yield entries
            entries = []


async def _item_lines(store: UserStore) -> AsyncIterator[dict[str, Any]]:
    for tenant in await store.item_tenants():
        yield {"property_types": [tenant, (await store.properties.held(tenant)).types]}
        for name in (await store.scenarios.scenarios(tenant)).newest:
            yield {"scenario": [tenant, name, await store.scenarios.versions(tenant, name)]}
        async for entry in _audit_entries(store.audit, tenant):
            yield {"audit": [tenant, *astuple(entry)]}
        changes = ItemChanges([], 0)
        while (following := await store.item_changes(tenant, changes.version, BATCH)).version > changes.version:
            changes = following
            for item in changes.entries:
                yield {"item": [tenant, *_item_to_json(item)]}
            vectors = await store.vectors.of_items(tenant, [item.item_id for item in changes.entries])
            for item_id, vector in vectors.items():
                yield {"item_vector": [tenant, item_id, b64encode(vector).decode()]}
            for codes in changes.codes:
                yield {"item_codes": [tenant, *_codes_to_json(codes)]}


def _read_events(path: Path) -> Iterator[tuple[str, LogRecord]]:
    """Return the entries of the log; StorageError when the file is not a complete backup."""
    return ((tenant, entry) for tenant, entry in _read_lines(path) if isinstance(entry, LogRecord))


def _read_items(path: Path) -> Iterator[tuple[str, ItemRecord]]:
    """Return the records outside the log; StorageError when the file is not a complete backup."""
    return ((tenant, entry) for tenant, entry in _read_lines(path) if not isinstance(entry, LogRecord))


def _read_lines(path: Path) -> Iterator[tuple[str, LogRecord | ItemRecord]]:
    count = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            header = json.loads(next(lines, "null"))
            if header not in map(_header, (VERSION, *EARLIER_VERSIONS)):
                raise StorageError(f"'{path}' is not a backup that this version of lisarec can read")
            has_codes_in_items = header["version"] in VERSIONS_WITH_CODES_IN_ITEMS
            read_record = _from_earlier_json if has_codes_in_items else from_json
            for line in lines:
                line_value = json.loads(line)
                if isinstance(line_value, dict) and "item" in line_value:
                    tenant, item = _item_entry(*line_value["item"])
                    if not has_codes_in_items or EARLIER_CODES_MARK not in item.item_id:
                        yield tenant, item
                    elif (codes := _from_earlier_item(item)) is not None:
                        yield tenant, codes
                    continue
                if isinstance(line_value, dict) and (read_item := ITEM_LINES.get(next(iter(line_value), ""))):
                    yield read_item(*next(iter(line_value.values())))
                    continue
                if isinstance(line_value, dict) and "entries" in line_value:
                    if line_value != {"entries": count}:
                        raise StorageError(f"'{path}' lacks entries: it has only {count:,}")
                    return
                count += 1
                tenant, record = read_record(line_value)
                yield tenant, record if header["version"] >= FIRST_WITH_LISTS else _with_items(record)
    except (EOFError, OSError, ValueError, TypeError, zlib.error) as exc:
        raise StorageError(f"'{path}' is not a readable backup: {exc}") from exc
    raise StorageError(f"'{path}' is truncated after {count:,} entries")


def _item_entry(tenant: str, item_id: str, *parts: Any) -> tuple[str, ItemEntry]:
    title, categories, available, *rest = parts
    properties = {name: property_from_json(value) for part in rest for name, value in part.items()}
    return tenant, ItemEntry(item_id, title, None if categories is None else tuple(categories), available, properties)


def _item_to_json(item: ItemEntry) -> list[Any]:
    return [item.item_id, item.title, item.categories, item.available, _properties_to_json(item.properties)]


def _properties_to_json(properties: Mapping[str, PropertyValue | None]) -> dict[str, Any]:
    return {name: property_to_json(value) for name, value in properties.items()}


def _user(tenant: str, user_id: str, properties: Mapping[str, Any]) -> tuple[str, UserProperties]:
    return tenant, UserProperties(user_id, {name: property_from_json(value) for name, value in properties.items()})


def _scenario(tenant: str, name: str, versions: Sequence[str]) -> tuple[str, Scenario]:
    return tenant, Scenario(name, versions)


def _audit_entry(tenant: str, *fields: Any) -> tuple[str, AuditEntry]:
    return tenant, AuditEntry(*fields)


def _property_types(tenant: str, types: PropertyTypes) -> tuple[str, PropertyTypes]:
    return tenant, types


def _item_vector(tenant: str, item_id: str, vector: str) -> tuple[str, ItemEntry]:
    return tenant, ItemEntry(item_id, vector=b64decode(vector, validate=True))


def _item_codes(
    tenant: str, item_id: str, tag: str, evidence: int, bias: float, history: str, target: str
) -> tuple[str, ItemCodes]:
    codes = ItemCodes(item_id, bytes.fromhex(tag), evidence, bias, bytes.fromhex(history), bytes.fromhex(target))
    return tenant, codes


def _codes_to_json(codes: ItemCodes) -> list[str | int | float]:
    item_id, tag, evidence, bias, history, target = astuple(codes)
    return [item_id, tag.hex(), evidence, bias, history.hex(), target.hex()]


ITEM_LINES: Mapping[str, Callable[..., tuple[str, ItemRecord]]] = {
    "audit": _audit_entry,
    "item_codes": _item_codes,
    "item_vector": _item_vector,
    "property_types": _property_types,
    "scenario": _scenario,
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


def _from_earlier_item(entry: ItemEntry) -> ItemCodes | None:
    """Return the codes in an item of an earlier version's backup; None when they cannot be read.

    The item's id is "ITEM!TAG", and its title "EVIDENCE BIAS HISTORY TARGET": tag and codes in hex.
    """
    item_id, _, tag = entry.item_id.partition(EARLIER_CODES_MARK)
    try:
        evidence, bias, history, target = (entry.title or "").split(" ")
        return ItemCodes(
            item_id, bytes.fromhex(tag), int(evidence), float(bias), bytes.fromhex(history), bytes.fromhex(target)
        )
    except ValueError as exc:
        logger.warning("codes of an item cannot be read: %s", exc)
        return None


def _header(version: int) -> dict[str, Any]:
    return {"lisarec": "log", "version": version}


def _encoded_line(content: object) -> bytes:
    return (json.dumps(content, separators=(",", ":")) + "\n").encode()
