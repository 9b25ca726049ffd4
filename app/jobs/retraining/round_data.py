"""The data of a round of retraining, of which only a piece is in memory at a time.

events/NUMBER.parquet                the archive's newest events that have a weight, in pieces of whole users, in order
                                     of user and time, with the marks of `mark_for_comparison`
NAME/data/interactions.parquet       what a model trains on: in `past` the events before the held-out ones, in `all`
                                     all of them, in the same order
NAME/data/items.*                    titles, categories and vectors
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import polars as pl

from app.jobs.retraining.shop_items import ItemsById, put_over_file
from model.artifact.tensor_file import sync
from model.data.table import SUFFIXES, find_table, sink_parquet, write_parquet
from model.evaluation.holdout_comparison import HoldoutComparison, mark_for_comparison, split_for_comparison
from storage.archive.training_events import TrainingEvents
from storage.folders.folder import OWNER_ONLY, Folder

COLUMNS = ("user_id", "item_id", "type", "value", "order_id")


class RoundData:
    """The files of a round's data, in the folder of the round."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pieces = folder / "events"

    def exist(self) -> bool:
        """Return whether events have been read; those of versions up to 2026-11 were in one file."""
        return self._pieces.is_dir()

    def directory(self, name: str) -> Path:
        """Return the data directory of a training, `past` or `all`."""
        return self._folder / name / "data"

    def read(self, archived: TrainingEvents, max_events: int, event_weights: Mapping[str, float]) -> int:
        """Copy the newest events that have a weight; return the number of events of unknown types."""
        self._folder.mkdir(OWNER_ONLY, parents=True, exist_ok=True)
        self._pieces.mkdir()
        trained_types = [kind for kind, weight in event_weights.items() if weight > 0]
        unknown = 0
        for number, piece in enumerate(archived.newest(max_events)):
            unknown += len(piece.filter(~pl.col("type").is_in([*event_weights])))
            events = mark_for_comparison(piece.filter(pl.col("type").is_in(trained_types)))
            write_parquet(events, self._pieces / f"{number:06}.parquet")
        return unknown

    def count(self) -> int:
        """Return the number of events."""
        return int(self._events().select(pl.len()).collect(engine="streaming").item())

    def item_ids(self) -> Collection[str]:
        """Return the ids of all items in the events."""
        ids: list[str] = (
            self._events().select(pl.col("item_id").unique()).collect(engine="streaming").to_series().to_list()
        )
        return ids

    def split(self, unseen_after_ms: int) -> tuple[pl.LazyFrame, HoldoutComparison]:
        """Return the past, and held-out events that were logged after that time."""
        return split_for_comparison(self._events(), unseen_after_ms)

    def write_directories(
        self, past: pl.LazyFrame, archive: Folder, item_folders: Sequence[str], of_store: ItemsById
    ) -> None:
        """Write the data directories. The store's item data override the archive's table of items.

        item_folders  folders in the archive, the first of which with a table of items has the tenant's

        When this returns, the round's data survive a power cut.
        """
        for name, events in (("past", past), ("all", self._events())):
            directory = self.directory(name)
            directory.mkdir(parents=True)
            # polars divides a lone row, and multiplies several by the inverse, which may be rounded otherwise
            table = events.select(*COLUMNS, timestamp=pl.col("timestamp_us") * 1e-6)
            sink_parquet(table, directory / "interactions.parquet")
            _copy_items(archive, item_folders, directory)
            put_over_file(directory, of_store)
        for path in (self._folder, *self._folder.rglob("*")):
            sync(path)

    def _events(self) -> pl.LazyFrame:
        return pl.scan_parquet(sorted(self._pieces.iterdir()))


def _copy_items(archive: Folder, folders: Sequence[str], directory: Path) -> None:
    for folder in folders:
        for suffix in SUFFIXES:
            with suppress(FileNotFoundError):
                shutil.copy(archive.path(f"{folder}items{suffix}"), directory / f"items{suffix}")
        if find_table(directory, "items") is not None:
            return
