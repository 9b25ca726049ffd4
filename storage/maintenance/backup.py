"""A backup of the log and the items in one file, from which any kind of store can be restored.

It has no states, because they are folded from the log, and no erased data. For the file, see
storage/maintenance/backup_format.py.
"""

from __future__ import annotations

import gzip
import os
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import mkstemp
from typing import Any, BinaryIO

from storage.errors import StorageError
from storage.items.audit import AuditEntry, AuditLog
from storage.maintenance.backup_format import (
    HEADER,
    ItemRecord,
    Scenario,
    UserProperties,
    codes_to_json,
    encoded_line,
    item_to_json,
    properties_to_json,
    read_records,
)
from storage.protocol import EventStore, ScenarioStore, UserStore
from storage.records import ItemChanges, ItemCodes, ItemEntry, LogEntry
from storage.state.corrections import posted_as
from storage.state.event import Event, LogRecord, Merge, Undo, digest
from storage.state.record_encoding import to_json

BATCH = 500  # events or items in one call of the store

TenantEvent = tuple[str, Event | Undo]


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
        packed.write(encoded_line(HEADER))
        async for line in _item_lines(store):
            packed.write(encoded_line(line))
        async for tenant, user_id, properties in store.properties.of_users():
            packed.write(encoded_line({"user": [tenant, user_id, properties_to_json(properties)]}))
        async for entries in _complete_logs(store):
            for tenant, entry in entries:
                packed.write(encoded_line(to_json(tenant, entry.record)))
            count += len(entries)
            on_progress(count)
        packed.write(encoded_line({"entries": count}))
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
                yield {"item": [tenant, *item_to_json(item)]}
            vectors = await store.vectors.of_items(tenant, [item.item_id for item in changes.entries])
            for item_id, vector in vectors.items():
                yield {"item_vector": [tenant, item_id, b64encode(vector).decode()]}
            for codes in changes.codes:
                yield {"item_codes": [tenant, *codes_to_json(codes)]}


def _read_events(path: Path) -> Iterator[tuple[str, LogRecord]]:
    """Return the entries of the log; StorageError when the file is not a complete backup."""
    return ((tenant, entry) for tenant, entry in read_records(path) if isinstance(entry, LogRecord))


def _read_items(path: Path) -> Iterator[tuple[str, ItemRecord]]:
    """Return the records outside the log; StorageError when the file is not a complete backup."""
    return ((tenant, entry) for tenant, entry in read_records(path) if not isinstance(entry, LogRecord))
