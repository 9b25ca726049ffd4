"""The number of users of each item in the log, which ranks the items until there is a model.

The counts are not stored. Each request for them reads the log: a few columns of the newest archived files, and the
newest entries of the rest. So the counts are right after a restart and in every process, and leave out erased users.

Archived rows are counted in pieces, by user. A user whose rows are in two pieces may count twice, and an undo may be in
another piece than its event: this concerns one user for every boundary.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from storage.archive.item_events import events_on_items
from storage.archive.manifest import Manifest
from storage.archive.pieces import merge
from storage.archive.reader import ArchiveSnapshot
from storage.state.event import Event, LogRecord, Undo
from storage.state.record_encoding import EVENT, MERGE, UNDO

COLUMNS = ("kind", "user_id", "event_id", "item_id", "type")
MAX_ARCHIVED_ROWS = 2_000_000  # and the rest of the last file: some 4 s of CPU and 0.4 GB for two million to count
MAX_NEWEST_ENTRIES = 51_200  # of those that are not archived, some 100 ms to read

ItemCounts = dict[str, int]


def count_items(log: pl.LazyFrame, types: Collection[str]) -> ItemCounts:
    """Return how many users have events of these types on each item."""
    events = events_on_items(log).filter(pl.col("type").is_in(list(types)))
    return dict(events.group_by("item_id").agg(pl.col("user_id").n_unique()).collect().iter_rows())


def count_items_of_rows(rows: Iterable[Sequence[str | None]], types: Collection[str]) -> ItemCounts:
    """Return what `count_items` does, for rows of COLUMNS."""
    frame = pl.DataFrame(list(rows), schema=dict.fromkeys(COLUMNS, pl.String), orient="row")
    return count_items(frame.lazy(), types)


def count_items_of_records(records: Iterable[LogRecord], types: Collection[str]) -> ItemCounts:
    """Return what `count_items` does, for records of a log."""
    return count_items_of_rows(map(_row, records), types)


def _row(record: LogRecord) -> tuple[str | None, ...]:
    """Return the record's COLUMNS."""
    if isinstance(record, Event):
        return EVENT, record.user_id, record.event_id, record.item_id, record.type
    if isinstance(record, Undo):
        return UNDO, record.user_id, record.event_id, None, None
    return MERGE, record.user_id, None, None, None


@dataclass(frozen=True, slots=True)
class ArchivedItemCounts:
    """The item counts of an archive, of all entries up to its manifest's positions."""

    manifest: Manifest
    counts: ItemCounts


def count_archived_items(
    snapshot: ArchiveSnapshot, known: ArchivedItemCounts | None, archive_id: str, tenant: str, types: Collection[str]
) -> ArchivedItemCounts:
    """Return the item counts of an archive: the known ones if it has not changed since."""
    snapshot.require(archive_id, 0, 0)
    if known is not None and known.manifest is snapshot.manifest:
        return known
    counts: Counter[str] = Counter()
    for piece in merge(snapshot.paths(tenant, MAX_ARCHIVED_ROWS), (*COLUMNS, "seq")):
        counts.update(count_items(piece.lazy(), types))
    return ArchivedItemCounts(snapshot.manifest, counts)
