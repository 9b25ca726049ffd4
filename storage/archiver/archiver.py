"""Moving the log into the archive exactly once.

The positions that are archived stand in the archive's own manifest and nowhere else, so they change in one step with
the files. An archiver that is killed before that step archives the same entries again, into other files; one that is
killed after it goes on behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from storage.archive.writer import ArchiveWriter, ErasureEntry, EventEntry
from storage.archiver.source import LogSource

MAX_ROWS = 200_000  # committed at once; about 200 MB of memory


@dataclass(frozen=True, slots=True)
class TurnCounts:
    """The result of one run of the archiver, in events."""

    archived: int = 0
    trimmed: int = 0
    dropped: int = 0


def archive_log(
    source: LogSource, writer: ArchiveWriter, now: datetime, *, keep_tail_s: float, keep_days: int | None
) -> TurnCounts:
    """Run one turn: archive what is new, merge files, trim the log, drop what is too old in the archive.

    keep_tail_s  how long events stay in the log at least
    keep_days    how many whole days events stay in the archive; None: for ever
    """
    source.claim(writer.manifest.archive_id, is_new=not writer.manifest.positions)
    archived = _archive_new_entries(source, writer)
    writer.compact(today=_day(now))
    dropped = 0 if keep_days is None else writer.drop_before(_day(now - timedelta(days=keep_days)))
    before_ms = int((now.timestamp() - keep_tail_s) * 1000)
    return TurnCounts(archived, source.trim(writer.manifest.positions.get, before_ms), dropped)


def _archive_new_entries(source: LogSource, writer: ArchiveWriter) -> int:
    entries: list[EventEntry | ErasureEntry] = []
    positions: dict[int, str] = {}
    archived = 0
    # the iterator goes on from the positions that it has reached, whether they are committed or not yet
    for page in source.entries(lambda number: positions.get(number) or writer.manifest.positions.get(number)):
        entries += page.entries
        positions[page.partition] = str(page.position)
        if len(entries) >= MAX_ROWS:
            archived += _commit(source, writer, entries, positions)
            entries = []
    return archived + _commit(source, writer, entries, positions)


def _commit(
    source: LogSource,
    writer: ArchiveWriter,
    entries: Sequence[EventEntry | ErasureEntry],
    positions: Mapping[int, str],
) -> int:
    erasures = sum(isinstance(entry, ErasureEntry) for entry in entries)
    if erasures:
        source.scrub()  # before the commit: an archiver killed in between scrubs twice, and not never
    source.require(positions)  # a replica that was behind may have taken over, and numbers what comes as what it lacks
    writer.commit(entries, positions)
    return len(entries) - erasures


def _day(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d")
