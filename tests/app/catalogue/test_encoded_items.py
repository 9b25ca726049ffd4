"""Lists built from cached JSON of items equal lists encoded from objects, byte for byte."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from threading import Thread
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.catalogue import trained_catalogue
from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.overrides.item_overrides import ItemOverrides
from app.catalogue.trained_catalogue import EncodedItems, encode, encoded_pieces
from model.artifact.item_table import ItemTable
from storage.records import ItemChanges, ItemEntry
from tests.app.conftest import CATEGORIES, ITEMS, Client, item_id

IDS = ["plain", "a b", 'quoted "id"', "back\\slash", "\u00e9clair", "\U0001f375", "line\nbreak", "\x7f", "sep\u2028"]
TITLES = ["", 'A "title"', "\u00e9clair", "tab\t", "\U0001f375 tea", "", "</script>", "\x00", "plain"]
COLD = ["new", "newer"]
REQUESTS = 250
RECOMMENDATION_ID = re.compile(rb'"recommendation_id":"[\w-]+"')

rows = st.integers(0, len(IDS) + len(COLD) - 1)
scores = st.floats(width=32) | st.integers(0, 10**6).map(float) | st.floats()
listed = st.lists(st.tuples(rows, scores), max_size=6)
titles = st.none() | st.sampled_from(["", "put", 'put "again"', "\u00e9"])
puts = st.lists(st.builds(ItemEntry, st.sampled_from([*IDS, *COLD, "unknown"]), titles), min_size=1, max_size=3)


def new_catalogue(overrides: ItemOverrides) -> LiveCatalogue:
    items = ItemTable(IDS, TITLES, [()] * len(IDS), np.ones(len(IDS), np.int64)).with_cold_items(COLD)
    return LiveCatalogue(items, overrides)


def assert_encoded(catalogue: LiveCatalogue, items: list[tuple[int, float]]) -> None:
    shown, own = np.array([row for row, _ in items], np.int64), [score for _, score in items]
    encoded, expected = catalogue.encoded_items(shown, own), catalogue.scored_items(shown, own)
    assert encode({"items": encoded, "k": 1}) == orjson.dumps({"items": expected, "k": 1})
    answers, objects = (
        {"user_id": "\0", "a list": {"items": one}, "its end": one[-2:], "again": one} for one in (encoded, expected)
    )
    for bound in (trained_catalogue.MAX_COPIED_BYTES, 0, 60):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trained_catalogue, "MAX_COPIED_BYTES", bound)
            assert b"".join(encoded_pieces(answers)) == orjson.dumps(objects)
    assert len(encoded) == len(expected)
    assert encoded.item_ids == [item["item_id"] for item in expected]
    assert orjson.dumps([*encoded]) == orjson.dumps(expected)


@given(st.lists(listed | puts, max_size=12), st.integers(0, 4))
@settings(max_examples=80)
def test_lists_equal_encoded_objects_after_any_updates(steps: list[Any], most_kept: int) -> None:
    overrides = ItemOverrides()
    catalogue = new_catalogue(overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_catalogue, "MAX_KEPT_ITEMS", most_kept)
        for step in steps:
            if step and isinstance(step[0], ItemEntry):
                overrides.apply(ItemChanges(step, overrides.version + 1))
                catalogue.catch_up()
            else:
                assert_encoded(catalogue, step)


def test_a_title_that_changes_during_encoding_is_not_cached() -> None:
    """One thread constantly reads titles that another one changes."""
    overrides = ItemOverrides()
    catalogue = new_catalogue(overrides)
    everything = [(row, 1.5) for row in range(len(IDS))]
    shown, own = np.arange(len(IDS)), [score for _, score in everything]
    is_over = False

    def read() -> None:
        while not is_over:
            catalogue.encoded_items(shown, own)

    reader = Thread(target=read)
    reader.start()
    try:
        for version in range(1, 300):
            overrides.apply(ItemChanges([ItemEntry(IDS[version % len(IDS)], f"title {version}")], version))
            catalogue.catch_up()
            assert_encoded(catalogue, everything)
    finally:
        is_over = True
        reader.join()
    assert_encoded(catalogue, everything)


def random_request(rng: random.Random) -> dict[str, Any]:
    """A request for a user, a history or an unknown user."""
    users: list[dict[str, Any]] = [{"user_id": f"reader-{rng.randrange(8)}"}, {"user_id": "nobody"}]
    users.append({"history": [item_id(rng.randrange(ITEMS)) for _ in range(rng.randrange(1, 5))]})
    request = {**rng.choice(users), "k": rng.randrange(1, ITEMS + 5)}
    wishes: list[dict[str, Any]] = [
        {"categories": rng.sample(CATEGORIES, rng.randrange(1, 3))},
        {"exclude": [item_id(rng.randrange(ITEMS)) for _ in range(rng.randrange(20))]},
        {"exclude_seen": rng.choice(["none", "recent"])},
        {"candidates": [item_id(rng.randrange(ITEMS)) for _ in range(rng.randrange(1, 30))]},
        {"current_item": item_id(rng.randrange(ITEMS))},
        {"because": item_id(rng.randrange(ITEMS))},
        {"explain": True},
        {"cursor": ""},
        {"max_per_category": rng.randrange(1, 4)},
        {"diversity": rng.random()},
        {"boost": {rng.choice(CATEGORIES): rng.uniform(-1, 1)}},
        {"basket": [item_id(rng.randrange(ITEMS))], "basket_only": rng.random() < 0.5},
        {"pin": [{"item_id": item_id(rng.randrange(ITEMS)), "place": rng.randrange(1, 9)}]},
    ]
    for wish in rng.sample(wishes, rng.randrange(5)):
        request |= wish
    return request


def encoded_from_objects(catalogue: LiveCatalogue, shown: NDArray[np.integer], own: Sequence[float]) -> EncodedItems:
    """The oracle: the response as orjson encodes it from objects."""
    return EncodedItems.of(catalogue.scored_items(shown, own))


def test_lists_equal_those_without_the_cache(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(24)
    for number in range(8):
        client.click(f"reader-{number}", *(item_id(rng.randrange(ITEMS)) for _ in range(rng.randrange(1, 40))))
    requests = [random_request(rng) for _ in range(REQUESTS)]

    def bodies() -> list[bytes]:
        return [RECOMMENDATION_ID.sub(b"", client.post("/v1/recommendations", json=one).content) for one in requests]

    encoded = bodies()
    monkeypatch.setattr(LiveCatalogue, "encoded_items", encoded_from_objects)
    assert bodies() == encoded
    assert sum(b'"source":"personalised"' in body for body in encoded) > REQUESTS / 4
