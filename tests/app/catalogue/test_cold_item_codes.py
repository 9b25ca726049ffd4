"""Codes of cold items in the memory of a process."""

from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import count
from math import inf, isfinite

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.catalogue.category_column import CategoryColumn
from app.catalogue.cold_item_codes import ColdItemCodes, item_codes
from app.catalogue.expressions.set_columns import TextSetColumn
from app.catalogue.trained_catalogue import TrainedCatalogue
from model.artifact.item_table import ItemTable
from model.artifact.model_directory import Artifact
from model.cold_items import ColdCodes, with_cold_items
from model.config import Config, ModelConfig
from model.lisa.lisa_mini import LisaMini
from storage.records import ItemCodes
from storage.state.cold_codes import cold_row

BOOKS, WORDS = 2, 8
SHAPE = ModelConfig(
    width=16, history_codebooks=BOOKS, history_codewords=WORDS, target_codebooks=BOOKS, target_codewords=WORDS
)
RECORDS = st.builds(
    ItemCodes,
    st.sampled_from(["a", "b", "c", "d"]),
    st.sampled_from([b"0", b"1"]),
    st.integers(0, 100),
    st.floats(-9, 9) | st.just(inf),
    *[st.lists(st.integers(0, WORDS), min_size=BOOKS - 1, max_size=BOOKS + 1).map(bytes)] * 2,
)


@given(st.lists(st.lists(RECORDS, max_size=5) | st.none(), max_size=15))
def test_assignments_are_a_snapshot_of_the_newest_codes(
    pages: list[list[ItemCodes] | None],
) -> None:
    """None stands for a read."""
    assigned, newest = ColdItemCodes(), dict[bytes, dict[str, ItemCodes]]({b"0": {}, b"1": {}})
    asked = []
    for page in [*pages, None]:
        if page is None:
            asked += [(assigned.of(tag), dict(of_tag)) for tag, of_tag in newest.items()]
        else:
            assigned.apply(page)
            for record in page:
                newest[record.tag][record.item_id] = record
    for found, expected in asked:
        assert dict(found) == expected
        assert (len(found), "never" in found) == (len(expected), False)


@given(st.lists(RECORDS, max_size=15))
def test_a_model_gets_the_cold_items_whose_codes_fit(records: list[ItemCodes]) -> None:
    learned = random_model(SHAPE)
    assigned = ColdItemCodes()
    assigned.apply(records)
    expected = {
        name: one
        for name, one in assigned.of(b"0").items()
        if name != "d" and isfinite(one.bias)
        if all(len(own) == BOOKS and max(own) < WORDS for own in (one.history, one.target))
    }
    found, codes = assigned.of(b"0").fitting(learned)
    assert dict(found) == expected
    grown = with_cold_items(learned, [*found], codes)
    assert [*grown.items.ids] == ["d", *found]
    for row, one in enumerate(found.values(), 1):
        assert grown.model.history_codes[row].tolist() == [*one.history]
        assert grown.model.target_codes[row].tolist() == [*one.target]
        assert grown.model.bias[row].item() == np.float32(one.bias)


@cache
def random_model(shape: ModelConfig) -> Artifact:
    """A model that has learned a single item, "d"."""
    codes = (torch.zeros((1, BOOKS), dtype=torch.int64) for _ in range(2))
    model = LisaMini(shape, *codes).eval()
    items = ItemTable(["d"], [""], [()], np.ones(1, np.int64))
    with torch.no_grad():
        return Artifact("m", b"0".hex(), Config(model=shape), items, model, model.tables(), {})


def test_threads_read_while_codes_are_assigned() -> None:
    """A thread that loads a model reads while the event loop assigns."""
    assigned, asked, is_over = ColdItemCodes(), list[int](), threading.Event()

    def record(number: int, turn: int) -> ItemCodes:
        codes = bytes([number, turn])
        return ItemCodes(f"item-{number}", b"0", turn, float(number), codes, codes)

    def ask() -> None:
        while not is_over.is_set():
            asked.append(1)
            for name, one in assigned.of(b"0").items():
                number, turn = one.history
                assert one == record(number, turn)
                assert name == f"item-{number}"

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as threads:
            asking = [threads.submit(ask) for _ in range(3)]
            try:
                for turn in count():
                    if (turn > 300 and len(asked) > 300) or any(one.done() for one in asking):
                        break
                    page = [record(number % 200, turn % 256) for number in range(turn, turn + 20)]
                    assigned.apply(page)
                    now = assigned.of(b"0")
                    assert [now[one.item_id] for one in page] == page
            finally:
                is_over.set()
            for one in asking:
                one.result()
    finally:
        sys.setswitchinterval(before_s)


def test_assigned_codes_create_no_python_objects() -> None:
    assigned = ColdItemCodes()

    def assign(items: int, turn: int) -> None:
        for begin in range(0, items, 500):
            names = [f"item-{row}" for row in range(begin, begin + 500)]
            assigned.apply([ItemCodes(name, b"0", turn, 0.5, bytes([turn] * 8), bytes([turn] * 8)) for name in names])
            len(assigned.of(b"0"))

    assign(500, 0)
    gc.collect()
    before = sys.getallocatedblocks()
    for turn in range(4):
        assign(4_000, turn)
    gc.collect()
    assert (sys.getallocatedblocks() - before) / 4_000 < 0.1
    assert assigned.of(b"0")["item-3999"] == ItemCodes("item-3999", b"0", 3, 0.5, bytes([3] * 8), bytes([3] * 8))


@given(st.lists(st.integers(0, 9), max_size=6), st.sets(st.integers(0, 9)))
def test_states_find_the_rows_of_cold_items(asked: list[int], cold: set[int]) -> None:
    names = [f"new-{n}" for n in sorted(cold)]
    items = ItemTable(["a", "b"], ["", ""], [(), ()], np.ones(2, np.int64)).with_cold_items(names)
    catalogue = TrainedCatalogue(items, CategoryColumn(items.categories, TextSetColumn(len(items))))
    of_states = np.array([0, *(cold_row(f"new-{n}") for n in asked), -1, 1], np.int32)
    expected = [0, *(2 + names.index(f"new-{n}") if n in cold else -1 for n in asked), -1, 1]
    assert catalogue.rows_of_state_items(of_states).tolist() == expected
    assert catalogue.rows_of_state_items(np.array([of_states, of_states])).tolist() == [expected, expected]


def test_the_last_stored_codes_win() -> None:
    assigned = ColdItemCodes()
    codes = ColdCodes(np.array([1, 2], np.uint8), np.array([255], np.uint8), -1.25)
    good = item_codes("y", b"\0", 10, codes)
    assert good == ItemCodes("y", b"\0", 10, -1.25, bytes([1, 2]), bytes([255]))
    assigned.apply([replace(good, evidence=0), good])
    assert [*assigned.of(b"\0").values()] == [good]
    before = assigned.of(b"\0")
    assigned.apply([good])
    assert assigned.of(b"\0") is before
