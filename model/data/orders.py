"""Orders: which purchases were made together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from model.data.interactions import Interactions

PURCHASE = "purchase"
WINDOW_S = 3_600.0  # between two purchases of one order, where the data name no orders
NO_ORDER = -1


def has_purchases(interactions: Interactions) -> bool:
    """Return whether any event may be of the type ``purchase``."""
    return PURCHASE in interactions.type_names


def is_bought(interactions: Interactions) -> NDArray[np.bool_]:
    """Return which events are purchases: (events,); all of them where none is of the type ``purchase``."""
    if not has_purchases(interactions):
        return np.ones(len(interactions), bool)
    bought: NDArray[np.bool_] = interactions.type == interactions.type_names.index(PURCHASE)
    return bought


def order_numbers(interactions: Interactions, window_s: float = WINDOW_S) -> NDArray[np.int64]:
    """Number the orders: (events,), NO_ORDER for an event that belongs to none.

    An order is what one user bought under one ``order_id``; without such ids, what was bought within the window after
    the purchase before. Where no event is of the type ``purchase``, every event counts as one. Timestamps that are only
    an order tell of no window.
    """
    numbers = np.full(len(interactions), NO_ORDER, np.int64)
    bought = is_bought(interactions)
    ids = interactions.order
    named = np.zeros(len(interactions), bool) if ids is None else ids >= 0
    if ids is not None:
        own = bought & named
        pairs = np.stack([interactions.user[own], ids[own]])
        numbers[own] = np.unique(pairs, axis=1, return_inverse=True)[1].ravel()
    rest = np.flatnonzero(bought & ~named)
    if len(rest) and not interactions.time_is_order:
        user, time_us = interactions.user[rest], interactions.timestamp_us[rest]
        is_first = np.ones(len(rest), bool)
        is_first[1:] = (user[1:] != user[:-1]) | (np.diff(time_us) > window_s * 1e6)
        numbers[rest] = numbers.max(initial=-1) + np.cumsum(is_first)
    return numbers
