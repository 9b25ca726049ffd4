"""Memory of a large catalogue: bytes, and no Python object per item."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace

import numpy as np
import pytest

from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.overrides.item_overrides import ItemOverrides
from model.artifact.item_table import ItemTable
from storage.records import EPOCH, HeldProperties, ItemChanges, ItemEntry, PropertyValue

ITEMS, PAGE = 4_000, 500
MAX_OBJECTS = 0.1  # an item: what is kept for a page or a column is shared by thousands
HELD = HeldProperties({"item": {"price": "number", "brand": "text", "tags": "set", "made": "time"}, "user": {}})


def entry(row: int, turn: int) -> ItemEntry:
    properties: dict[str, PropertyValue | None] = {"price": row + 0.5, "brand": f"brand-{row % 50}"}
    properties |= {"tags": ("a", f"t{row % 9}"), "made": EPOCH}
    return ItemEntry(f"item-{row}", f"Thing {row}, {turn}", (f"c{row % 20}",), row % 2 == 0, properties)


def put(overrides: ItemOverrides, catalogue: LiveCatalogue, turn: int) -> None:
    for begin in range(0, ITEMS, PAGE):
        entries = [entry(row, turn) for row in range(begin, begin + PAGE)]
        overrides.apply(ItemChanges(entries, overrides.version + PAGE, held=HELD))
        catalogue.catch_up()


@pytest.mark.parametrize("learned", [ITEMS, 0])
def test_described_items_create_no_python_objects(learned: int) -> None:
    names = [f"item-{row}" for row in range(learned)]
    items = ItemTable(names, [""] * learned, [()] * learned, np.ones(learned, np.int64))
    overrides = ItemOverrides()
    catalogue = LiveCatalogue(items, overrides)
    overrides.apply(ItemChanges([replace(entry(0, 0), item_id="first")], 1, held=HELD))  # what is made once
    catalogue.catch_up()
    gc.collect()
    before = sys.getallocatedblocks()
    put(overrides, catalogue, turn=0)
    gc.collect()
    assert (sys.getallocatedblocks() - before) / ITEMS < MAX_OBJECTS
    for turn in range(1, 4):  # several times as many bytes as are kept
        put(overrides, catalogue, turn)
    for row in (0, 1, ITEMS - 1):
        assert overrides.entry(f"item-{row}") == entry(row, turn)
        found = catalogue.item(f"item-{row}")
        assert found is not None
        assert (found["title"], found["categories"]) == (f"Thing {row}, {turn}", [f"c{row % 20}"])
        assert (found["available"], found["known"]) == (row % 2 == 0, learned > 0)
