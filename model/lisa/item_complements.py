"""Counts of items' complements: items that are in the same order more often than by chance.

Neighbours in the space of codes are alike, and so replace each other; complements are bought together. An item scores
``(c / (n + SHRINKAGE) / p ** POPULARITY) ** SHARPNESS`` as a complement of another one: c counts the orders that have
both, n those that have the other one, and p is the share of orders that have the item. An order of m items counts for
``1 / sqrt(d * (m - 1))`` where the two are the d-th from each other in it, up to NEAR: what was chosen in one go
belongs together. The complements of a basket are those of its items, with their scores added.
``benchmarks/quality/together.py`` has chosen the constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from model.lisa.neighbours import ItemBlock, strongest_columns

COUNT = 32  # complements of an item that are kept
NEAR = 20  # items between which an order counts, from the first of them to the second
SHRINKAGE = 20.0  # orders at which an item's shares count half
POPULARITY = 0.1  # 0: what stands in most of the orders; 1: what would else hardly stand there
SHARPNESS = 1.5  # above 1: one strong complement of a basket goes before several faint ones
ITEMS_PER_BLOCK = 4096
UNITS = 2.0**28  # of what two items count, of which a float64 holds 33 million orders' exactly
FAINT_SCORE = 0.05  # far smaller scores lift nothing
HASH_FACTOR = 2_654_435_761  # 2^32 divided by the golden ratio, for multiplicative hashing
LIFT_STRENGTH = 64.0  # of a basket, in units of log(1 + score / FAINT_SCORE)


ColumnLookUp = Callable[[NDArray[Any], NDArray[np.int64], range], NDArray[Any]]
"""Looks a column up so many places after some: (E,), (P,) -> (steps, P); anything where there is no such place."""


class Complements(NamedTuple):
    """The K strongest complements of each item, strongest first: 8 bytes each.

    items   (N, K)  int32, -1 where there are fewer
    scores  (N, K)  float32, 0 there
    """

    items: NDArray[np.int32]
    scores: NDArray[np.float32]

    @property
    def exist(self) -> bool:
        """Whether anything was counted."""
        return self.items.size > 0

    def of(self, basket: NDArray[np.integer], most: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the complements of all items of a basket, strongest first, and their scores; ties by item order.

        basket   (M,)          rows; those beyond the table have no complements
        most     how many are wanted; None for all
        returns  (C,) and (C,)  without the items of the basket
        """
        own = np.ascontiguousarray(basket, np.int64)
        found = np.empty(len(own) * self.items.shape[1], np.int64)
        total = np.empty(len(found))
        count = _add_up(self.items, self.scores, own, found, total)
        found, total = found[:count], total[:count]
        if most is not None and most < count:
            is_strong = total >= np.partition(total, -most)[-most]  # and those that tie, for the order to decide
            found, total = found[is_strong], total[is_strong]
        strongest_first = np.lexsort((found, -total))[:most]
        return found[strongest_first], total[strongest_first]


@numba.njit(cache=True, nogil=True)
def _add_up(items, scores, basket, found, total):  # type: ignore[no-untyped-def]
    """Add up the scores of each item that complements one of the basket; return the number of these items.

    A hash table with linear probing has 1 + the position of each item, -1 for items of the basket, and 0 for none.
    """
    size = 16
    while size < 2 * (len(found) + len(basket)):
        size *= 2
    keys, places = np.empty(size, np.int64), np.zeros(size, np.int32)
    for row in basket:
        slot = _slot_of(row, keys, places)
        keys[slot], places[slot] = row, -1
    count = 0
    for row in basket:
        if row < len(items):
            for nth in range(items.shape[1]):
                item = np.int64(items[row, nth])
                if item < 0:
                    continue
                slot = _slot_of(item, keys, places)
                if places[slot] == 0:
                    keys[slot], places[slot] = item, count + 1
                    found[count], total[count] = item, 0.0
                    count += 1
                if places[slot] > 0:
                    total[places[slot] - 1] += scores[row, nth]
    return count


@numba.njit(nogil=True)
def _slot_of(item, keys, places):  # type: ignore[no-untyped-def]
    mask = len(keys) - 1
    slot = (item * HASH_FACTOR >> 20) & mask
    while places[slot] != 0 and keys[slot] != item:
        slot = (slot + 1) & mask
    return slot


NO_COMPLEMENTS = Complements(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))


class Baskets(NamedTuple):
    """The different items of orders of two items and more, one order behind the other, each in its own sequence.

    order  (E,)  numbers of the orders, those of one order together
    item   (E,)
    size   (E,)  items of the order
    """

    order: NDArray[np.int64]
    item: NDArray[np.int64]
    size: NDArray[np.int64]


class OrderCounts(NamedTuple):
    """The number of orders, and the number of orders with each item (N,)."""

    orders: int
    orders_with: NDArray[np.int64]


