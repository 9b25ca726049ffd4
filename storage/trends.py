"""Trends: how often items are used now, as counts that halve with time.

A *trend* is the logarithm to the base 2 of such a count, as it would be at the epoch: an event at time t adds
``2 ** (t / HALF_LIFE)``. So no count has to be halved in place, the order of items changes with events only, and no
number grows too large. Adding commutes, so any number of processes add their counts, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

HALF_LIFE_S = 7 * 86_400.0
MAX_AGE_HALF_LIVES = 64.0  # half-lives behind the newest added trend, below which a trend is not stored

Trends = Mapping[str, float]
"""Trends by item id."""


def sum_of_trends(first: float, second: float) -> float:
    """Return the trend of the events of both."""
    high, low = max(first, second), min(first, second)
    return high + math.log2(1 + 2.0 ** (low - high))


def trend_of(timestamp_us: int, events: float = 1.0) -> float:
    """Return the trend of so many events at that time."""
    return timestamp_us / (HALF_LIFE_S * 1e6) + math.log2(events)


def count_at(trend: float, now_us: int) -> float:
    """Return how many events of this moment the trend is worth."""
    return math.exp2(min(trend - now_us / (HALF_LIFE_S * 1e6), 1023.0))


def min_kept_trend(trends: Iterable[float]) -> float:
    """Return the trend below which trends are too old to matter, seen from the newest of these."""
    return max(trends) - MAX_AGE_HALF_LIVES
