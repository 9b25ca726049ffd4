"""A back-up of log and items in one file, from which any kind of store can be restored.

A gzip file of JSON lines: a header, then {"item": [tenant, fields of an ItemEntry]} for each item that a tenant has
changed, then [tenant, fields of an event] for each entry of the log, each user's in log order, and last the number of
entries. It has no states, since they are folded from the log, and nothing that was erased.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import astuple
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from storage.errors import StorageError
from storage.protocol import EventStore, ItemStore, UserStore
from storage.records import ItemEntry, LogEntry
from storage.state.corrections import INTO, posted_as
from storage.state.event import Event, digest, event_fields

FORMAT = {"lisarec": "log", "version": 2}
READABLE_FORMATS = (FORMAT, {"lisarec": "log", "version": 1})  # version 1 has no items
BATCH = 500  # events or items in one call of the store

TenantEvent = tuple[str, Event]


async def backup(store: UserStore, path: Path, on_progress: Callable[[int], None] = lambda _: None) -> int:
    """Write log and items as they are after the call; return the number of entries.

    Other processes may go on meanwhile. Each user's log is complete. The file appears when all of it is on disk.

    raises  StorageError, OSError
    """
    unfinished = path.with_name(path.name + ".unfinished")
    count = 0
    with unfinished.open("wb") as file:
        with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as packed:
            packed.write(_encoded_line(FORMAT))
            async for tenant, item in _item_entries(store):
                packed.write(_encoded_line({"item": [tenant, *astuple(item)]}))
            async for entries in _complete_logs(store):
                for tenant, entry in entries:
                    packed.write(_encoded_line((tenant, *event_fields(entry.event))))
                count += len(entries)
                on_progress(count)
            packed.write(_encoded_line({"entries": count}))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    return count


async def restore(
    store: UserStore, path: Path, *, resume: bool = False, on_progress: Callable[[int], None] = lambda _: None
) -> int:
    """Fill an empty store with a back-up; return the number of its entries.

    An interrupted call can be repeated with `resume`, since event ids count once: then the store may have entries.

    raises  StorageError  when the store has entries, the file is no complete back-up, or the store fails
    """
    if not resume and not await _is_empty(store):
        raise StorageError("the store has users already; restore into an empty one, or go on with --resume")
    items = list(_read_items(path))  # reads the whole file: a torn one is refused before anything is restored
    for tenant, of_tenant in groupby(items, itemgetter(0)):
        entries = [entry for _, entry in of_tenant]
        for begin in range(0, len(entries), BATCH):
            await store.put_items(tenant, entries[begin : begin + BATCH])
    merges: dict[tuple[str, str], str] = {}
    waiting: list[TenantEvent] = []
    count = 0
    for count, (tenant, event) in enumerate(_read_events(path), 1):
        merges |= _recorded_merge(tenant, event)
        if event.type != INTO:
            if waiting and (len(waiting) == BATCH or waiting[0][0] != tenant):
                await _append(store, waiting)
                waiting = []
                on_progress(count)
            waiting.append((tenant, event))
    await _append(store, waiting)
    for (tenant, visitor), user_id in merges.items():  # the copied entries are restored already
        await store.merge(tenant, user_id, visitor)
    return count


def _recorded_merge(tenant: str, event: Event) -> dict[tuple[str, str], str]:
    """The merge that an entry shows, as {(tenant, visitor): user}; empty for most entries.

    A visitor's log ends in an entry that names the user. A copy in the user's log names the visitor, which matters
    when the visitor's log was read before the merge.
    """
    posted_for, _ = posted_as(event)
    if event.type == INTO:
        return {(tenant, event.user_id): event.item_id}
    return {} if posted_for == event.user_id else {(tenant, posted_for): event.user_id}


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
            entries = [(tenant, one) for tenant, one in entries if (tenant, digest(one.event.user_id)) not in erased]
        entries += page.entries
        if page.is_complete:
            yield entries
            entries = []


async def _item_entries(store: ItemStore) -> AsyncIterator[tuple[str, ItemEntry]]:
    for tenant in await store.item_tenants():
        changes = await store.item_changes(tenant, 0, BATCH)
        while changes.entries:
            for entry in changes.entries:
                yield tenant, entry
            changes = await store.item_changes(tenant, changes.version, BATCH)


def _read_events(path: Path) -> Iterator[TenantEvent]:
    """The entries of the log; StorageError when the file is no complete back-up."""
    return ((tenant, entry) for tenant, entry in _read_lines(path) if isinstance(entry, Event))


def _read_items(path: Path) -> Iterator[tuple[str, ItemEntry]]:
    """The entries of items; StorageError when the file is no complete back-up."""
    return ((tenant, entry) for tenant, entry in _read_lines(path) if isinstance(entry, ItemEntry))


def _read_lines(path: Path) -> Iterator[tuple[str, Event | ItemEntry]]:
    count = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            if json.loads(next(lines, "null")) not in READABLE_FORMATS:
                raise StorageError(f"'{path}' is no back-up that this lisarec knows")
            for line in lines:
                found = json.loads(line)
                if isinstance(found, dict) and "item" in found:
                    yield _item_entry(*found["item"])
                    continue
                if isinstance(found, dict):
                    if found != {"entries": count}:
                        raise StorageError(f"'{path}' lacks entries: it has {count:,}")
                    return
                tenant, *fields = found
                count += 1
                yield tenant, Event(*fields)
    except (EOFError, OSError, ValueError, TypeError, zlib.error) as exc:
        raise StorageError(f"'{path}' cannot be read as a back-up: {exc}") from exc
    raise StorageError(f"'{path}' is torn: it has {count:,} entries and no end")


def _item_entry(
    tenant: str, item_id: str, title: str | None, categories: list[str] | None, available: bool | None
) -> tuple[str, ItemEntry]:
    return tenant, ItemEntry(item_id, title, None if categories is None else tuple(categories), available)


def _encoded_line(content: object) -> bytes:
    return (json.dumps(content, separators=(",", ":")) + "\n").encode()
