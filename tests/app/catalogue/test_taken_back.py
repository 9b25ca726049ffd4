"""Removed properties: every catalogue drops their values, regardless of concurrent reads."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.overrides.item_overrides import ItemOverrides
from model.artifact.item_table import ItemTable
from storage.records import NO_PROPERTIES, ItemChanges, ItemEntry, PropertyValue, property_type

NAMES = ["a", "b", "new"]
STEPS = st.tuples(st.sampled_from(NAMES), st.sampled_from(["x", "y", 1.0, True, ("s",)])) | st.sampled_from(
    ["take back", "read", "apply", "poll", "catch up"]
)


class Store:
    """A minimal model of how the stores handle one property."""

    def __init__(self) -> None:
        self.held = NO_PROPERTIES
        self.values: dict[str, tuple[int, str, PropertyValue]] = {}
        self.version = 0

    def take_back(self) -> None:
        self.held = self.held.holding({"item": {"p": None}})

    def put(self, name: str, value: PropertyValue) -> None:
        if self.held.types["item"].get("p") != property_type(value):
            self.take_back()
        self.held = self.held.holding({"item": {"p": property_type(value)}})
        self.version += 1
        self.values[name] = self.version, self.held.key("item", "p"), value

    def item(self, name: str) -> dict[str, PropertyValue]:
        _, key, value = self.values.get(name, (0, "", ""))
        return dict(self.held.by_name("item", {key: value})) if key else {}

    def changes(self, after: int) -> ItemChanges:
        changed = sorted((version, name) for name, (version, _, _) in self.values.items() if version > after)
        entries = [ItemEntry(name, properties=self.item(name)) for _, name in changed]
        return ItemChanges(entries, max(after, self.version), held=self.held)


def shown(catalogue: LiveCatalogue) -> list[tuple[Any, Any]]:
    properties = (catalogue.properties_of(name) for name in NAMES)
    items = (catalogue.item(name) for name in NAMES)
    return [(one.get("p"), item and item["properties"].get("p")) for one, item in zip(properties, items, strict=True)]


@given(st.lists(STEPS, max_size=25))
@example([("a", "x"), "read", "take back", "poll", "apply"])
@example([("a", "x"), ("new", "x"), "read", ("b", 1.0), "poll", "apply", "catch up", "read"])
@settings(max_examples=100)
def test_a_catalogue_equals_the_store_after_any_removals(steps: list[Any]) -> None:
    """A page may be applied after polls that already know of a removal."""
    items = ItemTable(NAMES[:2], ["", ""], [(), ()], np.ones(2, np.int64))
    store, overrides, page = Store(), ItemOverrides(), None
    catalogue = LiveCatalogue(items, overrides)
    for step in [*steps, "apply", "read", "apply", "poll"]:
        match step:
            case "take back":
                store.take_back()
            case "read" if page is None:
                page = store.changes(overrides.version)
            case "apply" if page is not None:
                overrides.apply(page)
                page = None
            case "poll":
                overrides.hold(store.held)
            case "catch up":
                catalogue.catch_up()
            case name, value:
                store.put(name, value)
    catalogue.catch_up()
    of_store = [store.item(name).get("p") for name in NAMES]
    as_json = [list(value) if isinstance(value, tuple) else value for value in of_store]
    assert shown(catalogue) == [*zip(of_store, as_json, strict=True)]
    assert shown(LiveCatalogue(items, overrides)) == shown(catalogue)  # of another generation
