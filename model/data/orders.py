"""Orders: purchases that were made together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from model.data.interactions import Interactions

PURCHASE = "purchase"
WINDOW_S = 3_600.0  # the longest time between two purchases of one order, if the data have no order ids
NO_ORDER = -1


def has_purchases(interactions: Interactions) -> bool:
    """Return whether any event may be of the type ``purchase``."""
    return PURCHASE in interactions.type_names


def is_bought(interactions: Interactions, part: slice = slice(None)) -> NDArray[np.bool_]:
    """Return which events of a part are purchases: (events,); all of them if the data have no type ``purchase``."""
    kinds = interactions.type[part]
    if not has_purchases(interactions):
        return np.ones(len(kinds), bool)
    bought: NDArray[np.bool_] = kinds == interactions.type_names.index(PURCHASE)
    return bought


def order_numbers(interactions: Interactions, window_s: float = WINDOW_S) -> NDArray[np.int64]:
    """Number the orders: (events,), NO_ORDER for an event without an order.

    An order has the purchases of one user with one ``order_id``. Purchases without an id are in the order of the user's
    purchase before, if that is within the window. If no event has the type ``purchase``, every event counts as a
    purchase. Without real timestamps, only ids define orders.
    """
    numbers = interactions.arrays.empty(len(interactions), np.int64)
    numbers[:] = NO_ORDER
    found = 0
    for part in interactions.pieces():
        named = np.flatnonzero(is_bought(interactions, part) & _is_named(interactions, part))
        if interactions.order is not None and len(named):
            pairs = np.stack([interactions.user[part][named], interactions.order[part][named]])
            own = np.unique(pairs, axis=1, return_inverse=True)[1].ravel()
            numbers[part][named] = found + own
            found += int(own.max()) + 1
    if interactions.time_is_order:
        return numbers
    for part in interactions.pieces():
        rest = np.flatnonzero(is_bought(interactions, part) & ~_is_named(interactions, part))
        user, time_us = interactions.user[part][rest], interactions.timestamp_us[part][rest]
        is_first = np.ones(len(rest), bool)
        is_first[1:] = (user[1:] != user[:-1]) | (np.diff(time_us) > window_s * 1e6)
        numbers[part][rest] = found - 1 + np.cumsum(is_first)
        found += int(is_first.sum())
    return numbers


def _is_named(interactions: Interactions, part: slice) -> NDArray[np.bool_]:
    ids = interactions.order
    return np.zeros(len(interactions.user[part]), bool) if ids is None else ids[part] >= 0
