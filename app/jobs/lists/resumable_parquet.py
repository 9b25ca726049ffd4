"""A Parquet file of lists, written in parts so that an interrupted command can continue."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import polars as pl

from app.schemas.recommendations import Recommendations
from storage.archive.hashes import Hashes, contains, hashes_of_users, merge_hashes
from storage.folders.folder import OWNER_ONLY
from storage.folders.local_folder import LocalFolder, sync

PART_USERS = 8192
PLAN, WHOLE, SUFFIX = "plan", "whole.parquet", ".parts"
SCHEMA = {
    "user_id": pl.String(),
    "item_ids": pl.List(pl.String()),
    "scores": pl.List(pl.Float64()),
    "titles": pl.List(pl.String()),
    "source": pl.String(),
    "generation": pl.String(),
    "scenario": pl.String(),
    "experiment": pl.String(),
    "short": pl.Boolean(),
    "recommendation_id": pl.String(),
}


@dataclass(frozen=True, slots=True)
class ListCounts:
    """The number of users with a list.

    short    those with fewer items than requested, including empty lists
    damaged  users without a list, because their data are damaged
    """

    users: int = 0
    short: int = 0
    damaged: int = 0


class ListParts:
    """The parts, in a directory next to the output file."""

    def __init__(self, out: Path, plan: str) -> None:
        """Continue with the existing parts.

        plan  identifies these lists

        raises  ValueError  when the file already exists, or the parts belong to other lists
        """
        if out.exists():
            raise ValueError(f"'{out}' exists already; choose another name with --out")
        self._out = out
        self._directory = out.with_name(out.name + SUFFIX)
        self._directory.mkdir(OWNER_ONLY, parents=True, exist_ok=True)
        self._folder = LocalFolder(self._directory)
        self._parts = 0
        self._on_disk = ListCounts()
        self._done: Hashes = hashes_of_users([])
        self._made: dict[str, Recommendations] = {}
        self._require_same(" ".join([plan, *SCHEMA]).encode())
        while (path := self._path(self._parts)).exists():
            self._count(pl.read_parquet(path))

    @property
    def users(self) -> int:
        """The number of users with a list."""
        return self._on_disk.users + len(self._made)

    def lacks(self, user_ids: Sequence[str]) -> list[str]:
        """Return the users who have no list yet."""
        is_done = contains(self._done, hashes_of_users(user_ids))
        return [one for one, done in zip(user_ids, is_done, strict=True) if not done and one not in self._made]

    def add(self, lists: Mapping[str, Recommendations]) -> None:
        """Add lists by user, and write them to disk as soon as there are enough for a part."""
        self._made.update(lists)
        if len(self._made) >= PART_USERS:
            self._write()

    def finish(self) -> ListCounts:
        """Merge all parts into one file, which appears when it is complete, and remove the parts."""
        if self._made:
            self._write()
        unfinished = self._directory / WHOLE
        tables = [pl.scan_parquet(self._path(part), schema=SCHEMA) for part in range(self._parts)]
        pl.concat([pl.LazyFrame(schema=SCHEMA), *tables]).sink_parquet(unfinished)
        unfinished.chmod(0o600)  # like a backup; it has data of users
        sync(unfinished)
        unfinished.replace(self._out)
        sync(self._out.parent)
        shutil.rmtree(self._directory)
        return self._on_disk

    def _write(self) -> None:
        table, data = _table([*self._made.values()]), BytesIO()
        table.write_parquet(data)
        self._folder.add(self._path(self._parts).name, data.getbuffer())
        self._count(table)
        self._made.clear()

    def _require_same(self, plan: bytes) -> None:
        if not self._folder.has(PLAN):
            self._folder.add(PLAN, plan)
        elif (self._directory / PLAN).read_bytes() != plan:
            raise ValueError(f"'{self._directory}' has parts of another export; delete it, or choose another --out")

    def _path(self, part: int) -> Path:
        return self._directory / f"{part:06}.parquet"

    def _count(self, table: pl.DataFrame) -> None:
        self._parts += 1
        short = int(table["short"].sum())
        self._on_disk = ListCounts(self._on_disk.users + len(table), self._on_disk.short + short)
        self._done = merge_hashes([self._done, hashes_of_users(table["user_id"].to_list())])


def _table(lists: Sequence[Recommendations]) -> pl.DataFrame:
    items = [[*one["items"]] for one in lists]
    columns = {
        "item_ids": [[item["item_id"] for item in some] for some in items],
        "scores": [[item["score"] for item in some] for some in items],
        "titles": [[item.get("title") for item in some] for some in items],
        "short": ["short" in one for one in lists],
    }
    fields = {name: [one.get(name) for one in lists] for name in SCHEMA if name not in columns}
    return pl.DataFrame(fields | columns, schema=SCHEMA)
