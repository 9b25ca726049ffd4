"""Cached results of expressions in bounded memory, and gains from a numeric property."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np

from app.catalogue import filter_expressions
from app.catalogue.expressions.objective import gains_of
from app.catalogue.filter_expressions import KEY_BYTES, ItemExpressions
from app.catalogue.item_properties import ItemProperties

ROWS = 1_000


def test_repeated_gains_are_cached_once() -> None:
    size = ROWS * np.dtype(np.float32).itemsize + KEY_BYTES
    with patch.object(filter_expressions, "RESULT_BYTES", 3 * size):
        expressions = ItemExpressions(ItemProperties(ROWS))
        first = expressions.value_gains("margin", 0.5)
        for _ in range(4):
            assert expressions.value_gains("margin", 0.5) is first
        other = expressions.value_gains("margin", 0.25)
        assert expressions.find_value_gains("margin", 0.5) is first
        assert expressions.find_value_gains("margin", 0.25) is other


def test_a_strength_of_zero_as_a_float32_adds_nothing() -> None:
    values = np.array([-np.inf, 0.0, 3.0], np.float32)
    assert gains_of(values, 1e-46, 20.0).tolist() == [0.0, 0.0, 0.0]
