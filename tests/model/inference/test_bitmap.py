"""Bitmaps against sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model.inference import bitmap
from tests.model.inference.bitmaps import from_mask


@given(items=st.integers(1, 700), data=st.data())
def test_a_bitmap_contains_the_added_rows(items: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, items - 1), max_size=30))
    filled = bitmap.empty(items)
    bitmap.add(filled, np.array(rows, np.int64))
    every = np.arange(items)
    assert set(every[bitmap.has(filled, every)]) == set(rows)
    mask = bitmap.to_mask(filled, items)
    assert set(np.flatnonzero(mask)) == set(rows)
    assert np.array_equal(from_mask(mask), filled)


def test_bitmaps_of_a_batch_equal_single_ones() -> None:
    masks = np.random.default_rng(0).random((5, 300)) < 0.5
    packed = from_mask(masks)
    assert packed.shape == (5, len(bitmap.empty(300)))
    assert np.array_equal(bitmap.to_mask(packed, 300), masks)
    for mask, row in zip(masks, packed, strict=True):
        assert np.array_equal(from_mask(mask), row)
