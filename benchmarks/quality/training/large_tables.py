"""Generate large tables of events from a real one, as Parquet, and compare their statistics with the real ones.

Each generated user has the beginning of one real user's events, and the end of another's with a history of similar
length; the share of the first one is uniform. On average every real event is therefore used equally often. The
popularity of items, the lengths of histories, and the neighbours within a history are preserved. Gaps between events
are kept; timestamps follow from them. If no real user has an item twice, no generated user has.

    python -m benchmarks.quality.training.large_tables --data $LISAREC_DATA/ml-1m --events 10000000 --out runs/ml-10m
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import numpy as np
import polars as pl
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from model.data.interactions import repeat_share
from model.data.readers import read_interactions
from model.data.table import find_table

PIECE = 1_000_000  # number of events that are generated at a time
ALIKE = 0.01  # of all users in order of length; histories at most this far apart are combined
TOP_ITEMS = 0.01  # share of the items whose share of the events is compared
PAIRS = 10_000  # number of the most frequent consecutive pairs whose counts are compared

console = Console(width=140)
Ints = NDArray[np.int64]


class Histories(NamedTuple):
    """Events of U users, one user after another.

    item    (E,)
    time_s  (E,)
    starts  (U + 1,)
    """

    item: Ints
    time_s: NDArray[np.float64]
    starts: Ints

    @property
    def users(self) -> Ints:
        """The user of each event: (E,)."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def before(self, events: int) -> Histories:
        """Return the first events."""
        starts = self.starts[: np.searchsorted(self.starts, events) + 1].copy()
        starts[-1] = min(starts[-1], events)
        return Histories(self.item[: starts[-1]], self.time_s[: starts[-1]], starts)


class LargeTable:
    """Generates users from the histories of a real table."""

    def __init__(self, directory: Path, seed: int) -> None:
        table = read_interactions(directory)
        self.item_ids = table.item_ids
        self.real = Histories(table.item.astype(np.int64), table.timestamp_us / 1e6, table.starts)
        self._has_repeats = repeat_share(table) > 0
        self._gaps_s = np.diff(self.real.time_s, prepend=0.0)
        is_first = np.zeros(len(self._gaps_s), bool)
        is_first[table.starts[:-1]] = True
        self._gaps_s[is_first] = np.median(self._gaps_s[~is_first]) if not is_first.all() else 0.0
        self._by_length = np.argsort(np.diff(table.starts), kind="stable")
        self._rng = np.random.default_rng(seed)

    def users(self, count: int) -> Histories:
        """Generate this many users."""
        starts, lengths = self.real.starts[:-1], np.diff(self.real.starts)
        place = self._rng.integers(len(starts), size=count)
        apart = max(1, round(ALIKE * len(starts)))
        other = np.clip(place + self._rng.integers(-apart, apart + 1, count), 0, len(starts) - 1)
        first, second = self._by_length[place], self._by_length[other]
        share = self._rng.random(count)
        head, cut = (np.floor(share * lengths[which]).astype(np.int64) for which in (first, second))
        begins = np.stack([starts[first], starts[second] + cut], axis=1).ravel()
        stretches = np.stack([head, lengths[second] - cut], axis=1).ravel()
        behind = np.cumsum(stretches)
        rows = np.arange(behind[-1]) + np.repeat(begins - (behind - stretches), stretches)
        user = np.repeat(np.arange(count), stretches.reshape(-1, 2).sum(axis=1))
        if not self._has_repeats:
            pairs = user * len(self.item_ids) + self.real.item[rows]
            once = np.sort(np.unique(pairs, return_index=True)[1])
            rows, user = rows[once], user[once]
        own_starts = np.concatenate([[0], np.cumsum(np.bincount(user, minlength=count))])
        passed_s = np.cumsum(self._gaps_s[rows])
        begin = own_starts[:-1][user]
        time_s = passed_s - passed_s[begin] + self.real.time_s[starts[first]][user]
        return Histories(self.real.item[rows], time_s, own_starts)

    def pieces(self, events: int) -> Iterator[Histories]:
        """Generate users until they have this many events."""
        per_piece = max(1, round(PIECE * (len(self.real.starts) - 1) / len(self.real.item)))
        made = 0
        while made < events:
            piece = self.users(per_piece).before(events - made)
            made += len(piece.item)
            yield piece


