"""After how long items are bought again, learned from purchases, and how due each of a user's own items is.

The days until an item is bought again are log-normal, with the median ``e ** mu`` and the spread ``sigma`` of their
logarithm; and a share ``r`` of those who have bought it once does so at all. Training learns the three for each item,
shrunk towards the means of its rarest category, which are shrunk towards those of all items. Users all of whose
purchases are within an hour do not count in ``r``.

A user who has bought an item n times, with the intervals g and the last time t days ago, has
``mu' = (INTERVAL_STRENGTH * mu + sum(log g)) / (INTERVAL_STRENGTH + n - 1)`` and
``p = (REPEAT_STRENGTH * r + n - 1) / (REPEAT_STRENGTH + n - 1)``. With f and S, the density and the survival of
the log-normal of ``mu'`` and ``sigma`` at t, the score is ``p * f / (1 - p + p * S)``: the purchases a day that are
expected now, the hazard of a mixture with those who never come back (Boag, 1949). It is low just after a purchase,
highest about when the item is due, and falls again for what was given up. ``benchmarks/quality/repeat.py`` compares it
with how often and how lately the user has bought the items.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import log, pi, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

ORDER_DAYS = 1 / 24  # between two purchases of an item that count as one
SHRINKAGE = 20.0  # intervals, or users, at which those of an item count half
INTERVAL_STRENGTH = 2.0  # a user's own intervals at which they count half
REPEAT_STRENGTH = 0.5  # a user's own repeated purchases at which they count half
SUREST = 0.99  # nobody is more likely to buy an item again
LEAST_SPREAD = 0.3
VALUES_AT_ONCE = 1 << 20
LEAST_SCORE = 1e-30  # so that logarithms are finite


class Purchases(NamedTuple):
    """A user's purchases.

    item      (E,)  rows
    age_days  (E,)  how long ago, 0 or more
    """

    item: NDArray[np.int64]
    age_days: NDArray[np.float64]


NO_PURCHASES = Purchases(np.zeros(0, np.int64), np.zeros(0))


class Intervals(NamedTuple):
    """After how long each item is bought again: 12 bytes each. The last row stands for items that are not known.

    log_days      (N + 1,)  float32, mu
    spread        (N + 1,)  float32, sigma, above 0
    repeat_share  (N + 1,)  float32, r, from 0 to 1
    of_purchases  whether purchases count; else, in data without any, all events do
    """

    log_days: NDArray[np.float32]
    spread: NDArray[np.float32]
    repeat_share: NDArray[np.float32]
    of_purchases: bool

    @property
    def exist(self) -> bool:
        """Whether anything was learned."""
        return len(self.log_days) > 1

    def of(self, rows: NDArray[np.integer]) -> Intervals:
        """Return those of some items, which may be beyond the table, without the last row."""
        own = np.minimum(rows, len(self.log_days) - 1)
        return Intervals(self.log_days[own], self.spread[own], self.repeat_share[own], self.of_purchases)

    def enlarged(self, rows: NDArray[np.integer]) -> Intervals:
        """Return the table of a catalogue of copies of these items."""
        return self.of(np.append(rows, len(self.log_days) - 1))


NO_INTERVALS = Intervals(
    np.array([log(30)], np.float32), np.array([1.0], np.float32), np.array([0.1], np.float32), of_purchases=True
)


class DueItems(NamedTuple):
    """The items that a user has bought, in order of rows.

    items          (I,)
    scores         (I,)  expected purchases a day, above 0
    times          (I,)  how often the user has bought it
    age_days       (I,)  since the last time
    interval_days  (I,)  after which the user buys it again, the median
    """

    items: NDArray[np.int64]
    scores: NDArray[np.float64]
    times: NDArray[np.int64]
    age_days: NDArray[np.float64]
    interval_days: NDArray[np.float64]


def due_items(bought: Purchases, intervals: Intervals) -> DueItems:
    """Score a user's own items by how due they are; purchases of one item within an hour count as one."""
    newest_first = np.lexsort((bought.age_days, bought.item))
    item, age_days = bought.item[newest_first], bought.age_days[newest_first]
    is_newest = np.ones(len(item), bool)
    is_newest[1:] = item[1:] != item[:-1]
    gaps = np.diff(age_days)
    is_interval = ~is_newest[1:] & (gaps > ORDER_DAYS)
    items, since = item[is_newest], age_days[is_newest]
    owner = (np.cumsum(is_newest) - 1)[1:][is_interval]
    repeats = np.bincount(owner, minlength=len(items))
    log_gaps = np.bincount(owner, np.log(gaps[is_interval]), minlength=len(items))
    own = intervals.of(items)
    log_days = (INTERVAL_STRENGTH * own.log_days.astype(np.float64) + log_gaps) / (INTERVAL_STRENGTH + repeats)
    share = (REPEAT_STRENGTH * own.repeat_share.astype(np.float64) + repeats) / (REPEAT_STRENGTH + repeats)
    scores = _hazard(np.maximum(since, ORDER_DAYS), log_days, own.spread.astype(np.float64), np.minimum(share, SUREST))
    return DueItems(items, scores, repeats + 1, since, np.exp(log_days))


