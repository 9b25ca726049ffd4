"""Log and catalogue as a file of their own, from which any store is filled: SQLite from Redis and the other way round.

A gzip file of JSON lines: a header, then {"item": [tenant, fields of an ItemEntry]} for each item of which something
was said, then [tenant, fields of an event] for each entry of the log, each user's in log order, and at last how many
entries there were. States are not in it, since they are folded from the log; neither is what was erased.
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

from storage.corrections import INTO, posted_as
from storage.errors import StorageError
from storage.protocol import UserStore
from storage.records import ItemEntry, LogEntry
from storage.state_event import Event, digest, event_fields

FORMAT = {"lisarec": "log", "version": 2}
FORMATS = (FORMAT, {"lisarec": "log", "version": 1})  # which has no items
AT_ONCE = 500  # events restored in one call

Line = tuple[str, Event]


async def backup(store: UserStore, path: Path, on_progress: Callable[[int], None] = lambda _: None) -> int:
    """Write log and catalogue as they are after the call, while others go on; returns the number of entries.

    Each user is whole; the file appears when all of it is on disk.

    raises  StorageError, OSError
    """
    unfinished = path.with_name(path.name + ".unfinished")
    count = 0
    with unfinished.open("wb") as file:
        with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as packed:
            packed.write(_line(FORMAT))
            async for tenant, item in _items(store):
                packed.write(_line({"item": [tenant, *astuple(item)]}))
            async for entries in _whole_users(store):
                for tenant, entry in entries:
                    packed.write(_line((tenant, *event_fields(entry.event))))
                count += len(entries)
                on_progress(count)
            packed.write(_line({"entries": count}))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    return count


async def restore(
    store: UserStore, path: Path, *, resume: bool = False, on_progress: Callable[[int], None] = lambda _: None
) -> int:
    """Fill an empty store with a back-up; returns the number of its entries.

    Ids count once, so what was interrupted can be done again, with `resume`: then the store may have entries.

    raises  StorageError  when the store has entries, the file is no whole back-up, or the store fails
    """
    if not resume and not await _is_empty(store):
        raise StorageError("the store has users already; restore into an empty one, or go on with --resume")
    items = list(_read_items(path))  # all of the file: a torn one is refused before anything is restored
    for tenant, together in groupby(items, itemgetter(0)):
        entries = [entry for _, entry in together]
        for begin in range(0, len(entries), AT_ONCE):
            await store.put_items(tenant, entries[begin : begin + AT_ONCE])
    merges: dict[tuple[str, str], str] = {}
    waiting: list[Line] = []
    count = 0
    for count, (tenant, event) in enumerate(_read(path), 1):
        merges |= _merge_behind(tenant, event)
        if event.type != INTO:
            if waiting and (len(waiting) == AT_ONCE or waiting[0][0] != tenant):
                await _append(store, waiting)
                waiting = []
                on_progress(count)
            waiting.append((tenant, event))
    await _append(store, waiting)
    for (tenant, visitor), user_id in merges.items():  # what they copy is there already
        await store.merge(tenant, user_id, visitor)
    return count


def _merge_behind(tenant: str, event: Event) -> dict[tuple[str, str], str]:
    """The merge that an entry tells of: the visitor's last one, or a copy, where the visitor was read before it."""
    posted_for, _ = posted_as(event)
    if event.type == INTO:
        return {(tenant, event.user_id): event.item_id}
    return {} if posted_for == event.user_id else {(tenant, posted_for): event.user_id}


async def _append(store: UserStore, lines: list[Line]) -> None:
    if lines:
        await store.append(lines[0][0], [event for _, event in lines])


async def _is_empty(store: UserStore) -> bool:
    async for page in store.log():
        if page.entries:
            return False
    return True


async def _whole_users(store: UserStore) -> AsyncIterator[list[tuple[str, LogEntry]]]:
    entries: list[tuple[str, LogEntry]] = []
    async for page in store.log():
        if page.starts_over:
            entries = []
        if page.erased:
            gone = set(page.erased)
            entries = [one for one in entries if (one[0], digest(one[1].event.user_id)) not in gone]
        entries += page.entries
        if page.is_complete:
            yield entries
            entries = []


async def _items(store: UserStore) -> AsyncIterator[tuple[str, ItemEntry]]:
    for tenant in await store.item_tenants():
        changes = await store.item_changes(tenant, 0, AT_ONCE)
        while changes.entries:
            for entry in changes.entries:
                yield tenant, entry
            changes = await store.item_changes(tenant, changes.version, AT_ONCE)


def _read(path: Path) -> Iterator[Line]:
    """The entries of the log; StorageError where the file is no back-up, or not all of one."""
    return ((tenant, entry) for tenant, entry in _read_all(path) if isinstance(entry, Event))


def _read_items(path: Path) -> Iterator[tuple[str, ItemEntry]]:
    """The entries of the catalogue, as `_read`."""
    return ((tenant, entry) for tenant, entry in _read_all(path) if isinstance(entry, ItemEntry))


def _read_all(path: Path) -> Iterator[tuple[str, Event | ItemEntry]]:
    count = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            if json.loads(next(lines, "null")) not in FORMATS:
                raise StorageError(f"'{path}' is no back-up that this lisarec knows")
            for line in lines:
                found = json.loads(line)
                if isinstance(found, dict) and "item" in found:
                    yield _item(*found["item"])
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


def _item(
    tenant: str, item_id: str, title: str | None, categories: list[str] | None, available: bool | None
) -> tuple[str, ItemEntry]:
    return tenant, ItemEntry(item_id, title, None if categories is None else tuple(categories), available)


def _line(content: object) -> bytes:
    return (json.dumps(content, separators=(",", ":")) + "\n").encode()