@dataclass(frozen=True)
class Statistics:
    """The statistics that a large table should share with the real one."""

    mean_length: float
    median_length: float
    longest: int
    repeat_share: float
    share_of_top_items: float
    pairs: dict[int, int]

    @classmethod
    def of(cls, histories: Histories, items: int) -> Statistics:
        """Compute the statistics."""
        lengths, user, item = np.diff(histories.starts), histories.users, histories.item
        counts = np.sort(np.bincount(item, minlength=items))[::-1]
        adjacent = (item[:-1] * items + item[1:])[user[1:] == user[:-1]]
        pair, often = np.unique(adjacent, return_counts=True)
        chosen = np.argsort(-often, kind="stable")[:PAIRS]
        return cls(
            float(lengths.mean()),
            float(np.median(lengths)),
            int(lengths.max()),
            1 - len(np.unique(user * items + item)) / len(item),
            float(counts[: max(1, round(TOP_ITEMS * items))].sum() / len(item)),
            dict(zip(pair[chosen].tolist(), often[chosen].tolist(), strict=True)),
        )

    def likeness_of_pairs(self, other: Statistics) -> float:
        """Return the correlation between the log counts of these pairs in both tables."""
        mine = np.array([*self.pairs.values()], np.float64)
        theirs = np.array([other.pairs.get(pair, 0) for pair in self.pairs], np.float64)
        return float(np.corrcoef(np.log1p(mine), np.log1p(theirs))[0, 1])


def write(table: LargeTable, source: Path, events: int, out: Path) -> Histories:
    """Write a data directory with this many events and the items of the real one; return the first piece."""
    out.mkdir(parents=True)
    items = find_table(source, "items")
    if items is not None:
        shutil.copy(items, out / items.name)
    names = pl.Series("item_id", table.item_ids)
    first: Histories | None = None
    users = 0
    with TemporaryDirectory(dir=out) as scratch:
        parts = []
        for number, piece in enumerate(table.pieces(events)):
            first = first or piece
            columns = {"user": piece.users + users, "timestamp": piece.time_s}
            frame = pl.DataFrame(columns).select(
                pl.format("u{}", "user").alias("user_id"), names[piece.item].alias("item_id"), "timestamp"
            )
            parts.append(Path(scratch) / f"{number}.parquet")
            frame.write_parquet(parts[-1])
            users += len(piece.starts) - 1
        pl.scan_parquet(parts).sink_parquet(out / "interactions.parquet")
    assert first is not None
    return first


def comparison(real: Statistics, made: Statistics) -> Table:
    """Return both statistics as a table."""
    shown = Table("", "real", "made")
    for name, of_real, of_made in (
        ("events of a user, mean", f"{real.mean_length:.1f}", f"{made.mean_length:.1f}"),
        ("median", f"{real.median_length:.0f}", f"{made.median_length:.0f}"),
        ("most", f"{real.longest:,}", f"{made.longest:,}"),
        ("events on items the user had before", f"{real.repeat_share:.1%}", f"{made.repeat_share:.1%}"),
        ("events on the top 1 % of items", f"{real.share_of_top_items:.1%}", f"{made.share_of_top_items:.1%}"),
        ("correlation of frequent pairs", "", f"{real.likeness_of_pairs(made):.3f}"),
    ):
        shown.add_row(name, of_real, of_made)
    return shown


def main(
    data: Annotated[Path, typer.Option(help="Data directory of the real table.")],
    out: Annotated[Path, typer.Option(help="Data directory to write.")],
    events: Annotated[int, typer.Option(min=1)] = 1_000_000,
    seed: int = 0,
) -> None:
    """Write the table, and print its statistics and those of the real one."""
    table = LargeTable(data, seed)
    first = write(table, data, events, out)
    size = (out / "interactions.parquet").stat().st_size
    items = len(table.item_ids)
    console.print(comparison(Statistics.of(table.real, items), Statistics.of(first, items)))
    console.print(f"{out}: {events:,} events, {size / events:.1f} bytes each on disk")


if __name__ == "__main__":
    typer.run(main)
