"""Measure what a change of items costs a process that serves a large catalogue.

One process of two on an embedded store says something of items, the other one reads and goes by it, as it does four
times a second: how long that takes with 1 and with 1,000 items changed, and the longest moment in which its event loop
could do nothing else. Everything was said of every item before.

    python -m benchmarks.service.catalogue_updates --items 100000
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.overrides.item_overrides import ItemOverrides
from app.serving.switcher import ITEM_CHANGES_PER_READ
from benchmarks.machine import cpu
from model.artifact.item_table import ItemTable
from storage.records import MAIN_TENANT, ItemEntry
from storage.sqlite.store import SQLiteStore

CATEGORIES = 200
ROUNDS = 50
BEAT_S = 0.0005


class LoopPauses:
    """Watches how long the event loop does not come round."""

    async def watch(self) -> None:
        """Note how long the event loop does not come round, until cancelled."""
        self.longest_s = 0.0
        while True:
            begin_s = time.perf_counter()
            await asyncio.sleep(BEAT_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - begin_s - BEAT_S)


async def follow(store: SQLiteStore, overrides: ItemOverrides, catalogue: LiveCatalogue) -> None:
    """Apply the changes of items as app/serving/switcher.py does."""
    if (await store.pointers()).items_version == overrides.version:
        return
    while (changes := await store.item_changes(MAIN_TENANT, overrides.version, ITEM_CHANGES_PER_READ)).entries:
        overrides.apply(changes)
        await asyncio.to_thread(catalogue.catch_up)


def entry(row: int, turn: int) -> ItemEntry:
    """Return a change of the item in this row."""
    return ItemEntry(f"item-{row}", f"Thing {row}, {turn}", (f"c{(row + turn) % CATEGORIES}",), turn % 2 == 0)


async def measure(items: int, directory: Path) -> Table:
    """Return a table of how long changes take to be applied."""
    ids = [f"item-{row}" for row in range(items)]
    categories: list[tuple[str, ...]] = [(f"c{row % CATEGORIES}",) for row in range(items)]
    model = ItemTable(ids, [f"Thing {row}" for row in range(items)], categories, np.zeros(items, np.int64))
    one, other = await SQLiteStore.open(directory, ()), await SQLiteStore.open(directory, ())
    overrides = ItemOverrides()
    catalogue = LiveCatalogue(model, overrides)
    for begin in range(0, items, ITEM_CHANGES_PER_READ):
        rows = range(begin, min(begin + ITEM_CHANGES_PER_READ, items))
        await one.put_items(MAIN_TENANT, [entry(row, 0) for row in rows])
    begin_s = time.perf_counter()
    await follow(other, overrides, catalogue)
    table = Table(
        title=f"{cpu()}, {items:,} items; to read all of them at the start: {time.perf_counter() - begin_s:.2f} s"
    )
    for name in ("items changed", "said to gone by, median", "worst", "longest pause of the loop"):
        table.add_column(name, justify="right")
    rng = np.random.default_rng(0)
    pauses = LoopPauses()
    watching = asyncio.create_task(pauses.watch())
    await asyncio.sleep(0)
    for changed in (1, 1000):
        took_s, paused_s = [], []
        for turn in range(1, ROUNDS + 1):
            await one.put_items(MAIN_TENANT, [entry(int(row), turn) for row in rng.choice(items, changed, False)])
            await asyncio.sleep(2 * BEAT_S)
            pauses.longest_s = 0
            begin_s = time.perf_counter()
            await follow(other, overrides, catalogue)
            took_s.append(time.perf_counter() - begin_s)
            await asyncio.sleep(2 * BEAT_S)
            paused_s.append(pauses.longest_s)
        cells = [float(np.median(took_s)), max(took_s), max(paused_s)]
        table.add_row(f"{changed:,}", *(f"{seconds * 1000:.1f} ms" for seconds in cells))
    watching.cancel()
    await one.close()
    await other.close()
    return table


def main(items: Annotated[int, typer.Option(min=1000, help="Of the catalogue.")] = 100_000) -> None:
    """Measure."""
    with TemporaryDirectory() as directory:
        Console().print(asyncio.run(measure(items, Path(directory))))


if __name__ == "__main__":
    typer.run(main)
