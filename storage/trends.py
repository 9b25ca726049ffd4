"""Trends: how many visitors use each item now, as counts that halve with time.

A stored *trend* is the logarithm to the base 2 of such a count, on the scale of the tenant's trend clock: a visit at
the clock's position p adds ``2 ** p``. So no count has to be halved in place, the order of items changes with visits
only, and no number grows too large. Any number of processes add their visits.

A visitor counts once for an item until the clock has passed the next whole half-life, or RECENT_VISITORS others have
visited the item. So of an item's count at most 2, and one in RECENT_VISITORS + 1 of the rest, is any one visitor's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

HALF_LIFE_S = 7 * 86_400.0
MAX_STEP_S = 86_400.0
MAX_LAG_HALF_LIVES = 64.0  # half-lives behind the clock, below which a trend is not stored
MAX_LEAD_HALF_LIVES = 40.0  # ahead of the clock, above which a trend is damaged: nothing has 2 ** 40 visitors
RECENT_VISITORS = 32
VISITOR_BYTES = 4  # of a hash; with others of an item, one in 100 million visitors is taken for another one


class Visit(NamedTuple):
    """A use of an item.

    visitor  VISITOR_BYTES that stand for the user
    weight   how many visits of this moment it is worth: more than 0, at most 1
    """

    item_id: str
    visitor: bytes
    weight: float


@dataclass(frozen=True, slots=True)
class TrendClock:
    """A clock of half-lives that follows the clock of a store's machine, whatever that one is set to.

    It moves when visits are added: never back, and at most MAX_STEP_S at a time. So a clock that is set wrong, and
    right again, ages all trends by a day at most.

    position  in half-lives
    read_s    what the machine's clock showed when this one moved, in Unix seconds
    """

    position: float
    read_s: float

    @classmethod
    def first(cls, now_s: float) -> TrendClock:
        """Return the clock of a store without trends."""
        return cls(now_s / HALF_LIFE_S, now_s)

    @classmethod
    def parse(cls, text: str) -> TrendClock:
        """Parse what `str` returns."""
        position, read_s = text.split(" ")
        return cls(float(position), float(read_s))

    def __str__(self) -> str:
        """Return the clock as stores keep it."""
        return f"{self.position!r} {self.read_s!r}"

    def moved_to(self, now_s: float) -> TrendClock:
        """Return the clock when the machine's clock shows this."""
        step_s = min(max(now_s - self.read_s, 0.0), MAX_STEP_S)
        return TrendClock(self.position + step_s / HALF_LIFE_S, now_s)

    def trend_of(self, visits: float) -> float:
        """Return the trend of so many visits now."""
        return self.position + math.log2(visits)

    def count_of(self, trend: float) -> float:
        """Return how many visits of now the trend is worth."""
        return math.exp2(min(trend - self.position, MAX_LEAD_HALF_LIVES))

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest trend that is stored."""
        return self.position - MAX_LAG_HALF_LIVES, self.position + MAX_LEAD_HALF_LIVES


def sum_of_trends(first: float, second: float) -> float:
    """Return the trend of the visits of both."""
    high, low = max(first, second), min(first, second)
    return high + math.log2(1 + 2.0 ** (low - high))


def visitors_with(recent: bytes, visitor: bytes) -> bytes | None:
    """Return an item's recent visitors, newest first, with one more; None for a visitor who is among them."""
    if visitor in (recent[at : at + VISITOR_BYTES] for at in range(0, len(recent), VISITOR_BYTES)):
        return None
    return (visitor + recent)[: RECENT_VISITORS * VISITOR_BYTES]
