"""Measure the cost of item updates for a process that serves a large catalogue, in memory and time.

The first part sets values of every item, in pages, as a process reads them. It measures the bytes of each property, the
number of Python objects, and the processor time for all items, for a change of one item, and for another model's
catalogue. It runs twice: all items are in the model, then none.

In the second part, one of two connections to an embedded store changes items. A catalogue reads the changes from the
other one and applies them, as services do four times a second. It measures how long that takes for 1 and for 1,000
changed items, and the longest pause of the event loop. All items already have overrides.

    python -m benchmarks.service.catalogue_updates --items 100000 --items 1000000

The command fails if a number takes more than 9 bytes an item, a text with a thousand different values more than 4, an
item more than 0.1 Python objects, or a change of one item more than 1 ms of processor time.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import tracemalloc
from collections.abc import Mapping, Sequence
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
from storage.records import MAIN_TENANT, HeldProperties, ItemChanges, ItemEntry, PropertyType, PropertyValue
from storage.sqlite.store import SQLiteStore

CATEGORIES = 200
ROUNDS = 50
BEAT_S = 0.0005


MAX_NUMBER_BYTES, MAX_TEXT_BYTES, MAX_OBJECTS, MAX_CHANGE_S = 9.0, 4.0, 0.1, 1e-3
TYPES: Mapping[str, PropertyType] = {"price": "number", "brand": "text", "sold_out": "boolean", "labels": "set"}
HELD = HeldProperties({"item": TYPES, "user": {}})


class Described:
    """A served catalogue, whose items get their values in pages.

    model  the items that the model knows
    """

    def __init__(self, items: int, model: ItemTable) -> None:
        self.items = items
        self.overrides = ItemOverrides()
        self.catalogue = LiveCatalogue(model, self.overrides)
        self.overrides.keep_in(self.catalogue.values)

    def put(self, rows: Sequence[int], parts: int, turn: int = 0) -> float:
        """Apply entries with the first `parts` values; return the processor time in seconds."""
        entries = [described(row, parts, turn) for row in rows]
        begin_s = time.process_time()
        self.overrides.apply(ItemChanges(entries, self.overrides.version + len(entries), held=HELD))
        self.catalogue.catch_up()
        return time.process_time() - begin_s

    def put_all(self, parts: int) -> float:
        """Apply entries for all items, and return the processor time in seconds."""
        pages = range(0, self.items, ITEM_CHANGES_PER_READ)
        return sum(self.put(range(begin, min(begin + ITEM_CHANGES_PER_READ, self.items)), parts) for begin in pages)


def model_of(rows: Sequence[int]) -> ItemTable:
    """Return the item table of a model that knows these items."""
    return ItemTable([f"item-{row}" for row in rows], [""] * len(rows), [()] * len(rows), np.zeros(len(rows), np.int64))


def described(row: int, parts: int, turn: int) -> ItemEntry:
    """Return an entry with the first `parts` of: number, text, boolean, set, category, title."""
    values: dict[str, PropertyValue | None] = {
        "price": row % 9973 / 7 + turn,
        "brand": f"brand-{row % 1000}",
        "sold_out": row % 20 == 0,
        "labels": (f"label-{row % 100}", f"label-{(row + 7) % 100}"),
    }
    categories = (f"c{(row + turn) % CATEGORIES}",) if parts > len(TYPES) else None
    title = f"Thing {row}, {turn}" if parts > len(TYPES) + 1 else None
    return ItemEntry(f"item-{row}", title, categories, None, dict([*values.items()][:parts]))


def measure_values(items: int, learned: int) -> tuple[dict[str, float], list[str]]:
    """Return measurements for values of all items, of which the model knows `learned`, and the exceeded bounds."""
    once = Described(
        ITEM_CHANGES_PER_READ, model_of(range(ITEM_CHANGES_PER_READ))
    )  # a warm-up, for code and objects that are created once
    once.put_all(len(TYPES) + 2)
    once.catalogue.search("thing", 1)
    model = model_of(range(learned))
    LiveCatalogue(model, once.overrides)  # builds the model's own indices
    found: dict[str, float] = {}
    names = ("what any takes", *TYPES, "category", "title")
    tracemalloc.start()
    shop, before = Described(items, model), 0
    for parts, name in enumerate(names):
        shop.put_all(parts)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        found[f"{name}, bytes"], before = (after - before) / items, after
    tracemalloc.stop()
    shop = Described(items, model)
    shop.put([0], len(names))
    gc.collect()
    blocks = sys.getallocatedblocks()
    found["all items, s"] = shop.put_all(len(names))
    gc.collect()
    found["Python objects"] = (sys.getallocatedblocks() - blocks) / items
    rows = np.random.default_rng(0).integers(0, items, ROUNDS).tolist()
    found["a change of one, ms"] = 1e3 * float(
        np.median([shop.put([row], len(names), turn) for turn, row in enumerate(rows, 1)])
    )
    other = model_of(np.random.default_rng(1).permutation(items)[: learned or items].tolist())
    begin_s = time.process_time()
    LiveCatalogue(other, shop.overrides)
    found["another model, s"] = time.process_time() - begin_s
    for name in ("the first search, ms", "a search after a change, ms"):
        begin_s = time.process_time()
        shop.catalogue.search(f"thing {items // 2},", 20)
        found[name] = 1e3 * (time.process_time() - begin_s)
        shop.put([7], len(names), ROUNDS + 1)
    bounds = {
        "price, bytes": MAX_NUMBER_BYTES,
        "brand, bytes": MAX_TEXT_BYTES,
        "Python objects": MAX_OBJECTS,
        "a change of one, ms": MAX_CHANGE_S * 1e3,
    }
    return found, [
        f"{name}: {found[name]:.3g}, at most {most:g}" for name, most in bounds.items() if found[name] > most
    ]


class LoopPauses:
    """Measures pauses of the event loop."""

    async def watch(self) -> None:
        """Record the longest pause of the event loop, until cancelled."""
        self.longest_s = 0.0
        while True:
            begin_s = time.perf_counter()
            await asyncio.sleep(BEAT_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - begin_s - BEAT_S)


async def follow(store: SQLiteStore, overrides: ItemOverrides, catalogue: LiveCatalogue) -> None:
    """Apply item changes as app/serving/switcher.py does."""
    if (await store.pointers()).items_version == overrides.version:
        return
    while (changes := await store.item_changes(MAIN_TENANT, overrides.version, ITEM_CHANGES_PER_READ)).entries:

        def apply(read: ItemChanges = changes) -> None:
            overrides.apply(read)
            catalogue.catch_up()

        await asyncio.to_thread(apply)


def entry(row: int, turn: int) -> ItemEntry:
    """Return a change of the item in this row."""
    return ItemEntry(f"item-{row}", f"Thing {row}, {turn}", (f"c{(row + turn) % CATEGORIES}",), turn % 2 == 0)


async def measure(items: int, directory: Path) -> Table:
    """Return a table of the time that it takes to apply changes."""
    ids = [f"item-{row}" for row in range(items)]
    categories: list[tuple[str, ...]] = [(f"c{row % CATEGORIES}",) for row in range(items)]
    model = ItemTable(ids, [f"Thing {row}" for row in range(items)], categories, np.zeros(items, np.int64))
    one, other = await SQLiteStore.open(directory, ()), await SQLiteStore.open(directory, ())
    overrides = ItemOverrides()
    catalogue = LiveCatalogue(model, overrides)
    overrides.keep_in(catalogue.values)
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


def main(
    items: Annotated[list[int] | None, typer.Option(min=1000, help="Of the catalogue; several times.")] = None,
) -> None:
    """Print the cost of item changes; fail if a bound is exceeded."""
    console, faults = Console(), list[str]()
    for size in items or [100_000]:
        columns = {"learned": measure_values(size, size), "not learned": measure_values(size, 0)}
        table = Table(f"one of {size:,} items", *columns)
        for name in columns["learned"][0]:
            table.add_row(name, *(f"{found[name]:.3g}" for found, _ in columns.values()))
        console.print(table)
        faults += [f"{size:,} items, {name}: {fault}" for name, (_, own) in columns.items() for fault in own]
        with TemporaryDirectory() as directory:
            console.print(asyncio.run(measure(size, Path(directory))))
    for fault in faults:
        console.print(fault, style="red")
    raise typer.Exit(int(bool(faults)))


if __name__ == "__main__":
    typer.run(main)
