"""How often items stand in the log: all that can be said of them while there is no model.

Nothing is kept for it. The log is read whenever somebody wants to know: all of its archived part, of which it takes
three columns, and the newest entries of the rest. So the counts are right after a restart, in every process, and
without who was erased.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import polars as pl

from storage.archive import Manifest, Snapshot
from storage.cold import MARK
from storage.corrections import INTO, UNDO
from storage.state_event import Event

COLUMNS = ("user_id", "event_id", "item_id", "type")
NEWEST = 51_200  # entries that are not archived, some 100 ms to read

ItemCounts = dict[str, int]


def counted(log: pl.LazyFrame) -> pl.LazyFrame:
    """The events that no undo takes back, without those of who became another user, whose log has copies."""
    undone = log.filter(pl.col("type") == UNDO).select("user_id", event_id="item_id").collect()
    merged = log.filter(pl.col("type") == INTO).select("user_id").collect()
    events = log.filter(~pl.col("type").is_in([UNDO, INTO]))
    if len(undone):
        events = events.join(undone.lazy(), on=["user_id", "event_id"], how="anti")
    if len(merged):
        events = events.join(merged.lazy(), on="user_id", how="anti")
    return events.with_columns(type=pl.col("type").str.replace(f"{MARK}.*", ""))


def item_counts(log: pl.LazyFrame, types: Collection[str]) -> ItemCounts:
    """How many events of these types each item has."""
    events = counted(log).filter(pl.col("type").is_in(list(types)))
    return dict(events.group_by("item_id").len().collect().iter_rows())


def of_rows(rows: Iterable[tuple[str, str, str, str]], types: Collection[str]) -> ItemCounts:
    """The same of rows with these COLUMNS."""
    frame = pl.DataFrame(list(rows), schema=dict.fromkeys(COLUMNS, pl.String), orient="row")
    return item_counts(frame.lazy(), types)


def of_events(events: Iterable[Event], types: Collection[str]) -> ItemCounts:
    return of_rows(((event.user_id, event.event_id, event.item_id, event.type) for event in events), types)


def added(first: ItemCounts, second: ItemCounts) -> ItemCounts:
    return first | {item_id: first.get(item_id, 0) + count for item_id, count in second.items()}


@dataclass(frozen=True, slots=True)
class Archived:
    """What an archive had at some moment.

    counts  of all entries up to the manifest's positions
    """

    manifest: Manifest
    counts: ItemCounts

    @classmethod
    def question(
        cls, known: "Archived | None", archive_id: str, tenant: str, types: Collection[str]
    ) -> "Callable[[Snapshot], Archived]":
        """For `Archive.ask`; what is known is the answer while the archive stays as it is."""

        def answer(snapshot: Snapshot) -> Archived:
            snapshot.require(archive_id, 0, 0)
            if known is not None and known.manifest is snapshot.manifest:
                return known
            paths = snapshot.paths(tenant)
            return cls(snapshot.manifest, item_counts(pl.scan_parquet(paths), types) if paths else {})

        return answer