def strongest_complements(
    order: NDArray[np.integer], item: NDArray[np.integer], items: int, count: int = COUNT
) -> Complements:
    """Find the ``count`` strongest complements of every item.

    order  (events,)  the number of the order that each event belongs to
    item   (events,)  what was bought, that of each order in its sequence
    items  N, the size of the catalogue
    """
    baskets = baskets_of(order, item)
    if not len(baskets.order):
        return NO_COMPLEMENTS
    counts = _counts(baskets, items)
    totals = OrderCounts(len(np.unique(baskets.order)), np.bincount(baskets.item, minlength=items))
    blocks = [
        strongest_of(counts[begin : begin + ITEMS_PER_BLOCK], begin, totals, count)
        for begin in range(0, items, ITEMS_PER_BLOCK)
    ]
    return joined(blocks)


def strongest_of(counts: sparse.csr_array, first: int, totals: OrderCounts, count: int = COUNT) -> Complements:
    """Find the ``count`` strongest complements of the items of a block of rows (n, N), whose first one is given."""
    expected = (np.maximum(totals.orders_with, 1) / totals.orders) ** POPULARITY
    own = np.repeat(totals.orders_with[first : first + counts.shape[0]], np.diff(counts.indptr))
    scores = (counts.data / (own + SHRINKAGE) / expected[counts.indices]) ** SHARPNESS
    found = sparse.csr_array((scores, counts.indices, counts.indptr), shape=counts.shape)
    return Complements(*strongest_columns(found, count))


def joined(blocks: Sequence[Complements]) -> Complements:
    """Put blocks of rows one behind the other."""
    return Complements(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))


def complement_score(both: float, orders_with: float, share: float) -> float:
    """Return the score of one item as a complement of another one, as `strongest_complements` does.

    both         orders that have both
    orders_with  those that have the other one
    share        of all orders, which has the item
    """
    return float((both / (orders_with + SHRINKAGE) / share**POPULARITY) ** SHARPNESS)


def basket_gains(scores: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return what the scores of a user's items gain as complements of a basket: (C,) -> (C,)."""
    gains: NDArray[np.float32] = (LIFT_STRENGTH * np.log1p(scores / FAINT_SCORE)).astype(np.float32)
    return gains


def baskets_of(order: NDArray[np.integer], item: NDArray[np.integer]) -> Baskets:
    """Return the baskets of whole orders; arguments as those of ``strongest_complements``."""
    by_order = np.argsort(order, kind="stable")
    bought = np.stack([order[by_order], item[by_order]]).astype(np.int64)
    _, first = np.unique(bought, axis=1, return_index=True)
    first.sort()
    orders, items = bought[:, first]
    size = np.bincount(orders - orders[0])[orders - orders[0]] if len(orders) else np.zeros(0, np.int64)
    is_one_of_several = size > 1
    return Baskets(orders[is_one_of_several], items[is_one_of_several], size[is_one_of_several])


def _counts(baskets: Baskets, items: int) -> sparse.csr_array:
    """Count the orders that have two items, nearer ones for more: symmetric (N, N)."""
    order, item, size = baskets
    counts = sparse.csr_array((items, items), dtype=np.float64)
    for distance in range(1, NEAR + 1):
        both = order[distance:] == order[:-distance]
        pairs = item[:-distance][both], item[distance:][both]
        weights = _weights(size[:-distance][both], distance)
        counts += sparse.coo_array((weights, pairs), shape=(items, items)).tocsr()
    return sparse.csr_array(counts + counts.T)


def counts_of_block(block: ItemBlock, items: int, baskets: Baskets, look_up: ColumnLookUp) -> sparse.csr_array:
    """Count the orders that have an item of the block and another one: the rows (n, N) of the whole matrix.

    block    items, and the places of theirs in the baskets
    look_up  looks a column of the baskets up at so many places after some
    """
    shape = (block.end - block.first, items)
    counts = sparse.csr_array(shape, dtype=np.float64)
    for places in block.parts():
        row = look_up(baskets.item, places, range(1))[0] - block.first
        own, size = (look_up(column, places, range(1))[0] for column in (baskets.order, baskets.size))
        for steps in (range(1, NEAR + 1), range(-1, -NEAR - 1, -1)):
            orders, others = (look_up(column, places, steps) for column in (baskets.order, baskets.item))
            for step, order, other in zip(steps, orders, others, strict=True):
                both = (order == own) & (places + step >= 0) & (places + step < len(baskets.order))
                weights = _weights(size[both], abs(step))
                counts += sparse.coo_array((weights, (row[both], other[both])), shape=shape).tocsr()
    return counts


def _weights(size: NDArray[np.int64], distance: int) -> NDArray[np.float64]:
    """Return what two items count in orders of these sizes, in whole units: sums are the same in every sequence."""
    weights: NDArray[np.float64] = np.round(UNITS / np.sqrt((size - 1) * distance)) / UNITS
    return weights
