"""Item overrides: the same values in every catalogue, whichever of them stores the columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from app.catalogue.filter_expressions import Expression
from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.overrides.item_overrides import ItemOverrides
from model.artifact.item_table import ItemTable
from model.inference import bitmap
from storage.records import EPOCH, HeldProperties, ItemChanges, ItemEntry

IDS = [f"item-{n}" for n in range(12)]
MODELS = (IDS[:8], IDS[7:1:-1], IDS[4:])  # others are new to each
OF_MODEL = ("pots", "cups", "lids")
HELD = HeldProperties({"item": {"price": "number", "brand": "text", "tags": "set", "made": "time"}, "user": {}})
TAGS = st.sets(st.sampled_from(["pots", "new", "x", "y"])).map(lambda found: tuple(sorted(found)))
PROPERTIES = st.fixed_dictionaries(
    {},
    optional={
        "price": st.floats(-5, 5),
        "brand": st.sampled_from(["Hill", "Dale", ""]),
        "tags": TAGS,
        "made": st.integers(0, 9).map(lambda days: EPOCH + timedelta(days)),
        "available_until": st.sampled_from([EPOCH, EPOCH + timedelta(365 * 200)]),
    },
)
ENTRIES = st.builds(
    ItemEntry,
    st.sampled_from(IDS),
    st.none() | st.sampled_from(["", "Kettle", "red kettle"]),
    st.none() | TAGS,
    st.booleans(),
    PROPERTIES,
)
DAYS = st.none() | st.integers(0, 5)
CLOCKS = st.tuples(st.integers(-1, 5), st.dictionaries(st.sampled_from(MODELS[0][:4]), st.tuples(DAYS, DAYS)))
STEPS = (
    st.lists(ENTRIES, min_size=1, max_size=4)
    | st.tuples(st.sampled_from(["catch up", "keep"]), st.integers(0, 2))
    | st.tuples(st.just("make anew"), st.integers(0, 2))
)


def catalogue(number: int, overrides: ItemOverrides) -> LiveCatalogue:
    ids = MODELS[number]
    categories = [(OF_MODEL[int(name[5:]) % 3],) for name in ids]
    titles = [f"Thing {name}" for name in ids]
    return LiveCatalogue(ItemTable(ids, titles, categories, np.ones(len(ids), np.int64)), overrides)


def assert_shows(found: LiveCatalogue, ids: list[str], newest: Mapping[str, ItemEntry]) -> None:
    for name in IDS:
        entry = newest.get(name)
        assert found.values.entry(name) == entry
        item = found.item(name)
        if entry is None and name not in ids:
            assert item is None
            continue
        assert item is not None
        set_title, set_categories = (entry.title, entry.categories) if entry else (None, None)
        assert item["title"] == ((f"Thing {name}" if name in ids else "") if set_title is None else set_title)
        of_model = [OF_MODEL[int(name[5:]) % 3]] if name in ids else []
        assert item["categories"] == (of_model if set_categories is None else [*set_categories])
    for label in ("pots", "cups", "new", "never"):
        expected = [label in (found.item(name)["categories"] if found.item(name) else ()) for name in ids]  # type: ignore[index]
        assert mask(found, found.in_categories([label])) == expected
        assert mask(found, selected(found, f'"{label}" in item.categories')) == expected
    of_items = [set(item["categories"]) if (item := found.item(name)) else set[str]() for name in ids]
    for labels in (["pots", "never"], ["new", "cups"], ["x", "y"], ["pots", "lids", "new"]):
        assert mask(found, found.in_categories(labels)) == [not one.isdisjoint(labels) for one in of_items]
        assert mask(found, found.in_all_categories(labels)) == [one >= {*labels} for one in of_items]
    values: Mapping[str, Mapping[str, Any]] = {name: newest[name].properties if name in newest else {} for name in ids}
    cheap = [values[name].get("price", 9.0) < 1.0 for name in ids]
    assert mask(found, selected(found, "item.price < 1.0")) == cheap
    assert mask(found, selected(found, 'item.brand == "Hill"')) == [values[name].get("brand") == "Hill" for name in ids]
    assert mask(found, selected(found, '"x" in item.tags')) == ["x" in values[name].get("tags", ()) for name in ids]
    titled = [found.item(name)["title"] == "Kettle" for name in ids]  # type: ignore[index]
    assert mask(found, selected(found, 'item.title == "Kettle"')) == titled
    is_off = [name in newest and not newest[name].available for name in ids]
    is_over = [values[name].get("available_until") == EPOCH for name in ids]
    assert mask(found, found.unavailable) == [off or over for off, over in zip(is_off, is_over, strict=True)]
    for word in ("kettle", "red", "thing", "item-1"):
        expected_ids = {
            name for name in IDS if (item := found.item(name)) and (word in item["title"].lower() or word in name)
        }
        assert {item["item_id"] for item in found.search(word, 50)} == expected_ids


def selected(found: LiveCatalogue, text: str) -> Any:
    return found.expressions.evaluate(Expression(text, "boolean", {}, ()))


def mask(found: LiveCatalogue, items: Any) -> list[bool]:
    mask: list[bool] = bitmap.to_mask(items, len(found)).tolist()
    return mask


@given(st.lists(STEPS, max_size=12))
@settings(max_examples=60)
def test_every_catalogue_shows_the_newest_overrides(steps: list[Any]) -> None:
    overrides, newest, changed_at = ItemOverrides(), dict[str, ItemEntry](), dict[str, int]()
    catalogues = [catalogue(number, overrides) for number in range(3)]
    overrides.hold(HELD)
    for step in steps:
        match step:
            case "catch up", number:
                catalogues[number].catch_up()
            case "keep", number:
                overrides.keep_in(catalogues[number].values)
            case "make anew", number:
                catalogues[number] = catalogue(number, overrides)
            case entries:
                newest |= {entry.item_id: entry for entry in entries}
                overrides.apply(ItemChanges(entries, overrides.version + len(entries), held=HELD))
                changed_at |= {entry.item_id: overrides.change_count for entry in entries}
    for count in range(overrides.change_count + 1):
        changed = [item_id for page in overrides.changed_since(count) for item_id in page]
        assert sorted(changed) == sorted(name for name, at in changed_at.items() if at > count)
    for number, found in enumerate(catalogues):
        found.catch_up()
        assert_shows(found, MODELS[number], newest)
    assert {name: overrides.entry(name) for name in IDS if name in overrides} == newest


def test_a_cached_filter_stays_valid_while_its_columns_do_not_change() -> None:
    overrides = ItemOverrides()
    found = catalogue(0, overrides)
    overrides.keep_in(found.values)
    entry = ItemEntry(IDS[0], "Kettle", ("pots",), True, {"price": 1.0, "brand": "Hill"})
    overrides.apply(ItemChanges([entry], 1, held=HELD))
    found.catch_up()
    before = selected(found, 'item.brand == "Hill" && item.available && "pots" in item.categories')
    overrides.apply(ItemChanges([replace(entry, properties={"price": 2.0, "brand": "Hill"})], 2, held=HELD))
    found.catch_up()
    assert selected(found, 'item.brand == "Hill" && item.available && "pots" in item.categories') is before


@given(st.lists(CLOCKS, max_size=8))
def test_availability_follows_a_clock_that_is_set_ahead_and_back(steps: list[Any]) -> None:
    """Each step sets the clock to the middle of a day, and dates of some items in days."""
    overrides, dates = ItemOverrides(), dict[str, tuple[int | None, int | None]]()
    overrides.hold(HELD)
    found = catalogue(0, overrides)
    for day, changed in steps:
        with patch("app.catalogue.overrides.availability.time.time", lambda day=day: (day + 0.5) * 86_400):
            dates |= changed
            overrides.apply(
                ItemChanges([*map(dated, changed, changed.values())], overrides.version + len(changed), held=HELD)
            )
            found.catch_up()
            found.follow_time()
        is_outside = [
            (begin is not None and day < begin) or (end is not None and day >= end)
            for begin, end in (dates.get(name, (None, None)) for name in MODELS[0])
        ]
        assert mask(found, found.unavailable) == is_outside


def dated(item_id: str, days: tuple[int | None, int | None]) -> ItemEntry:
    names = ("available_from", "available_until")
    dates = {name: EPOCH + timedelta(day) for name, day in zip(names, days, strict=True) if day is not None}
    return ItemEntry(item_id, None, None, True, dates)
