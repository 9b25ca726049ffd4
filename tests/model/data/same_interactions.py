"""Bit-exact comparison of interactions."""

from __future__ import annotations

import numpy as np

from model.data.interactions import Interactions


def require_same(one: Interactions, other: Interactions) -> None:
    for name in ("user_ids", "item_ids", "type_names", "order_ids", "sha256", "time_is_order", "is_log"):
        assert getattr(one, name) == getattr(other, name), name
    for name in ("user", "item", "type", "timestamp_us", "value", "order", "starts"):
        first, second = (np.asarray(getattr(each, name)) for each in (one, other))
        np.testing.assert_array_equal(first, second, name)
        assert first.dtype == second.dtype
