"""Measure what a shop's word on items costs a process that serves a large catalogue, in memory and time.

First what is set of every item, in pages, as a process reads it: the bytes that each property takes, Python objects,
the processor time for all items, for a change of one, and for a catalogue of another model. Once all items are learned,
once none is.

Then one process of two on an embedded store says something of items, the other one reads and goes by it, as it does
four times a second: how long that takes with 1 and with 1,000 items changed, and the longest moment in which its event
loop could do nothing else. Everything was said of every item before.

    python -m benchmarks.service.catalogue_updates --items 100000 --items 1000000

The command fails where a number takes more than 9 bytes an item, a text of a thousand different ones more than 4, an
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
    """A catalogue that serves, of which every item is described in pages.

    model  what it has learned of the items
    """

    def __init__(self, items: int, model: ItemTable) -> None:
        self.items = items
        self.overrides = ItemOverrides()
        self.catalogue = LiveCatalogue(model, self.overrides)
        self.overrides.keep_in(self.catalogue.values)

    def put(self, rows: Sequence[int], parts: int, turn: int = 0) -> float:
        """Apply entries with the first so many parts; return the processor time it takes, in seconds."""
        entries = [described(row, parts, turn) for row in rows]
        begin_s = time.process_time()
        self.overrides.apply(ItemChanges(entries, self.overrides.version + len(entries), held=HELD))
        self.catalogue.catch_up()
        return time.process_time() - begin_s

    def put_all(self, parts: int) -> float:
        """Apply entries of all items, and return the seconds."""
        pages = range(0, self.items, ITEM_CHANGES_PER_READ)
        return sum(self.put(range(begin, min(begin + ITEM_CHANGES_PER_READ, self.items)), parts) for begin in pages)


def model_of(rows: Sequence[int]) -> ItemTable:
    """Return what a model has that has learned these items."""
    return ItemTable([f"item-{row}" for row in rows], [""] * len(rows), [()] * len(rows), np.zeros(len(rows), np.int64))


def described(row: int, parts: int, turn: int) -> ItemEntry:
    """Return an entry with the first so many of a number, a text, a boolean, a set, a category and a title."""
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
    """Return what was measured where all items are described and so many are learned, and which bounds do not hold."""
    once = Described(
        ITEM_CHANGES_PER_READ, model_of(range(ITEM_CHANGES_PER_READ))
    )  # for what is compiled and made once
    once.put_all(len(TYPES) + 2)
    once.catalogue.search("thing", 1)
    model = model_of(range(learned))
    LiveCatalogue(model, once.overrides)  # makes the model's own indices
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

        def apply(read: ItemChanges = changes) -> None:
            overrides.apply(read)
            catalogue.catch_up()

        await asyncio.to_thread(apply)


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
    """Print what changes of items cost, and fail where a bound does not hold."""
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
