"""Log entries to archive, and the entries of a user in an archive."""

from __future__ import annotations

from typing import Any

from storage.archive.reader import ArchiveReader
from storage.archive.writer import EventEntry
from storage.records import LogEntry
from storage.state.event import Event
from tests.storage.oracles.random_events import START_US, click

DAY_MS = 86_400_000
START_MS = START_US // 1000
TODAY = "2023-11-14"  # the day of START_MS, in UTC


def logged(seq: int, event: Event, tenant: str = "main", day: int = 0) -> EventEntry:
    return EventEntry(tenant, 0, seq, START_MS + day * DAY_MS, event)


def some(first: int, last: int, user_id: str = "u", **place: Any) -> list[EventEntry]:
    return [logged(seq, click(f"e{seq}", user_id, seq % 12), **place) for seq in range(first, last + 1)]


def place(seq: int) -> dict[int, str]:
    return {0: f"{seq}-1"}


def read(archive: ArchiveReader, user_id: str = "u", tenant: str = "main", **bounds: int) -> list[LogEntry]:
    return archive.read(lambda snapshot: snapshot.entries(tenant, user_id, **bounds))


def seqs(archive: ArchiveReader) -> list[int]:
    return [entry.seq for entry in read(archive)]
