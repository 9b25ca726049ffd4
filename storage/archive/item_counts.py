"""Counts of the items in the log, which rank them while there is no model.

The counts are not stored. Each request for them reads the log: four columns of its archived part, and the newest
entries of the rest. So the counts are right after a restart and in every process, and leave out erased users.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import polars as pl

from storage.archive.manifest import Manifest
from storage.archive.reader import ArchiveSnapshot
from storage.state.cold_codes import MARK
from storage.state.corrections import INTO, UNDO
from storage.state.event import Event

COLUMNS = ("user_id", "event_id", "item_id", "type")
MAX_NEWEST_ENTRIES = 51_200  # of those that are not archived, some 100 ms to read

ItemCounts = dict[str, int]


def effective_events(log: pl.LazyFrame) -> pl.LazyFrame:
    """Return the events that no undo takes back, without those of merged users, of which the other user has copies."""
    undone = log.filter(pl.col("type") == UNDO).select("user_id", event_id="item_id").collect()
    merged = log.filter(pl.col("type") == INTO).select("user_id").collect()
    events = log.filter(~pl.col("type").is_in([UNDO, INTO]))
    if len(undone):
        events = events.join(undone.lazy(), on=["user_id", "event_id"], how="anti")
    if len(merged):
        events = events.join(merged.lazy(), on="user_id", how="anti")
    return events.with_columns(type=pl.col("type").str.replace(f"{MARK}.*", ""))


def count_items(log: pl.LazyFrame, types: Collection[str]) -> ItemCounts:
    """Return how many events of these types each item has."""
    events = effective_events(log).filter(pl.col("type").is_in(list(types)))
    return dict(events.group_by("item_id").len().collect().iter_rows())


def count_items_of_rows(rows: Iterable[tuple[str, str, str, str]], types: Collection[str]) -> ItemCounts:
    """Return the same for rows of COLUMNS."""
    frame = pl.DataFrame(list(rows), schema=dict.fromkeys(COLUMNS, pl.String), orient="row")
    return count_items(frame.lazy(), types)


def count_items_of_events(events: Iterable[Event], types: Collection[str]) -> ItemCounts:
    """Return the same for events."""
    return count_items_of_rows(((event.user_id, event.event_id, event.item_id, event.type) for event in events), types)


def add_counts(first: ItemCounts, second: ItemCounts) -> ItemCounts:
    """Return the sums of the counts."""
    return first | {item_id: first.get(item_id, 0) + count for item_id, count in second.items()}


@dataclass(frozen=True, slots=True)
class ArchivedItemCounts:
    """The item counts of an archive, of all entries up to its manifest's positions."""

    manifest: Manifest
    counts: ItemCounts

    @classmethod
    def query(
        cls, known: "ArchivedItemCounts | None", archive_id: str, tenant: str, types: Collection[str]
    ) -> "Callable[[ArchiveSnapshot], ArchivedItemCounts]":
        """Return a query for `ArchiveReader.read`, which returns the known counts while the archive has not changed."""

        def read_counts(snapshot: ArchiveSnapshot) -> ArchivedItemCounts:
            snapshot.require(archive_id, 0, 0)
            if known is not None and known.manifest is snapshot.manifest:
                return known
            paths = snapshot.paths(tenant)
            return cls(snapshot.manifest, count_items(pl.scan_parquet(paths), types) if paths else {})

        return read_counts
