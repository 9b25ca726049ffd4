"""Score gains from weighing items by a number.

A score is the logarithm of an item's odds, so adding to it multiplies the odds. With the logarithm of a value added,
lists are in order of expected value. With a fraction of it, the order is between that and the order of the odds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.catalogue.expressions.columns import NumberColumn
from model.inference import bitmap


def log_values(column: NumberColumn) -> NDArray[np.float32]:
    """Return the logarithm of each item's value (N,), minus the median of all logarithms.

    An item without a value gets the median, 0; an item with a value of 0 or less gets minus infinity. The unit of the
    values has no effect.
    """
    known = bitmap.to_mask(column.known, len(column.values))
    above_0 = known & (column.values > 0)
    logs = np.log(column.values[above_0])
    values = np.where(known, np.float32(-np.inf), np.float32(0))
    values[above_0] = logs - np.median(logs) if len(logs) else 0.0
    return values


def gains_of(values: NDArray[np.float32], strength: float, most: float) -> NDArray[np.float32]:
    """Return the score gains (N,) for the logarithms of values, between -most and most.

    strength  above 0; one that is 0 as a float32 adds nothing
    """
    if np.float32(strength) == 0:
        return np.zeros_like(values)
    gains: NDArray[np.float32] = np.clip(values * np.float32(strength), -most, most)
    return gains
