"""Moving the log into the archive exactly once.

Only the archive's manifest has the archived positions, so they change in one step with the files. An archiver that is
killed before that step archives the same entries again, into other files. After that step, it continues with the next
entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from storage.archive.writer import ArchiveWriter, ErasureEntry, EventEntry
from storage.archiver.source import LogSource

MAX_ROWS = 200_000  # committed at once; about 200 MB of memory
MAX_LAG_S = 86_400.0  # an entry that is archived later is filed under the day of archiving


@dataclass(frozen=True, slots=True)
class TurnCounts:
    """The result of one run of the archiver, in events."""

    archived: int = 0
    trimmed: int = 0
    dropped: int = 0


def archive_log(
    source: LogSource, writer: ArchiveWriter, now: datetime, *, keep_tail_s: float, keep_days: int | None
) -> TurnCounts:
    """Run one turn: drop the archive's old days, archive new entries, trim the log, merge files, scrub the store.

    Dropping comes first, because it makes room on a full disk. Merging comes late, because it needs room. Scrubbing
    comes last, because nothing else needs it; if it fails, or the archiver is killed, the next turn repeats it.

    keep_tail_s  the minimum time that events stay in the log
    keep_days    the number of whole days that events stay in the archive; None: for ever
    """
    source.claim(writer.manifest.archive_id, is_new=not writer.manifest.positions)
    dropped = 0 if keep_days is None else writer.drop_before(_day(now - timedelta(days=keep_days)))
    archived = _archive_new_entries(source, writer, now)
    trimmed = source.trim(writer.manifest.positions.get, int((now.timestamp() - keep_tail_s) * 1000))
    writer.compact(today=_day(now))
    if writer.manifest.must_scrub:
        source.scrub()  # Redis's append-only file may have them, too
        writer.note_scrubbed()
    return TurnCounts(archived, trimmed, dropped)


def _archive_new_entries(source: LogSource, writer: ArchiveWriter, now: datetime) -> int:
    entries: list[EventEntry | ErasureEntry] = []
    positions: dict[int, str] = {}
    archived = 0
    # the iterator continues from the positions that it has reached, committed or not
    for page in source.entries(lambda number: positions.get(number) or writer.manifest.positions.get(number)):
        entries += [_filed(entry, now) for entry in page.entries]
        positions[page.partition] = str(page.position)
        if len(entries) >= MAX_ROWS:
            archived += _commit(source, writer, entries, positions)
            entries = []
    return archived + _commit(source, writer, entries, positions)


def _filed(entry: EventEntry | ErasureEntry, now: datetime) -> EventEntry | ErasureEntry:
    """Return the entry, filed under today if it was logged long ago.

    Its time is that of the store's clock. If that clock was wrong, the entry would be dropped too early.
    """
    if isinstance(entry, EventEntry) and entry.logged_ms / 1000 < now.timestamp() - MAX_LAG_S:
        return replace(entry, filed_under=_day(now))
    return entry


def _commit(
    source: LogSource,
    writer: ArchiveWriter,
    entries: Sequence[EventEntry | ErasureEntry],
    positions: Mapping[int, str],
) -> int:
    erasures = sum(isinstance(entry, ErasureEntry) for entry in entries)
    if erasures:
        source.scrub()  # before the commit, so that an archiver killed in between scrubs twice rather than never
    source.require(positions)  # after a failover to a replica that was behind, new entries get the numbers of lost ones
    writer.commit(entries, positions)
    return len(entries) - erasures


def _day(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d")
