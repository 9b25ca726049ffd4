"""Comparisons of all rows with a number, against numpy, including the limits of each type."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.catalogue.expressions.comparisons import INT64, rows_among, rows_compared
from model.inference import bitmap

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "_==_": operator.eq,
    "_!=_": operator.ne,
    "_<_": operator.lt,
    "_<=_": operator.le,
    "_>_": operator.gt,
    "_>=_": operator.ge,
}
floats = st.sampled_from([0.0, -0.0, inf, -inf, nan, 5e-324, -5e-324, 1.5, 1.7976931348623157e308]) | st.floats()
integers = st.sampled_from([int(INT64.min), int(INT64.max), 0, -1, 1]) | st.integers(int(INT64.min), int(INT64.max))


@pytest.mark.parametrize("function", COMPARISONS)
@given(data=st.data())
def test_comparisons_equal_numpy(function: str, data: st.DataObject) -> None:
    for numbers, dtype in ((floats, np.float64), (integers, np.int64), (st.integers(-1, 9), np.int16)):
        values: Sequence[Any] = data.draw(st.lists(numbers, max_size=300))
        number = data.draw(st.sampled_from(values) if values else numbers)
        rows = rows_compared(function, np.array(values, dtype), number)
        wanted = COMPARISONS[function](np.array(values, dtype), number)
        assert bitmap.to_mask(rows, len(values)).tolist() == wanted.tolist()


@given(data=st.data())
def test_membership_equals_numpy(data: st.DataObject) -> None:
    for numbers, dtype in ((floats, np.float64), (integers, np.int64)):
        values: Sequence[Any] = data.draw(st.lists(numbers, max_size=300))
        wanted: Sequence[Any] = data.draw(st.lists(st.sampled_from(values) if values else numbers, max_size=100))
        rows = rows_among(np.array(values, dtype), wanted)
        found = np.isin(np.array(values, dtype), np.array(wanted, dtype))
        assert bitmap.to_mask(rows, len(values)).tolist() == found.tolist()
