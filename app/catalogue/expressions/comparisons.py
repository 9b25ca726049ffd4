"""Compares the numbers of all rows with one number or several, in a single pass."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isnan, nextafter
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from model.inference import bitmap
from model.inference.bitmap import Bitmap

INT64 = np.iinfo(np.int64)


def can_compare(values: Any, number: object) -> bool:
    """Return whether `rows_compared` accepts these: all numbers of one type."""
    if not isinstance(values, np.ndarray):
        return False
    return isinstance(number, float) if values.dtype == np.float64 else type(number) is int


def rows_compared(function: str, values: NDArray[Any], number: float) -> Bitmap:
    """Return the rows whose value meets the comparison with the number.

    function  an operator of CEL, such as ``_<_``
    values    (N,)  float64, or any integers
    number    of the same kind; an integer has 64 bits
    """
    rows = bitmap.empty(len(values))
    low, high = _interval(function, number)
    _mark_between(values, low, high, function == "_!=_", rows)
    return rows


def rows_among(values: NDArray[Any], numbers: Sequence[float]) -> Bitmap:
    """Return the rows whose value is one of the numbers.

    values   (N,)  float64 or int64
    numbers  no value is NaN, or one of whole numbers a fraction
    """
    rows = bitmap.empty(len(values))
    if values.dtype == np.int64:
        numbers = [int(number) for number in numbers if number % 1 == 0 and INT64.min <= int(number) <= INT64.max]
    different = np.unique(np.array(numbers, values.dtype))
    _mark_among(values, different[different == different], rows)  # without NaN
    return rows


def _interval(function: str, number: float) -> tuple[float, float]:
    """Return the lowest and the highest number that meet the comparison; for ``!=`` those that do not."""
    if isinstance(number, float):
        lowest, highest = -inf, inf
        below, above = nextafter(number, -inf), nextafter(number, inf)
    else:
        lowest, highest = INT64.min, INT64.max
        below, above = number - 1, number + 1
    if isnan(number) or (function == "_<_" and number == lowest) or (function == "_>_" and number == highest):
        return highest, lowest
    intervals = {"_<_": (lowest, below), "_<=_": (lowest, number), "_>_": (above, highest), "_>=_": (number, highest)}
    return intervals.get(function, (number, number))


@numba.njit(cache=True, nogil=True)
def _mark_between(values, low, high, is_outside, rows):  # type: ignore[no-untyped-def]
    """Mark the rows whose value is inside an interval, or those whose value is outside."""
    flip = np.uint64(0) - np.uint64(is_outside)
    whole = len(values) // 64
    for word in range(whole):
        bits = np.uint64(0)
        for place in range(64):
            value = values[word * 64 + place]
            bits |= np.uint64((value >= low) & (value <= high)) << np.uint64(place)
        rows[word] = bits ^ flip
    if whole * 64 < len(values):
        bits = np.uint64(0)
        for place in range(len(values) - whole * 64):
            value = values[whole * 64 + place]
            bits |= np.uint64((value >= low) & (value <= high)) << np.uint64(place)
        rows[whole] = bits ^ flip


@numba.njit(cache=True, nogil=True)
def _mark_among(values, numbers, rows):  # type: ignore[no-untyped-def]
    """Mark the rows whose value is one of the ascending numbers."""
    if len(numbers) == 0:
        return
    for row in range(len(values)):
        value, place, size = values[row], 0, len(numbers)
        while size > 1:
            half = size // 2
            place = place + half if numbers[place + half] <= value else place
            size -= half
        rows[row // 64] |= np.uint64(numbers[place] == value) << np.uint64(row % 64)
