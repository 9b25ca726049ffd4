"""A backup of the log and the items in one file, from which any kind of store can be restored.

It has no states, because they are folded from the log, and no erased data. For the file, see
storage/maintenance/backup_format.py.
"""

from __future__ import annotations

import asyncio
import gzip
import os
from base64 import b64encode
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from itertools import groupby, islice
from pathlib import Path
from tempfile import mkstemp
from typing import Any, BinaryIO

from storage.errors import StorageError
from storage.folders.local_folder import sync
from storage.items.audit import AuditEntry, AuditLog
from storage.maintenance.backup_format import (
    HEADER,
    Scenario,
    TenantRecord,
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
from storage.state.event import LogRecord, Merge, digest
from storage.state.generation import Generation
from storage.state.record_encoding import to_json

BATCH = 500  # events or items in one call of the store
USERS_AT_ONCE = 16  # whose properties share syncs; further ones would wait for a connection to Redis


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
        async for entries in complete_logs(store):
            for tenant, entry in entries:
                packed.write(encoded_line(to_json(tenant, entry.record)))
            count += len(entries)
            on_progress(count)
        packed.write(encoded_line({"entries": count}))
    return count


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file beside its place, and give it its name when it is complete and synced, unless another one has it."""
    descriptor, name = mkstemp(prefix=f"{path.name}.", suffix=".unfinished", dir=path.parent)
    unfinished = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _take_name(path, unfinished)
    except OSError as exc:  # writing does not name the file
        if exc.errno and not exc.filename:
            exc.filename = str(path)
        raise
    finally:
        unfinished.unlink(missing_ok=True)
    try:
        sync(path.parent)
    except OSError:
        path.unlink()
        raise


def _take_name(path: Path, unfinished: Path) -> None:
    """Give the file its name; raise FileExistsError if another one has it."""
    try:
        path.hardlink_to(unfinished)
    except FileExistsError:
        raise
    except OSError:  # a disk without hard links; a kill between the next two steps leaves an empty file
        path.open("xb").close()
        unfinished.replace(path)


async def restore(
    store: UserStore,
    path: Path,
    generations: Mapping[str, Generation] | None = None,
    *,
    resume: bool = False,
    on_progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Fill an empty store with a backup; return the number of its entries.

    An interrupted call can be repeated with `resume`, because event ids count once; the store may then have entries.

    generations  whose states to fold, for each tenant; None for those that the store serves

    raises  StorageError  when the store has entries, the file is not a complete backup, or the store fails
    """
    is_empty = await _is_empty(store)
    if not (is_empty or resume):
        raise StorageError("the store already has users; restore into an empty store, or continue with --resume")
    for _ in read_records(path):  # the whole file, so a truncated one is refused before anything changes
        pass
    if is_empty:
        await store.accept_loss()  # services remember what the store held before
    audited = await _audited(store)
    merges: dict[tuple[str, str], str] = {}
    count = 0
    for tenant, records in _batches(path):
        if not isinstance(records[0], LogRecord):
            await _restore_items(store, tenant, records, audited)
            continue
        if generations is not None:
            store.serve_generations([generations[tenant]])
        for entry in records:
            merges |= _recorded_merge(tenant, entry)
        if events := [entry for entry in records if not isinstance(entry, Merge)]:
            await store.append(tenant, events)
        count += len(records)
        on_progress(count)
    for (tenant, visitor), user_id in merges.items():  # the copied entries are restored already
        if generations is not None:
            store.serve_generations([generations[tenant]])
        await store.merge(tenant, user_id, visitor)
    return count


def _batches(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """Yield the records in batches of one tenant and kind, those of a tenant in the order of the file.

    A batch has what BATCH lines hold of the tenant, because the lines of several tenants may alternate.
    """
    for _, of_kind in groupby(read_records(path), _kind):
        while lines := list(islice(of_kind, BATCH)):
            by_tenant = defaultdict[str, list[Any]](list)
            for tenant, record in lines:
                by_tenant[tenant].append(record)
            yield from by_tenant.items()


def _kind(line: TenantRecord) -> object:
    _, record = line
    return LogRecord if isinstance(record, LogRecord) else type(record)


def _recorded_merge(tenant: str, event: LogRecord) -> dict[tuple[str, str], str]:
    """Return the merge that an entry shows, as {(tenant, visitor): user}; empty for most entries.

    A visitor's log ends in an entry that names the user. A copy in the user's log names the visitor, which matters
    when the visitor's log was read before the merge.
    """
    if isinstance(event, Merge):
        return {(tenant, event.user_id): event.target}
    posted_for, _ = posted_as(event)
    return {} if posted_for == event.user_id else {(tenant, posted_for): event.user_id}


async def _restore_items(
    store: UserStore, tenant: str, records: Sequence[Any], audited: Collection[tuple[str, str]]
) -> None:
    """Put records of one kind outside the log; skip the audit entries in `audited`."""
    match records[0]:
        case ItemEntry():
            await store.put_items(tenant, records)
        case ItemCodes():
            await store.put_item_codes(tenant, records)
        case UserProperties():
            for begin in range(0, len(records), USERS_AT_ONCE):
                users = records[begin : begin + USERS_AT_ONCE]
                await asyncio.gather(*(store.properties.put_of_user(tenant, *user) for user in users))
        case Scenario():
            for scenario in records:
                await _restore_scenario(store.scenarios, tenant, scenario)
        case AuditEntry():
            if missing := [entry for entry in records if (tenant, entry.to_json()) not in audited]:
                await store.audit.append(tenant, missing)
        case _:
            for types in records:
                await store.properties.declare(tenant, types)


async def _restore_scenario(store: ScenarioStore, tenant: str, scenario: Scenario) -> None:
    """Add the versions that an interrupted call has not added."""
    known = len(await store.versions(tenant, scenario.name))
    for version in scenario.versions[known:]:
        while not await store.add(tenant, scenario.name, version, believed=await store.revision(tenant)):
            pass  # somebody else has changed another one


async def _audited(store: UserStore) -> set[tuple[str, str]]:
    """Return the tenants and texts of the audit entries in the store, such as those of an interrupted restore."""
    return {
        (tenant, entry.to_json())
        for tenant in await store.tenants()
        async for entry in _audit_entries(store.audit, tenant)
    }


async def _audit_entries(audit: AuditLog, tenant: str) -> AsyncIterator[AuditEntry]:
    after = 0
    while page := await audit.entries(tenant, after=after, limit=BATCH):
        for one in page:
            yield one.entry
        after = page[-1].number


async def _is_empty(store: EventStore) -> bool:
    async for page in store.log():
        if page.entries:
            return False
    return True


async def complete_logs(store: EventStore) -> AsyncIterator[list[tuple[str, LogEntry]]]:
    """Iterate over the log in parts of whole users: the entries with their tenants, those of one user in log order."""
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
    for tenant in await store.tenants():
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