def _hazard(
    days: NDArray[np.float64], log_days: NDArray[np.float64], spread: NDArray[np.float64], share: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return how many purchases a day are expected after so many days without one."""
    late = (np.log(days) - log_days) / spread
    density = np.exp(-(late**2) / 2) / (sqrt(2 * pi) * spread * days)
    hazard: NDArray[np.float64] = np.maximum(share * density / (1 - share + share * ndtr(-late)), LEAST_SCORE)
    return hazard


class Repurchases(NamedTuple):
    """What users bought again: I intervals, and P pairs of an item and a user who has returned.

    item         (I,)  what was bought again
    log_days     (I,)  the logarithm of the days since the purchase before
    first        (P,)  the item of each pair
    is_repeated  (P,)  bool, whether the pair has an interval
    """

    item: NDArray[np.integer]
    log_days: NDArray[np.float64]
    first: NDArray[np.integer]
    is_repeated: NDArray[np.bool_]


def repurchases(user: NDArray[np.integer], item: NDArray[np.integer], time_days: NDArray[np.float64]) -> Repurchases:
    """Find the intervals between purchases of one item by one user; arguments as those of ``learned_intervals``."""
    in_turn = np.lexsort((time_days, item, user))
    user, item, time_days = user[in_turn], item[in_turn], time_days[in_turn]
    is_again = (user[1:] == user[:-1]) & (item[1:] == item[:-1])
    gaps = np.diff(time_days)
    is_interval = is_again & (gaps > ORDER_DAYS)
    is_first = np.ones(len(item), bool)
    is_first[1:] = ~is_again
    pair = np.cumsum(is_first) - 1
    is_repeated = np.bincount(pair[1:][is_interval], minlength=int(is_first.sum())) > 0
    of_returned = _has_returned(user, time_days)[is_first]
    return Repurchases(
        item[1:][is_interval], np.log(gaps[is_interval]), item[is_first][of_returned], is_repeated[of_returned]
    )


def _has_returned(user: NDArray[np.integer], time_days: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return for each purchase whether its user bought something more than an hour apart; each user's stand together.

    A single order says nothing about what is bought again: it is often that of a till or a guest, of whom nothing
    else is known.
    """
    if not len(user):
        return np.zeros(0, bool)
    begins = np.flatnonzero(np.diff(user, prepend=user[0] - 1))
    spans = np.maximum.reduceat(time_days, begins) - np.minimum.reduceat(time_days, begins)
    return np.repeat(spans > ORDER_DAYS, np.diff(begins, append=len(user)))


def learned_intervals(
    user: NDArray[np.integer],
    item: NDArray[np.integer],
    time_days: NDArray[np.float64],
    category: NDArray[np.int64],
    *,
    of_purchases: bool,
) -> Intervals:
    """Learn after how long items are bought again; NO_INTERVALS where nobody has bought anything again.

    user, item, time_days  (events,)  who bought what, and when
    category               (N,)       the category of each item, a number
    """
    return intervals_of(repurchases(user, item, time_days), category, of_purchases=of_purchases)


def intervals_of(
    found: Repurchases,
    category: NDArray[np.int64],
    *,
    of_purchases: bool,
    release: Callable[[], None] = lambda: None,
) -> Intervals:
    """Learn as ``learned_intervals`` from what users bought again.

    release  is called after each piece of it that was read
    """
    if not len(found.item):
        return NO_INTERVALS
    log_days = _shrunk(found.item, lambda part: found.log_days[part], category, release)
    variance = _shrunk(
        found.item, lambda part: (found.log_days[part] - log_days[found.item[part]]) ** 2, category, release
    )
    repeat_share = _shrunk(found.first, lambda part: found.is_repeated[part].astype(np.float64), category, release)
    spread: NDArray[np.float64] = np.maximum(np.sqrt(variance), LEAST_SPREAD)
    return Intervals(
        log_days.astype(np.float32), spread.astype(np.float32), repeat_share.astype(np.float32), of_purchases
    )


def _shrunk(
    item: NDArray[np.integer],
    values: Callable[[slice], NDArray[np.float64]],
    category: NDArray[np.int64],
    release: Callable[[], None],
) -> NDArray[np.float64]:
    """Return the mean of each item's values, shrunk towards that of its category, and behind them the whole mean.

    item      (V,)
    values    of a part of the (V,)
    category  (N,)
    returns   (N + 1,)
    """
    sums, counts = np.zeros(len(category)), np.zeros(len(category))
    for begin in range(0, len(item), VALUES_AT_ONCE):  # always so many: sums are the same however memory is limited
        part = slice(begin, begin + VALUES_AT_ONCE)
        sums += np.bincount(item[part], values(part), minlength=len(category))
        counts += np.bincount(item[part], minlength=len(category))
        release()
    whole = float(sums.sum() / len(item))
    sums_of, counts_of = (np.bincount(category, of_items).astype(np.float64) for of_items in (sums, counts))
    of_category = _shrunk_means(sums_of, counts_of, whole)
    return np.append(_shrunk_means(sums, counts, of_category[category]), whole)


def _shrunk_means(
    sums: NDArray[np.float64], counts: NDArray[np.float64], prior: NDArray[np.float64] | float
) -> NDArray[np.float64]:
    means: NDArray[np.float64] = (sums + SHRINKAGE * prior) / (counts + SHRINKAGE)
    return means


def rarest_categories(categories: Sequence[Sequence[str]]) -> NDArray[np.int64]:
    """Return the number of each item's category with the fewest items: (N,); 0 for an item without any."""
    counts = Counter(name for names in categories for name in names)
    numbers = {name: number for number, name in enumerate(sorted(counts), 1)}
    rarest = (min(names, key=lambda name: (counts[name], name), default="") for names in categories)
    return np.array([numbers.get(name, 0) for name in rarest], np.int64)
