"""Item statistics from the purchases in training events, counted at once or in pieces of whole users."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from model.data import orders
from model.data.interactions import Interactions
from model.lisa import item_complements
from model.lisa.item_complements import NO_COMPLEMENTS, Baskets, Complements, OrderCounts
from model.lisa.item_intervals import NO_INTERVALS, Intervals, Repurchases, intervals_of, repurchases
from model.training.counts.pair_counts import ItemIndex

DAY_US = 86_400e6


def complements(events: Interactions, train: NDArray[np.bool_]) -> Complements:
    """Return the items that were bought together; ``train`` as in a Split."""
    if events.time_is_order and events.order is None:
        return NO_COMPLEMENTS
    items, arrays = len(events.item_ids), events.arrays
    numbers = orders.order_numbers(events)

    def chosen() -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
        for part in events.pieces():
            counted = train[part] & (numbers[part] != orders.NO_ORDER)
            yield numbers[part][counted], events.item[part][counted]

    if len(events) <= arrays.piece:
        ((order, item),) = chosen()
        return item_complements.strongest_complements(order, item, items)
    baskets = Baskets(*arrays.stored((item_complements.baskets_of(*one) for one in chosen()), len(events)))
    if not len(baskets.order):
        return NO_COMPLEMENTS
    index = ItemIndex(baskets.item, items, arrays)
    totals = OrderCounts(_stretches(baskets.order, events), arrays.counted(baskets.item, items))
    counts = (
        (block.first, item_complements.counts_of_block(block, items, baskets, index.look_up))
        for block in index.blocks()
    )
    return item_complements.joined([item_complements.strongest_of(rows, first, totals) for first, rows in counts])


def intervals(events: Interactions, train: NDArray[np.bool_], category: NDArray[np.int64]) -> Intervals:
    """Return the intervals after which items were bought again, if the timestamps are real times.

    train     as in a Split
    category  (N,)  the number of each item's category
    """
    if events.time_is_order:
        return NO_INTERVALS
    arrays = events.arrays

    def found() -> Iterator[Repurchases]:
        for part in events.pieces():
            bought = train[part] & orders.is_bought(events, part)
            days = events.timestamp_us[part][bought] / DAY_US
            yield repurchases(events.user[part][bought], events.item[part][bought], days)

    whole = next(found()) if len(events) <= arrays.piece else Repurchases(*arrays.stored(found(), len(events)))
    return intervals_of(whole, category, of_purchases=orders.has_purchases(events), release=arrays.release)


def _stretches(numbers: NDArray[np.int64], events: Interactions) -> int:
    """Return the number of runs of equal numbers in an array that is not empty."""
    changes = 0
    for part in events.arrays.slices(len(numbers)):
        own = numbers[part.start : part.stop + 1]
        changes += int(np.count_nonzero(own[1:] != own[:-1]))
    return changes + 1
