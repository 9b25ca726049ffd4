"""The rows of a log that are events on items and still count."""

import polars as pl

from storage.state.event import IMPRESSION
from storage.state.record_encoding import EVENT, MERGE, UNDO


def events_on_items(log: pl.LazyFrame) -> pl.LazyFrame:
    """Return the events on items, without undone events and without those of merged users.

    The users that they were merged into have copies of these. An impression is not about a single item.
    """
    undone = log.filter(pl.col("kind") == UNDO).select("user_id", "event_id").collect()
    merged = log.filter(pl.col("kind") == MERGE).select("user_id").collect()
    events = log.filter((pl.col("kind") == EVENT) & (pl.col("type") != IMPRESSION))
    if len(undone):
        events = events.join(undone.lazy(), on=["user_id", "event_id"], how="anti")
    if len(merged):
        events = events.join(merged.lazy(), on="user_id", how="anti")
    return events
